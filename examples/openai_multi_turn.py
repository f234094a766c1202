"""A conversation with the `openai` package: each turn sends all that was said, and most of it is cached.

python examples/openai_multi_turn.py --url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = ["Name three large cities of Europe.", "Which of them is the oldest?", "What should I see there?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Answer in one sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=60)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        details = reply.usage.prompt_tokens_details if reply.usage else None
        print(f"> {question}\n{answer}")
        print(f"  ({details.cached_tokens if details else 0} tokens of the prompt were cached)")


if __name__ == "__main__":
    main()
