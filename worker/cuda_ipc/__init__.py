"""Pulls between GPU pools of one host, whose processes map each other's memory."""
