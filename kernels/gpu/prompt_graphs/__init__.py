"""Tiles of prompts whose keys are split among programs: what a graph needs for few queries after a long context."""
