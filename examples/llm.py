"""`LLM`: a batch, two streams at once, a chat, and an answer of one of two words, in this process.

python examples/llm.py --model dry-run
"""

import argparse

from mini_infer import LLM, SamplingParams, grammar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="", help="a directory, a .gguf file, a hub id or dry-run; the default model"
    )
    llm = LLM(parser.parse_args().model)
    params = SamplingParams(max_tokens=24, temperature=0.0)

    for completion in llm.generate(["The capital of France is", "Water boils at"], params):
        print(f"{completion.finish_reason}: {completion.text!r}")

    # Both are computed in one batch; `zip` ends with the shorter one, and closing the other ends its generation.
    first, second = llm.stream("Once upon a time", params), llm.stream("It was a dark night", params)
    for one, other in zip(first, second, strict=False):
        print(f"{one!r:>20} | {other!r}")
    first.close()
    second.close()

    print(f"chat: {llm.chat([{'role': 'user', 'content': 'Why is the sky blue?'}], params).text!r}")
    either = SamplingParams(max_tokens=24, temperature=0.0, grammar=grammar.choice(["yes", "no"]))
    print(f"yes or no: {llm.chat([{'role': 'user', 'content': 'Is the sky blue?'}], either).text}")


if __name__ == "__main__":
    main()
