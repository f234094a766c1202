"""JSON schemas as people write them: how many are followed, and whether every finished answer is valid.

    git clone --depth 1 https://github.com/guidance-ai/jsonschemabench
    python -m benchmarks.accuracy.json_schemas jsonschemabench/data
    python -m benchmarks.accuracy.json_schemas jsonschemabench/data --url http://127.0.0.1:8000 --model dry-run

Each schema takes the path of a request's `response_format`: the router's check in a process of its own, then the
engine's matcher. Without a server, an answer is drawn uniformly from the allowed tokens, which is a model of random
weights at temperature 1. Such an answer seldom ends by chance; after --hurry tokens it ends strings, arrays and
objects where it may. With --url the server's model draws at temperature 1, with a bias towards the same tokens.
Neither makes an answer valid: they only choose among what the grammar allows.

`jsonschema` judges finished answers by the schema as it was written, with its formats as annotations. Numbers are
decimal, as in the standard: in binary, 0.07 is no multiple of 0.01.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import decimal
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np

from common.errors import InvalidRequestError, MiniInferError
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.text.tokenizer import Tokenizer
from engine.grammar.grammars import Grammars
from router.grammar.answer_format import ResponseFormat, answer_grammar

CLOSING_BIAS = 4.0  # of tokens that end something, requested from a server
FINISHED, UNFINISHED, REFUSED, FAILED = "finished", "unfinished", "refused", "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request: the answer's text, or the reason why there is none."""

    kind: str
    text: str = ""
    compile_seconds: float = 0.0  # of the router's check and the engine's compilation


def main(argv: Sequence[str] | None = None) -> int:
    report = measure(argv)
    report.print()
    return 1 if report.problems else 0


