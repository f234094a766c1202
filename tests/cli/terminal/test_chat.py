import io
import stat

import pytest
from rich.console import Console

from cli.client.api_client import describe
from cli.client.event_stream import RequestRecord
from cli.terminal import chat as command
from cli.terminal.answer import TerminalAnswer, view_of_stdout
from cli.terminal.chat import Chat, Conversation, history_path
from common.errors import InvalidRequestError, UnavailableError


class FakeClient:
    """Answers from a list; an exception in the list is raised in its place."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.seen = []

    def stream_chat(self, model, messages, record, **params):
        self.seen.append(([dict(message) for message in messages], params))
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            record.num_output_tokens += 1
            yield piece


def talk(client, *lines, conversation=None):
    """Return the exit code, the console's output, and the conversation."""
    conversation = conversation or Conversation()
    shown = io.StringIO()
    chat = Chat(client, "m", conversation, Console(file=shown, width=200), {"temperature": 0})
    queue = iter(lines)

    def read_line():
        line = next(queue, None)
        if line is None:
            raise EOFError
        return line

    return chat.run(read_line), shown.getvalue(), conversation


def test_the_conversation_grows_and_the_answer_is_streamed(capsys):
    client = FakeClient(["Hel", "lo"], ["Bye"])
    code, shown, conversation = talk(client, "hi", "", "and?")
    assert code == 0
    assert capsys.readouterr().out == "Hello\nBye\n"
    assert [m["content"] for m in client.seen[1][0]] == ["hi", "Hello", "and?"]
    assert client.seen[0][1] == {"temperature": 0}
    assert len(conversation.turns) == 4
    assert "2 tokens" in shown


def test_a_pipe_gets_what_the_server_sent(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    pieces = ["# A **b", "**  \n", "```\r\n", "x" * 200, " \t"]
    with view_of_stdout() as view:
        for piece in pieces:
            view.write(piece)
    assert capsys.readouterr() == ("".join(pieces) + "\n", "")


@pytest.mark.parametrize("has_markdown", [True, False])
def test_an_answer_cannot_command_the_terminal(capsys, monkeypatch, has_markdown):
    monkeypatch.setattr("cli.terminal.answer.has_wing", lambda package: has_markdown)
    with TerminalAnswer(Console(file=io.StringIO())) as view:
        view.write("a\x1b]52;c;aGk=\x07 **b")
        view.write("**\r\n\x9b2Jc\x00")
    b = "\x1b[0;1mb\n\x1b[0m" if has_markdown else "**b**\n"
    assert capsys.readouterr().out == f"a␛]52;c;aGk=␇ {b}�2Jc␀\n"


def test_without_local_clusters_chat_talks_to_a_server_that_runs(monkeypatch, capsys):
    monkeypatch.setattr(command, "has_wing", lambda package: False)
    with pytest.raises(UnavailableError, match="start one with `mini-infer serve`"):
        command.run(["--url", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit):
        command.run(["--start"])
    assert "unrecognized arguments: --start" in capsys.readouterr().err


def test_commands():
    client = FakeClient(["a"], ["b"])
    _, shown, conversation = talk(client, "/system Be brief.", "x", "/help", "/reset", "y", "/exit", "never read")
    assert client.seen[0][0][0] == {"role": "system", "content": "Be brief."}
    assert [m["content"] for m in client.seen[1][0]] == ["Be brief.", "y"]
    assert "/save FILE" in shown
    assert conversation.messages[0]["role"] == "system"
    conversation.command("/system")
    assert conversation.messages == []


def test_an_unknown_command_is_refused_and_not_sent():
    client = FakeClient()
    code, shown, _ = talk(client, "/fly")
    assert (code, client.seen) == (1, [])
    assert "/help lists them" in shown


def test_saving(tmp_path):
    conversation = Conversation("S", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    assert conversation.command(f"/save {tmp_path / 'x.txt'}") == f"saved 2 messages to {tmp_path / 'x.txt'}"
    assert (tmp_path / "x.txt").read_text() == "system: S\n\nuser: q\n\nassistant: a\n"
    with pytest.raises(InvalidRequestError, match="file name"):
        conversation.command("/save")
    with pytest.raises(InvalidRequestError, match="can't write"):
        conversation.command(f"/save {tmp_path / 'no' / 'x.txt'}")


def test_ctrl_c_keeps_the_part_that_came(capsys):
    client = FakeClient(["one ", "two", KeyboardInterrupt()], ["three"])
    _, shown, _ = talk(client, "count", "go on")
    assert "(stopped)" in shown
    assert [m["content"] for m in client.seen[1][0]] == ["count", "one two", "go on"]


def test_a_failed_answer_is_shown_and_forgotten(capsys):
    client = FakeClient(["par", UnavailableError("gone")], ["fine"])
    code, shown, conversation = talk(client, "a", "b")
    assert code == 0
    assert "error: gone" in shown
    assert [m["content"] for m in conversation.turns] == ["b", "fine"]
    assert talk(FakeClient([UnavailableError("gone")]), "a")[0] == 1


def test_stats_line():
    record = RequestRecord(chunk_times=[0.05, 0.5, 1.05], num_output_tokens=51)
    assert describe(record) == "first token 50 ms, 50.0 tokens/s, 51 tokens"
    assert describe(RequestRecord(chunk_times=[0.05], num_output_tokens=1)) == "first token 50 ms, 1 tokens"
    assert describe(RequestRecord()) == "0 tokens"


def test_history_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert history_path() == path


def test_reasoning_is_shown_while_there_is_no_answer_and_never_kept(capsys):
    """Its last part is shown in the spinner's line, without control characters."""
    shown = io.StringIO()
    with TerminalAnswer(Console(file=shown, force_terminal=True, width=80)) as view:
        view.reason("First.\nThen \x1b[2J it")
        assert view._status is not None
        assert str(view._status.status) == "thinking: First. Then ␛[2J it"
        view.write("Yes.")
    assert capsys.readouterr().out == "Yes.\n"

    class Reasoning(FakeClient):
        def stream_chat(self, model, messages, record, **params):
            record.reasoning += "Hm."
            yield ""
            yield from super().stream_chat(model, messages, record, **params)

    _, _, conversation = talk(Reasoning(["Yes."]), "?")
    assert capsys.readouterr().out == "Yes.\n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "Yes."}
