"""Pools in GPU memory that other processes map: another worker of the host, and the ranks of this one."""
