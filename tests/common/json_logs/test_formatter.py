"""Lines of JSON are whole, and say nothing that they must not."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from common.errors import ConfigError
from common.json_logs.formatter import JsonFormatter, json_line, message_of
from common.logging import about


def test_a_json_line_has_the_time_in_utc_and_no_message_of_a_strange_exception() -> None:
    record = logging.makeLogRecord(
        {"name": "worker.front.front", "levelname": "ERROR", "msg": "two\nlines: %s", "args": ("é",)}
    )
    record.created = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC).timestamp()
    prompt = "the" + " prompt"
    try:
        try:
            int(prompt)
        except ValueError as error:
            raise ConfigError("--port: choose another") from error
    except ConfigError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter("decode").format(record)
    assert "\n" not in line
    assert "the prompt" not in line
    fields = json.loads(line)
    traceback = fields.pop("traceback")
    assert fields == {
        "time": "2026-01-02T03:04:05.678Z", "level": "ERROR", "service": "decode", "logger": "worker.front.front",
        "message": "two\nlines: é",
    }  # fmt: skip
    assert "ConfigError: --port: choose another" in traceback
    assert "ValueError" in traceback


def test_a_json_line_about_a_request_has_its_id() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "KV pull failed", **about("cmpl-1-0")})
    assert json.loads(JsonFormatter("decode").format(record))["request_id"] == "cmpl-1"


def test_lines_of_other_programs_become_json_and_ours_stay() -> None:
    ours = json_line("prefill-0", "Segmentation fault")
    assert json.loads(ours)["service"] == "prefill-0"
    assert json_line("prefill-1", ours) == ours.replace("prefill-0", "prefill-1", 1)
    assert message_of(ours) == "Segmentation fault"
    assert [message_of(line) for line in ("{", "{}", '["message"]', "plain")] == ["{", "{}", '["message"]', "plain"]


CHILD = """
import logging
from common.logging import setup_logging
setup_logging("x", "info", "json")
logging.getLogger("x").info("hello")
raise KeyError("the prompt")
"""


def test_the_end_of_a_process_is_json_too() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=200, check=False)
    first, last = map(json.loads, child.stderr.splitlines())
    assert (first["message"], last["message"]) == ("hello", "this process ends: KeyError")
    assert "the prompt" not in child.stderr


@pytest.mark.parametrize(
    "service",
    ["router", "prefill_service", "decode_service", pytest.param("kvstore", marks=pytest.mark.wing("kvstore.tier"))],
)
def test_a_service_says_why_it_does_not_start_in_its_format(service: str) -> None:
    wrong = ["--model=/nowhere", "--decode=127.0.0.1:1"] if service == "router" else ["--host=0.0.0.0"]
    command = [sys.executable, "-m", service, "--log-format=json", *wrong]
    child = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert child.returncode == 1
    lines = [json.loads(line) for line in child.stderr.splitlines()]
    assert lines[-1]["level"] == "ERROR"
    assert lines[-1]["message"]
