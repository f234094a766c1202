"""Documents to rerank, which a client may want truncated."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.prompts import text_prompt
from router.embeddings_api.schemas import RerankBody
from router.served_model import ServedModel


async def document_ids(model: ServedModel, body: RerankBody, text: str) -> list[int]:
    """Return a document's token ids, at most `max_tokens_per_doc` of its own. Raises InvalidRequestError."""
    most = body.max_tokens_per_doc
    token_ids = await text_prompt(text, model.tokenizer, model.limits(), body.add_special_tokens, "documents")
    if most is None or len(token_ids) <= most:
        return token_ids
    own = await text_prompt(text, model.tokenizer, model.limits(), False, "documents")
    return beginning(token_ids, own, most)


def beginning(token_ids: Sequence[int], own: Sequence[int], most: int) -> list[int]:
    """Keep the first `most` tokens of a text and the special tokens around it, as the vector may be that of the last.

    own: the text's tokens without special tokens.
    """
    for start in range(len(token_ids) - len(own) + 1):
        end = start + len(own)
        if token_ids[start:end] == own:
            return [*token_ids[: start + min(most, len(own))], *token_ids[end:]]
    return list(token_ids[:most])  # the tokenizer splits the text differently without special tokens
