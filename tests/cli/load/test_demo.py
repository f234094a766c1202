from rich.console import Console

from cli.api_client import ApiClient
from cli.load import demo


class Server(ApiClient):
    """Answers in one piece, as a model of bytes may."""

    def __init__(self):
        pass

    def stream_chat(self, model, messages, record, **params):
        record.chunk_times.append(0.01)
        record.num_output_tokens = 8
        yield "answer"


def test_an_answer_in_one_piece_has_no_speed(capsys):
    console = Console(width=200)
    console.print(demo.tour(Server(), "m", console))
    [row] = [
        line for line in capsys.readouterr().out.splitlines() if "same prefix, new question" in line and "│" in line
    ]
    assert [cell.strip() for cell in row.split("│")][2:5] == ["10 ms", "-", "8"]
