"""Decode with and without drafts on a CPU, in turn, and how many drafts are accepted.

    python -m benchmarks.speculation --drafts 3,7 --streams 1 --rounds 5

The default model answers two kinds of questions greedily: to repeat a text, and to write one of its own. Each round
does so with every number of drafts, one after the other, so that a busy machine slows all of them. What counts is the
median of the rounds' ratios. The time of prompts is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import harness
from common.model_files import resolve_model
from common.text.tokenizer import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine

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
    num_drafted: int = 0
    num_accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=harness.int_list, default=[3, 7], help="--num-speculative-tokens: 3,7")
    parser.add_argument("--streams", type=int, default=1, help="at once")
    parser.add_argument("--output", type=int, default=60, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ngram-max", type=int, default=EngineConfig.ngram_max)
    parser.add_argument("--ngram-min", type=int, default=EngineConfig.ngram_min)
    harness.add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    clock = harness.choose_clock(options)
    engines = {count: open_engine(count, options) for count in (0, *options.drafts)}
    tokenizer = load_tokenizer(resolve_model(""))
    for kind, questions in QUESTIONS.items():
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in questions
        ]
        figures = {count: Figures() for count in engines}
        for round_number in range(-1, options.rounds):  # the first one warms up
            asked = [prompts[(round_number + stream) % len(prompts)] for stream in range(options.streams)]
            for count, engine in engines.items():
                found = figures[count] if round_number >= 0 else Figures()
                run(engine, asked, options.output, clock, found)
        for count, found in figures.items():
            report(kind, count, found, figures[0], options)
    return 0


def open_engine(num_drafts: int, options: argparse.Namespace) -> Engine:
    config = EngineConfig(
        device="cpu",
        prefix_cache=False,
        num_gpu_blocks=64 * options.streams,
        num_speculative_tokens=num_drafts,
        ngram_max=options.ngram_max,
        ngram_min=options.ngram_min,
    )
    return assemble(config).engine


def run(
    engine: Engine, prompts: Sequence[list[int]], num_output: int, clock: harness.Clock, figures: Figures
) -> None:
    """Answer all prompts at once."""
    scheduler = engine.scheduler
    num_drafted, num_accepted = scheduler.num_draft_tokens, scheduler.num_accepted_tokens
    requests = [engine.add_request(prompt, harness.greedy(num_output)) for prompt in prompts]
    harness.prefill(engine, requests)
    began, done = clock(), harness.num_output_tokens(requests)
    harness.drain(engine)
    figures.speeds.append((harness.num_output_tokens(requests) - done) / (clock() - began))
    figures.num_drafted += scheduler.num_draft_tokens - num_drafted
    figures.num_accepted += scheduler.num_accepted_tokens - num_accepted
    figures.answers += [request.output_token_ids for request in requests]


def report(kind: str, num_drafts: int, found: Figures, plain: Figures, options: argparse.Namespace) -> None:
    ratios = [speed / other for speed, other in zip(found.speeds, plain.speeds, strict=True)]
    equal = sum(answer == other for answer, other in zip(found.answers, plain.answers, strict=True))
    figures = {
        "what": kind,
        "drafts": num_drafts,
        "streams": options.streams,
        "tok_s": round(statistics.median(found.speeds), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "accepted": round(found.num_accepted / found.num_drafted, 2) if found.num_drafted else None,
        "equal_answers": f"{equal}/{len(plain.answers)}",
    }
    harness.report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
