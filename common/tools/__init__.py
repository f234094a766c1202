"""Tool calls in text: how models write them, and how they are parsed while they arrive."""
