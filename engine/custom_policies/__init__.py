"""Scheduling policies of one's own (`--scheduling-policy module:Class`)."""
