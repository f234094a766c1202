"""Suggests a flag for an unknown one."""
