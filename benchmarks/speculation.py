"""Decode with and without drafts, in turn, and how many drafts are accepted.

    python -m benchmarks.speculation --methods ngram,suffix --streams 1 --rounds 5
    python -m benchmarks.speculation --model FILE.gguf --methods ngram,draft:SMALLER.gguf --kinds edit
    python -m benchmarks.speculation --device cuda --model benchmarks/configs/qwen2.5-7b --load-format dummy
        --kv-cache-gb 4 --drafts 3 --streams 8 --accuracy 0.7 --no-adaptive-drafts

The model answers three kinds of questions greedily: to repeat a text, to change a program, and to write something of
its own; `random` has prompts of random tokens. With --accuracy prompts are random, as weights may be, and the drafter
knows the answer: each draft is right with that probability. It tells what drafts cost, and what they bring to whoever
accepts so many. Each round goes through all methods, one after the other, so that a busy machine slows all of them.
What counts is the median of the rounds' ratios. The time of prompts is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import harness
from common.config import add_arguments, from_namespace
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams
from engine.speculation.drafter import Drafter, Proposal
from engine.speculation.from_tokens import FromTokens
from engine.speculation.metrics import METRICS

_, DRAFTED, ACCEPTED, _ = (metric.name for metric in METRICS)
PROGRAM = '''class Account:
    """A bank account."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def statement(self):
        lines = [f"{kind}: {amount}" for kind, amount in self.history]
        return "\\n".join(lines)
