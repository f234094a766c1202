"""Detects engines that hang, rather than being slow. Without this wing only the end of the process is noticed."""
