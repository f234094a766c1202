from rich.console import Console

from cli.client.api_client import ApiClient, ApiError
from cli.load import demo

CALL = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


class Server(ApiClient):
    """Answers in one piece, as a model of bytes may."""

    def __init__(self, message=None):
        self.message = message or {"tool_calls": [CALL]}

    def stream_chat(self, model, messages, record, **params):
        record.chunk_times.append(0.01)
        record.num_output_tokens = 8
        yield "answer"

    def chat(self, model, messages, **params):
        if params["tool_choice"]["function"]["name"] != params["tools"][0]["function"]["name"]:
            raise ApiError("no such tool")
        return self.message


def test_an_answer_in_one_piece_has_no_speed(capsys):
    console = Console(width=200)
    console.print(demo.tour(Server(), "m", console))
    [row] = [
        line for line in capsys.readouterr().out.splitlines() if "same prefix, new question" in line and "│" in line
    ]
    assert [cell.strip() for cell in row.split("│")][2:5] == ["10 ms", "-", "8"]


def test_a_tool_call_is_shown_and_a_refusal_too(monkeypatch):
    assert demo.tool_call(Server(), "m") == 'get_weather({"city": "Oslo"})'
    assert demo.tool_call(Server({"content": "Cold.", "tool_calls": None}), "m") == "no call"
    monkeypatch.setattr(demo, "NAMED", {"type": "function", "function": {"name": "get_time"}})
    assert demo.tool_call(Server(), "m") == "no call: no such tool"
