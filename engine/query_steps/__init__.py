"""Decode steps whose rows may have several queries: the last token of a request, then its drafts."""
