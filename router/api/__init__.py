"""The OpenAI API without HTTP: schemas, prompts, sampling parameters, the text of choices and its rendering."""
