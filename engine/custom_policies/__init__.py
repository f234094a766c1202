"""Scheduling policies besides the default: `fcfs`, and one's own (`--scheduling-policy module:Class`)."""
