"""Decode with and without drafts, in turn, and how many drafts are accepted.

    python -m benchmarks.speculation --methods ngram,suffix --streams 1 --rounds 5
    python -m benchmarks.speculation --model FILE.gguf --methods ngram,draft:SMALLER.gguf --kinds edit
    python -m benchmarks.speculation --methods eagle:DIR --samplings coupled,rejection --temperature 1 --drafts 3
    python -m benchmarks.speculation --device cuda --model benchmarks/configs/qwen2.5-7b --load-format dummy
        --kv-cache-gb 4 --drafts 3 --streams 8 --accuracy 0.7 --no-adaptive-drafts

The model answers three kinds of questions greedily: to repeat a text, to change a program, and to write something of
its own; `random` has prompts of random tokens. With --accuracy prompts are random, weights are such that a token is
followed by itself, and each draft is right with that probability; a draft model or a head computes its drafts, of
which others are made then. It tells what drafts cost, and what they bring to whoever accepts so many. Each round goes
through all methods, one after the other, so that a busy machine slows all of them. What counts is the median of the
rounds' ratios. The time of prompts is not counted.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.model_folder import write_random_head
from common.config import add_arguments, from_namespace
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loader.load import read_config
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.runner import Sampled
from engine.speculation.draft_model import FromDraftModel
from engine.speculation.drafter import Drafter, Proposal
from engine.speculation.from_model import FromModel
from engine.speculation.from_tokens import FromTokens
from engine.speculation.metrics import METRICS

RANDOM_HEAD = "eagle:random"
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


Variant = tuple[str, int, str]  # --speculative, --num-speculative-tokens, --speculative-sampling
PLAIN: Variant = ("", 0, "")


@dataclass
class Figures:
    """Results of one engine for one kind of question, with one entry per round."""

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
    parser.add_argument("--methods", default="ngram", help="of --speculative, by commas; eagle:random: a random head")
    parser.add_argument("--drafts", type=harness.int_list, default=[0], help="of --num-speculative-tokens: 3,7")
    parser.add_argument("--samplings", default="coupled", help="of --speculative-sampling: coupled,rejection")
    parser.add_argument("--kinds", default="repeat,edit,write", help="of questions: repeat, edit, write, random")
    parser.add_argument("--streams", type=harness.int_list, default=[1], help="at once: 1,8")
    parser.add_argument("--accuracy", type=float_list, default=[], help="of a drafter that knows the answer: 0.7,0.9")
    parser.add_argument("--input", type=int, default=1024, help="random tokens, with --accuracy")
    parser.add_argument("--output", type=int, default=60, help="generated tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers; their seeds are fixed")
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    harness.choose_clock(options)  # before engines choose their threads
    config = from_namespace(EngineConfig, options)
    if options.accuracy and config.num_ranks > 1:
        parser.error("--accuracy changes the weights of this process alone: leave --tp and --pp out")
    variants: dict[Variant, dict[str, Any]] = {PLAIN: {}} | {
        (method, count, sampling): {
            "speculative": method, "num_speculative_tokens": count, "speculative_sampling": sampling,
        }
        for method in options.methods.split(",")
        for count in options.drafts
        for sampling in options.samplings.split(",")
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for settings in variants.values():
            if settings.get("speculative") == RANDOM_HEAD:
                shape = read_config(resolve_model(config.model), config)
                settings["speculative"] = f"eagle:{write_random_head(shape, Path(folder))}"
        engines = {variant: assemble(replace(config, **settings)) for variant, settings in variants.items()}
    if options.accuracy:
        for parts in engines.values():
            repeat_tokens(parts.runner)
            if isinstance(parts.runner._proposer, FromDraftModel):
                repeat_tokens(parts.runner._proposer.runner)
    gc.collect()
    gc.freeze()  # as an engine process does
    kinds = ["random"] if options.accuracy else options.kinds.split(",")
    for kind, streams, accuracy in product(kinds, options.streams, options.accuracy or [None]):
        compare(engines, config, kind, streams, accuracy, options)
    return 0


def float_list(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def compare(
    engines: Mapping[Variant, EngineParts], config: EngineConfig, kind: str, streams: int,
    accuracy: float | None, options: argparse.Namespace,
) -> None:  # fmt: skip
    clock, vocab_size = harness.choose_clock(options), engines[PLAIN].engine.vocab_size
    prompts = random_prompts(options, streams, vocab_size) if kind == "random" else asked_by(config, kind)
    params = replace(harness.greedy(options.output), temperature=options.temperature, seed_is_drawn=True)
    figures = {variant: Figures() for variant in engines}
    if accuracy is not None:
        draw = random.Random(0)
        for (method, count, _), parts in engines.items():
            if isinstance(parts.runner._proposer, FromModel):
                decide(parts.runner._proposer, accuracy, draw)
            elif method:
                parts.runner.propose_with(FromTokens(lambda _: Knowing(accuracy, draw), count, 1))
    for round_number in range(-1, options.rounds):  # the first one warms up
        first = (round_number + 1) * (streams if kind == "random" else 1)
        asked = [prompts[(first + stream) % len(prompts)] for stream in range(streams)]
        for variant, parts in engines.items():
            found = figures[variant] if round_number >= 0 else Figures()
            run(parts.engine, asked, replace(params, seed=max(round_number, 0)), clock, found)
    what = kind if accuracy is None else f"{kind}, {accuracy} right"
    for (method, count, sampling), found in figures.items():
        sampling = "" if sampling == "coupled" else sampling
        report(
            what,
            " ".join(filter(None, (method, str(count or ""), sampling))),
            found,
            figures[PLAIN],
            streams,
            options,
        )


def repeat_tokens(runner: Any) -> None:
    """Change the weights so that every token is followed by itself, whatever the rounding.

    A block's output is then small compared with the embedding, and the output projection is the embedding.
    """
    model = runner._forward._forwards._model if hasattr(runner, "_forward") else runner._model
    with torch.inference_mode():
        model.embedding.copy_(model.embedding.float().sign() * 30)
        model.head.weight.copy_(model.embedding)
        model.final_norm.fill_(1.0)


def random_prompts(options: argparse.Namespace, streams: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [harness.random_prompt(rng, vocab_size, options.input) for _ in range(streams * (1 + options.rounds))]


def asked_by(config: EngineConfig, kind: str) -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model(config.model))
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS[kind]]


class Knowing(Drafter):
    """Drafts the last token again, which is right, and errs at each draft with a probability."""

    def __init__(self, accuracy: float, draw: random.Random) -> None:
        self._accuracy, self._random = accuracy, draw

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal:
        """See Drafter."""
        last = token_ids[-1]
        drafts = [last if self._random.random() < self._accuracy else last ^ 1 for _ in range(max_tokens)]
        return Proposal(drafts, [0] * max_tokens)


def decide(proposer: FromModel, accuracy: float, draw: random.Random) -> None:
    """Change computed drafts of a model or a head: each equals the previous token with that probability."""
    propose = type(proposer).propose

    def changed(found: StepResult, sampled: Sequence[Sampled]) -> None:
        propose(proposer, found, sampled)
        requests = {row: request for _, row, request, _, _ in sampled}
        for row, drafts in found.drafts.items():
            last = requests[row].token_ids[-1]
            drafts.token_ids[:] = [last if draw.random() < accuracy else last ^ 1 for _ in drafts.token_ids]
            requests[row].drafter.record.drafts = list(drafts.token_ids)

    proposer.propose = changed  # type: ignore[method-assign]


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, clock: harness.Clock, figures: Figures
) -> None:
    """Answer all prompts at once."""
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


def report(kind: str, method: str, found: Figures, plain: Figures, streams: int, options: argparse.Namespace) -> None:
    ratios = [speed / other for speed, other in zip(found.speeds, plain.speeds, strict=True)]
    equal = sum(answer == other for answer, other in zip(found.answers, plain.answers, strict=True))
    figures = {
        "what": kind,
        "drafts": method or "none",
        "streams": streams,
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
