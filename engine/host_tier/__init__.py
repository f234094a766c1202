"""Copies between a KV pool and host slots."""
