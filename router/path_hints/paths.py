"""The error message for a path that does not exist. Pure."""

from __future__ import annotations

from difflib import get_close_matches

MAX_GUESSED_PATH = 64  # characters; a longer path is not a typo
# Paths under /v1 in the APIs of OpenAI, Anthropic and vLLM, which are not misspelt paths of ours.
OTHER_APIS = frozenset(
    {"responses", "messages", "embeddings", "moderations", "audio", "images", "files", "batches", "rerank", "score"}
)


def no_such_path(path: str, paths: list[str]) -> str:
    """Suggest the intended path: most such requests come from a base URL in which /v1 is missing or doubled."""
    if len(path) > MAX_GUESSED_PATH:
        return "no such path"
    has_docs = "/docs" in paths
    if path.startswith("/v1/") and path.split("/")[2] in OTHER_APIS:
        return f"{path} is not supported by this server yet{'; /docs lists what is' * has_docs}"
    meant = [known for known in paths if path.endswith(known) or known == f"/v1{path.rstrip('/')}"]
    near = max(meant, key=len, default=None) or next(iter(get_close_matches(path, paths, 1)), None)
    return f"no such path; did you mean {near}?" if near else f"no such path{'; /docs lists all' * has_docs}"