def measure(argv: Sequence[str] | None = None) -> Report:
    """Ask for answers to each schema, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="schemas, one a .json file, in folders of any depth")
    parser.add_argument("--sample", type=int, default=500, help="schemas drawn from all; 0: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, default=1, help="of each schema; 0: compile it only")
    parser.add_argument("--max-tokens", type=int, default=2_000)
    parser.add_argument("--hurry", type=int, default=150, help="tokens before an answer ends what it can")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="whose tokens are drawn; the server's model")
    parser.add_argument("--url", help="of a server that answers; default: answers are drawn here")
    parser.add_argument("--list", action="store_true", help="name each schema that is refused, fails or is violated")
    args = parser.parse_args(argv)
    paths = sorted(args.folder.rglob("*.json"))
    if args.sample:
        paths = sorted(random.Random(args.seed).sample(paths, min(args.sample, len(paths))))
    tokenizer = load_tokenizer(resolve_model(args.model))
    report = Report(args.list)
    with asyncio.Runner() as runner:
        ask = _server(args, tokenizer) if args.url else _drawn(args, tokenizer, runner)
        for path in paths:
            schema = json.loads(path.read_text())
            for number in range(max(1, args.answers)):
                outcome = ask(schema, number)
                report.add(str(path.relative_to(args.folder)), schema, outcome)
                if outcome.kind == REFUSED:
                    break
    return report


class Report:
    """Counts by kind and by reason."""

    def __init__(self, lists: bool) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.compile_seconds: list[float] = []
        self.problems = 0  # invalid answers
        self._lists = lists

    def add(self, name: str, schema: Mapping[str, Any], outcome: Outcome) -> None:
        kind, reason = outcome.kind, "" if outcome.kind in (FINISHED, UNFINISHED) else outcome.text
        if kind == FINISHED:
            kind, reason = verdict(schema, outcome.text)
        self.counts[kind] += 1
        self.problems += kind == "invalid"
        if outcome.compile_seconds:
            self.compile_seconds.append(outcome.compile_seconds)
        if reason:
            self.reasons[kind][re.sub(r'"[^"]{24,}"|\d{5,}', "_", reason)[:110]] += 1
            if self._lists:
                answer = outcome.text[:1_000] if kind == "invalid" else ""
                print(f"{kind}\t{name}\t{reason[:300]}\t{answer}", flush=True)

    def print(self) -> None:
        for kind, count in self.counts.most_common():
            print(f"{count:6d} {kind}")
            for reason, times in self.reasons[kind].most_common(40):
                print(f"{'':8s}{times:5d} {reason}")
        if len(self.compile_seconds) > 1:
            cuts = statistics.quantiles(self.compile_seconds, n=100)
            milliseconds = [1e3 * seconds for seconds in (cuts[49], cuts[98], max(self.compile_seconds))]
            print("check and compile: median {:.1f} ms, 99% {:.1f} ms, longest {:.1f} ms".format(*milliseconds))


def verdict(schema: Mapping[str, Any], text: str) -> tuple[str, str]:
    """Return whether a finished answer is valid, or why it cannot be judged."""
    exact = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
    try:
        value = json.loads(text, parse_float=decimal.Decimal)
    except ValueError as error:
        return "invalid", f"no JSON: {error}"
    with decimal.localcontext(prec=2_000):
        try:
            judge = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)(exact)
            errors = list(judge.iter_errors(value))
        except Exception as error:  # noqa: BLE001 - patterns that are not Python's, references to other documents
            return "not judged", type(error).__name__
    return ("invalid", f"{errors[0].validator}: {errors[0].message}") if errors else ("valid", "")


def _drawn(
    args: argparse.Namespace, tokenizer: Tokenizer, runner: asyncio.Runner
) -> Callable[[Mapping[str, Any], int], Outcome]:
    """Return a function that answers with uniformly drawn tokens."""
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size)
    grammars.prepare().result()
    ends = set(tokenizer.eos_token_ids)
    closing = [tokenizer.encode(mark)[-1] for mark in ('"', "]", "}")]

    def ask(schema: Mapping[str, Any], number: int) -> Outcome:
        rng = random.Random(f"{args.seed} {number}")
        began = time.perf_counter()
        try:
            grammar = runner.run(answer_grammar(_wanted(schema), None, 1))
            matcher = grammars.start(grammar).result()
        except InvalidRequestError as error:
            return Outcome(REFUSED, str(error), time.perf_counter() - began)
        took = time.perf_counter() - began
        output: list[int] = []
        while args.answers and len(output) < args.max_tokens:
            try:
                words = matcher.allowed(output)
            except MiniInferError as error:
                return Outcome(FAILED, str(error), took)
            assert words is not None  # None would mean that every token is allowed
            ending = () if len(output) < args.hurry else (*ends, *closing)
            token = next((each for each in ending if words[each // 32] >> (each % 32) & 1), None)
            if token is None:
                allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                token = int(allowed[rng.randrange(len(allowed))])
            if token in ends:
                return Outcome(FINISHED, tokenizer.decode(output), took)
            output.append(token)
        return Outcome(UNFINISHED, tokenizer.decode(output), took)

    return ask


def _server(args: argparse.Namespace, tokenizer: Tokenizer) -> Callable[[Mapping[str, Any], int], Outcome]:
    """Return a function that asks a server's model."""
    client = httpx.Client(base_url=args.url, timeout=300.0)
    marks = [tokenizer.encode(mark)[-1] for mark in ('"', "]", "}")]
    bias = dict.fromkeys(map(str, (*marks, *tokenizer.eos_token_ids)), CLOSING_BIAS)

    def ask(schema: Mapping[str, Any], number: int) -> Outcome:
        body = {
            "model": args.model, "prompt": "JSON:", "temperature": 1.0, "seed": args.seed + number,
            "max_tokens": args.max_tokens, "logit_bias": bias,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }  # fmt: skip
        response = client.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            kind = REFUSED if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR else FAILED
            return Outcome(kind, f"{response.status_code} {response.json()['error']['message']}")
        [choice] = response.json()["choices"]
        return Outcome(FINISHED if choice["finish_reason"] == "stop" else UNFINISHED, choice["text"])

    return ask


def _wanted(schema: Mapping[str, Any]) -> ResponseFormat:
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})


if __name__ == "__main__":
    sys.exit(main())
