"""Answers that follow a JSON schema, which the `openai` package makes of a pydantic class, and one of some texts.

python examples/openai_json_schema.py --url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    population: int = Field(ge=0, le=100_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe Paris."}],
        response_format=City,
        max_tokens=400,
        seed=1,
    )
    print(reply.choices[0].message.parsed)
    verdict = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is this review positive or negative? 'I would come again.'"}],
        extra_body={"structured_outputs": {"choice": ["positive", "negative"]}},
    )
    print(verdict.choices[0].message.content)


if __name__ == "__main__":
    main()
