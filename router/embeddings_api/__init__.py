"""OpenAI's embeddings of texts, and scores of pairs of texts by their cosine: see docs/serving.md."""
