"""`mini-infer chat`: a conversation in the terminal, or line by line through a pipe.

`Conversation` holds the messages and interprets slash commands; `Chat` shows it. Neither knows how a server is
started (`cli/local_cluster`) or called (`cli/client`), or how an answer is shown (`cli/terminal`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.client.api_client import ApiClient, Message, add_client_arguments, client_for, describe
from cli.client.event_stream import RequestRecord
from cli.terminal.answer import AnswerView, PlainAnswer, view_of_stdout
from cli.terminal.keys import interrupted_once, keys_kept
from common.config import SettingsParser
from common.errors import InvalidRequestError, MiniInferError
from common.wings import has_wing

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt (no TEXT: remove it) and start afresh
/save FILE     write the conversation to FILE
/help          this list
/exit          leave (also Ctrl-D)
Ctrl-C stops the answer that is running."""

ReadLine = Callable[[], str]  # raises EOFError at the end


@dataclass
class Conversation:
    """The messages so far, and the commands that change them."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def command(self, line: str) -> str | None:
        """Execute a slash command; return what to tell the user, or None to leave. Raises InvalidRequestError."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return None
        if name == "/help":
            return HELP
        if name == "/reset":
            self.turns.clear()
            return "forgotten"
        if name == "/system":
            self.system = rest
            self.turns.clear()
            return "system prompt set" if rest else "system prompt removed"
        if name == "/save":
            return self._save(rest)
        raise InvalidRequestError(f"no command {name}: /help lists them")

    def _save(self, path: str) -> str:
        if not path:
            raise InvalidRequestError("/save needs a file name")
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
        try:
            Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"can't write {path}: {error.strerror}") from error
        return f"saved {len(self.turns)} messages to {path}"


@dataclass
class Chat:
    """Reads lines and streams answers. Interactive use differs only in console, line reader and view of answers."""

    client: ApiClient
    model: str
    conversation: Conversation
    console: Console
    params: dict[str, Any]
    open_view: Callable[[], AnswerView] = PlainAnswer

    def run(self, read_line: ReadLine) -> int:
        """Converse until /exit or the end of the input. Return 1 if the last answer failed."""
        failed = False
        while True:
            try:
                line = read_line()
            except EOFError:
                return int(failed)
            except KeyboardInterrupt:  # at the prompt, where it clears the line
                continue
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    told = self.conversation.command(line)
                    if told is None:
                        return int(failed)
                    self.console.print(told, style="dim", highlight=False, markup=False)
                else:
                    self._answer(line)
                failed = False
            except MiniInferError as error:
                failed = True
                self.console.print(f"error: {error}", style="red", highlight=False, markup=False)

    def _answer(self, question: str) -> None:
        turns = self.conversation.turns
        turns.append({"role": "user", "content": question})
        pieces: list[str] = []
        record = RequestRecord()
        stream = self.client.stream_chat(self.model, self.conversation.messages, record, **self.params)
        stopped = False
        try:
            with interrupted_once(), self.open_view() as view, contextlib.closing(stream):
                for piece in stream:
                    if piece:
                        pieces.append(piece)
                        view.write(piece)
                    else:
                        view.reason(record.reasoning)
        except KeyboardInterrupt:
            stopped = True
        except MiniInferError:
            turns.pop()
            raise
        if stopped:
            self.console.print("(stopped)", style="dim")
        turns.append({"role": "assistant", "content": "".join(pieces)})
        if record.num_output_tokens:
            self.console.print(describe(record), style="dim", highlight=False)


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer chat", description="Talk to a model.")
    add_client_arguments(parser)
    if has_wing("cli.local_cluster"):
        from cli.local_cluster.local_server import add_start_arguments

        add_start_arguments(parser)
    parser.add_argument("--system", default="", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default: 1024)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest token (default: 0.7)")
    parser.add_argument("--seed", type=int, help="repeat the same answers")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = build_parser()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if has_wing("cli.local_cluster"):
        from cli.local_cluster.local_server import find_or_start, parse_with_serve_flags

        arguments, serve_flags = parse_with_serve_flags(parser, argv)
        connection = find_or_start(arguments, serve_flags, interactive)
    else:
        arguments = parser.parse_args(argv)
        connection = client_for(arguments)
    params = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    if arguments.seed is not None:
        params["seed"] = arguments.seed
    with connection as (client, model):
        console = Console(stderr=not interactive)
        chat = Chat(client, model, Conversation(arguments.system), console, params, view_of_stdout)
        if not interactive:
            return chat.run(input)
        console.print(f"{model} on {client.url}. /help lists commands, Ctrl-D leaves.", style="dim", highlight=False)
        with keys_kept(sys.stdin.fileno()):
            return chat.run(_prompt_reader())


def _prompt_reader() -> ReadLine:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.history import FileHistory

    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history_path())),
        completer=WordCompleter(["/reset", "/system", "/save", "/help", "/exit"], sentence=True),
        complete_while_typing=False,
    )
    return lambda: session.prompt(ANSI("\x1b[1;36m> \x1b[0m"))


def history_path() -> Path:
    """Return the path of the input history, which only the user can read."""
    base = os.environ.get("XDG_STATE_HOME", "") or Path.home() / ".local" / "state"
    path = Path(base) / "mini-infer" / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return path
