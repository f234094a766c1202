"""Models that run by the code of Hugging Face's transformers, over our paged KV (`--model-impl transformers`)."""