'''
EDITS = (
    "Rename the attribute `history` to `entries`.",
    "Add type annotations to all methods.",
    "Rename the class to `BankAccount`, and its method `statement` to `report`.",
)
TEXTS = (
    "The harbour of the old town is small. Every morning the fishing boats leave before the sun is up, and every "
    "evening they come back with nets full of herring, cod and mackerel. The people of the town buy the fish on the "
    "quay, and what is left is sent to the city by train.",
    "A bicycle with wide tyres rolls well over sand and snow. It is slower on a road, because more of the rubber "
    "touches the ground, and its frame is heavier. Those who ride on both keep two sets of wheels, which can be "
    "changed in five minutes without tools.",
    "To make bread, mix flour, water, salt and yeast, and let the dough rest for an hour in a warm place. Knead it "
    "for ten minutes, shape a loaf, and let it rest again until it has doubled in size. Then bake it for forty "
    "minutes in a hot oven.",
)
QUESTIONS = {
    "repeat": [f"Repeat this text:\n{text}" for text in TEXTS],
    "edit": [f"{edit} Answer with the whole program alone.\n\n```python\n{PROGRAM}```" for edit in EDITS],
    "write": [
        "Tell me a story about a fox and a bear in the forest.",
        "List ten facts about the ocean.",
        "Write a Python class for a bank account with deposit, withdraw and transfer methods.",
    ],
}


@dataclass
class Figures:
    """Results of one engine for one kind of question: an entry per round."""

    speeds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0  # of one stream
    num_drafted: int = 0
    num_accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__.splitlines()[0])
    add_arguments(parser, EngineConfig)
    parser.set_defaults(device="cpu", prefix_cache=False)
    parser.add_argument("--methods", default="ngram", help="of --speculative, separated by commas")
    parser.add_argument("--drafts", type=harness.int_list, default=[0], help="of --num-speculative-tokens: 3,7")
    parser.add_argument("--kinds", default="repeat,edit,write", help="of questions: repeat, edit, write, random")
    parser.add_argument("--streams", type=int, default=1, help="at once")
    parser.add_argument("--accuracy", type=float, help="of a drafter that knows the answer: 0 to 1")
    parser.add_argument("--input", type=int, default=1024, help="random tokens, with --accuracy")
    parser.add_argument("--output", type=int, default=60, help="generated tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers; their seeds are fixed")
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    clock = harness.choose_clock(options)
    config = from_namespace(EngineConfig, options)
    variants: dict[tuple[str, int], dict[str, Any]] = {("", 0): {}} | {
        (method, count): {"speculative": method, "num_speculative_tokens": count}
        for method in options.methods.split(",")
        for count in options.drafts
    }
    engines = {variant: assemble(replace(config, **settings)) for variant, settings in variants.items()}
    plain = engines["", 0].engine
    params = replace(harness.greedy(options.output), temperature=options.temperature, seed=0)
    for kind in ["random"] if options.accuracy is not None else options.kinds.split(","):
        prompts = random_prompts(options, plain.vocab_size) if kind == "random" else asked_by(config, kind)
        figures = {variant: Figures() for variant in engines}
        for round_number in range(-1, options.rounds):  # the first one warms up
            asked = [prompts[(round_number + stream) % len(prompts)] for stream in range(options.streams)]
            answers: list[list[int]] = []  # of the engine without drafts, which comes first
            for variant, parts in engines.items():
                found = figures[variant] if round_number >= 0 else Figures()
                if options.accuracy is not None and variant[1]:
                    knowing = Knowing(answers, options.accuracy)
                    parts.runner.propose_with(FromTokens(knowing.another, variant[1], 1))
                sequences = run(parts.engine, asked, params, clock, found)
                answers = answers or sequences
        for (method, count), found in figures.items():
            report(kind, f"{method} {count or ''}".strip(), found, figures["", 0], options)
    return 0


def random_prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [harness.random_prompt(rng, vocab_size, options.input) for _ in range(max(options.streams, 3))]


def asked_by(config: EngineConfig, kind: str) -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model(config.model))
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in QUESTIONS[kind]
    ]


class Knowing(Drafter):
    """Drafts from whole answers, prompts included, and errs at each token with a probability."""

    def __init__(self, answers: Sequence[list[int]], accuracy: float) -> None:
        self._answers = answers
        self._accuracy = accuracy
        self._random = random.Random(len(answers))
        self._answer: list[int] = []

    def another(self, _request: object) -> Knowing:
        return Knowing(self._answers, self._accuracy)

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal:
        """See Drafter. Wrong ones when the sequence is no known one any more, after a near tie."""
        size = len(token_ids)
        if self._answer[:size] != token_ids:
            self._answer = next((answer for answer in self._answers if answer[:size] == token_ids), [])
        known = self._answer[size : size + max_tokens] or [0] * max_tokens
        drafts = [token if self._random.random() < self._accuracy else 0 for token in known]
        return Proposal(drafts, [0] * len(drafts))


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, clock: harness.Clock, figures: Figures
) -> list[list[int]]:
    """Answer all prompts at once. Returns the sequences."""
    before = engine.figures()
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    harness.prefill(engine, requests)
    began, done, num_steps = clock(), harness.num_output_tokens(requests), engine.num_steps
    harness.drain(engine)
    num_tokens = harness.num_output_tokens(requests) - done
    figures.speeds.append(num_tokens / (clock() - began))
    figures.num_tokens += num_tokens
    figures.num_steps += (engine.num_steps - num_steps) * len(prompts)
    if before:  # with drafts
        after = engine.figures()
        figures.num_drafted += int(after[DRAFTED][0] - before[DRAFTED][0])
        figures.num_accepted += int(after[ACCEPTED][0] - before[ACCEPTED][0])
    figures.answers += [request.output_token_ids for request in requests]
    return [request.prompt_token_ids + request.output_token_ids for request in requests]


def report(kind: str, method: str, found: Figures, plain: Figures, options: argparse.Namespace) -> None:
    ratios = [speed / other for speed, other in zip(found.speeds, plain.speeds, strict=True)]
    equal = sum(answer == other for answer, other in zip(found.answers, plain.answers, strict=True))
    figures = {
        "what": kind,
        "drafts": method or "none",
        "streams": options.streams,
        "tok_s": round(statistics.median(found.speeds), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "tokens_per_step": round(found.num_tokens / found.num_steps, 2),
        "accepted": round(found.num_accepted / found.num_drafted, 2) if found.num_drafted else None,
        "equal_answers": f"{equal}/{len(plain.answers)}",
    }
    harness.report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
