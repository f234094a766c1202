"""The in-process Python API: `LLM` and `AsyncLLM`, text in and text out, no services."""
