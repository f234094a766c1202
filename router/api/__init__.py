"""The OpenAI API without HTTP: schemas, prompts, sampling parameters, choices and how they are rendered."""
