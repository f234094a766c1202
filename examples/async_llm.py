"""`AsyncLLM`: concurrent tasks share one engine, and a cancelled one frees what it held.

python examples/async_llm.py --model dry-run
"""

import argparse
import asyncio

from mini_infer import AsyncLLM, SamplingParams


async def tell(llm: AsyncLLM, name: str, prompt: str) -> None:
    async for piece in llm.stream(prompt, SamplingParams(max_tokens=16, temperature=0.0)):
        print(f"{name}: {piece!r}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="", help="a directory, a .gguf file, a hub id or dry-run; the default model"
    )
    async with AsyncLLM(parser.parse_args().model) as llm:
        endless = asyncio.create_task(llm.generate("On and on", SamplingParams(max_tokens=2000, ignore_eos=True)))
        await asyncio.gather(
            tell(llm, "Ann", "The capital of France is"),
            tell(llm, "Bob", "Water boils at"),
        )
        endless.cancel()
        answer = await llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(max_tokens=24))
        print(f"chat: {answer.text!r}")


if __name__ == "__main__":
    asyncio.run(main())
