"""A streamed chat completion with the `openai` package, from a cluster that runs (`make serve`).

python examples/openai_streaming.py --url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:  # the last chunk has no choices
            print(f"\n{chunk.usage.completion_tokens} tokens from {model}")


if __name__ == "__main__":
    main()
