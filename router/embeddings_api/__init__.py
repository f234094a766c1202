"""OpenAI's embeddings of texts, and scores of pairs of texts by cosine similarity: see docs/serving.md."""
