import subprocess
import sys

import pytest

from cli.main import COMMANDS, main, run_command
from common import VERSION
from common.errors import ConfigError


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_no_command_and_an_unknown_one_are_usage_errors(capsys):
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert "choose one of serve, chat, top, explain, demo, bench" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mini-infer {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--prot=1"], "mini-infer serve: error: unrecognized arguments: --prot=1; did you mean --port?"),
        (["serve", "--max_model_length=9"], "did you mean --max-model-len?"),
        (["serve", "--data-parallel-size", "2"], "--data-parallel-size 2; use --decode, the number of workers"),
        (["serve", "/models/x"], "unrecognized arguments: /models/x; a model is named with --model"),
        (["bench", "--num-requests", "many"], "argument --num-requests: invalid int value: 'many'"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [(ConfigError("the port is taken"), 1, "error: the port is taken\n"), (KeyboardInterrupt(), 130, "")],
)
def test_errors_become_one_line_and_an_exit_code(monkeypatch, capsys, raised, code, told):
    def fail(_argv):
        raise raised

    monkeypatch.setattr("cli.cluster.serve.run", fail)
    assert run_command("serve", []) == code
    assert capsys.readouterr().err == told


def test_help_imports_nothing_heavy():
    program = (
        "import contextlib, sys\nfrom cli.main import main\nmain(['--help'])\n"
        "for command in sys.argv[1:]:\n    with contextlib.suppress(SystemExit):\n        main([command, '--help'])\n"
        "    print(command, {'torch', 'starlette', 'transformers', 'grpc', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program, *COMMANDS], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert f"usage: mini-infer {command} " in done.stdout
        assert f"\n{command} set()\n" in done.stdout
