"""`mini-infer demo`: a short tour of a running or temporary cluster, with measurements.

One answer; eight at once; the same long prefix twice; a tool call; a cancelled answer. Uses only `cli/client`. With
--compare, optimizations are measured on engines started for it (`cli/comparisons`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cli.client.api_client import ApiClient, ApiError, Message, add_client_arguments, describe, speed_of
from cli.client.event_stream import RequestRecord
from cli.local_cluster.local_server import add_start_arguments, find_or_start, parse_with_serve_flags
from cli.terminal.answer import view_of_stdout
from common.config import SettingsParser
from common.errors import ConfigError, InvalidRequestError
from common.model_files import DRY_RUN_MODEL_NAME
from common.wings import require_wing

QUESTION = "Why is the sky blue? Answer in two sentences."
TOOL_QUESTION = "What is the weather in Oslo?"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": CITY},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NUM_AT_ONCE = 8
MAX_TOKENS = 48
PREFIX_SENTENCES = 30  # fits the context of the dry-run model, whose tokens are bytes


def ask(
    client: ApiClient, model: str, question: str, show: bool = False, max_tokens: int = MAX_TOKENS
) -> RequestRecord:
    """Ask for one greedy answer, printed on standard output if `show`."""
    record = RequestRecord()
    messages: list[Message] = [{"role": "user", "content": question}]
    pieces = client.stream_chat(model, messages, record, temperature=0, max_tokens=max_tokens)
    if not show:
        for _piece in pieces:
            pass
        return record
    with view_of_stdout() as view:
        for piece in pieces:
            view.write(piece)
    return record


def tool_call(client: ApiClient, model: str) -> str:
    """Return the model's tool call as one line, or why there is none."""
    try:
        message = client.chat(
            model, [{"role": "user", "content": TOOL_QUESTION}], tools=[WEATHER], tool_choice=NAMED,
            temperature=0, max_tokens=MAX_TOKENS,
        )  # fmt: skip
    except ApiError as error:
        return f"no call: {error}"
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return "; ".join(f"{function['name']}({function['arguments']})" for function in functions) or "no call"


def cancel(client: ApiClient, model: str, num_pieces: int) -> float:
    """Stop reading after `num_pieces`. Return the seconds until the next short request has its whole answer."""
    messages: list[Message] = [{"role": "user", "content": "Count from one to one thousand in words."}]
    stream = client.stream_chat(model, messages, RequestRecord(), temperature=0, max_tokens=512, ignore_eos=True)
    with contextlib.closing(stream):
        for _, _piece in zip(range(num_pieces), stream, strict=False):
            pass
    begin = time.monotonic()
    ask(client, model, "Say yes.", max_tokens=4)
    return time.monotonic() - begin


def tour(client: ApiClient, model: str, console: Console) -> Table:
    """Show all five scenes; return the measurements."""
    table = Table("scene", "first token", "tokens/s", "tokens", "prompt tokens cached", title=model)

    def row(scene: str, rate: float, *answers: RequestRecord) -> None:
        table.add_row(
            scene,
            f"{max((record.ttft for record in answers if record.chunk_times), default=0.0) * 1e3:.0f} ms",
            f"{rate:.1f}" if rate else "-",  # none for an answer in one piece
            str(sum(record.num_output_tokens for record in answers)),
            f"{sum(record.num_cached_tokens for record in answers)} of "
            f"{sum(record.num_prompt_tokens for record in answers)}",
        )

    console.rule("one answer")
    console.print(QUESTION, style="dim")
    one = ask(client, model, QUESTION, show=True)
    row("one answer", speed_of(one), one)

    console.rule(f"{NUM_AT_ONCE} at once")
    begin = time.monotonic()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        questions = [f"Name a fact about the number {number}." for number in range(NUM_AT_ONCE)]
        answers = list(pool.map(lambda question: ask(client, model, question), questions))
    seconds = time.monotonic() - begin
    num_tokens = sum(record.num_output_tokens for record in answers)
    row(f"{NUM_AT_ONCE} at once (slowest first token)", num_tokens / seconds, *answers)
    console.print(f"{num_tokens} tokens in {seconds:.1f} s")

    console.rule("the same long prefix twice")
    document = (
        f"Document {uuid.uuid4()}. " + "The cluster keeps what it has computed of a prompt. " * PREFIX_SENTENCES
    )
    for scene, question in (
        ("long prompt, new", "What does it keep?"),
        ("same prefix, new question", "Who keeps it?"),
    ):
        record = ask(client, model, document + question, max_tokens=8)
        row(scene, speed_of(record), record)
        console.print(f"{scene}: {describe(record)}, {record.num_cached_tokens} prompt tokens from the cache")

    console.rule("a tool call")
    console.print(TOOL_QUESTION, style="dim")
    console.print(tool_call(client, model))

    console.rule("a cancelled answer")
    seconds = cancel(client, model, 3)
    console.print(f"stopped reading after 3 pieces; the next request was answered in {seconds * 1e3:.0f} ms")
    return table


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer demo", description="A short tour.")
    add_client_arguments(parser)
    add_start_arguments(parser)
    parser.add_argument(
        "--compare", nargs="?", const="all", metavar="NAME",
        help="measure on engines of its own what optimizations bring on this machine: batching, prefix-cache, "
        "chunked-prefill, quantization, speculation, cuda-graphs or disaggregation; without a name all of them",
    )  # fmt: skip
    parser.add_argument("--svg", metavar="FILE", help="also draw what --compare shows, as an animated picture")
    return parser


def compare_here(arguments: argparse.Namespace, serve_flags: Sequence[str]) -> None:
    """Measure comparisons. Raises ConfigError, InvalidRequestError."""
    require_wing("cli.comparisons", "--compare")
    from cli.comparisons.command import ALL, NAMES, compare

    if arguments.url or serve_flags:
        raise InvalidRequestError("--compare measures engines of its own: leave out --url and flags of serve")
    if arguments.compare not in (ALL, *NAMES):
        raise ConfigError(f"--compare {arguments.compare}: choose {', '.join(NAMES)}, or none of them for all")
    model = DRY_RUN_MODEL_NAME if arguments.dry_run else arguments.model
    compare(arguments.compare, model, Console(highlight=False), Path(arguments.svg) if arguments.svg else None)


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    arguments, serve_flags = parse_with_serve_flags(build_parser(), argv)
    if arguments.svg and not arguments.compare:
        raise ConfigError("--svg draws what --compare shows: add --compare")
    if arguments.compare:
        compare_here(arguments, serve_flags)
        return 0
    with find_or_start(arguments, serve_flags, sys.stdin.isatty()) as (client, model):
        console = Console(highlight=False)
        console.print(tour(client, model, console))
    return 0
