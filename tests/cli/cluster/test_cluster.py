"""The plan of a local cluster, read back with each service's own parser."""

import argparse
import dataclasses
import socket
from typing import Any

import pytest

from cli.cluster.flags import build_parser, check_ports, parse_config
from cli.cluster.plan import plan_cluster
from cli.cluster.ports import free_ports
from cli.cluster.serve import ready_message
from common.config import to_argv
from common.errors import ConfigError
from common.model_files import DEFAULT_MODEL_NAME
from tests.cli.cluster.planned import RUN_DIR, plan, settings
from tests.deploy.settings import SETTINGS
from worker.ranks.stage import StageConfig


def test_default_cluster():
    _, specs = plan()
    assert list(specs) == ["agent", "prefill-0", "decode-0", "router"]
    router = settings(specs["router"])
    prefill, decode = settings(specs["prefill-0"]), settings(specs["decode-0"])
    assert router["prefill"] == f"127.0.0.1:{prefill['port']}"
    assert router["decode"] == f"127.0.0.1:{decode['port']}"
    assert prefill["agent_socket"] == settings(specs["agent"])["socket"] == "/run/x/agent.sock"
    assert prefill["run_dir"] == decode["run_dir"] == "/run/x"
    assert len({s["port"] for s in map(settings, specs.values())}) == 4
    assert [specs[name].stop_stage for name in specs] == [2, 1, 1, 0]


def test_one_worker_that_does_both():
    _, specs = plan("--prefill", "0", "--decode", "1")
    assert list(specs) == ["agent", "decode-0", "router"]
    assert settings(specs["router"])["prefill"] == ""


def test_several_workers_and_flags_of_every_service():
    _, specs = plan(
        "--prefill=2", "--decode=3", "--dry-run", "--policy=random", "--max-batch-size=4", "--chunk-prefill-size=64",
        "--kv-lease-seconds=5", "--host-tier-gb=0.5", "--port=8123", "--host=0.0.0.0", "--served-model-name=m",
        "--drain-grace-seconds=2",
    )  # fmt: skip
    assert len(specs) == 7
    router, decode, agent = (settings(specs[name]) for name in ("router", "decode-2", "agent"))
    assert (router["policy"], router["port"], router["host"], router["model"]) == (
        "random",
        8123,
        "0.0.0.0",
        "dry-run",
    )
    assert (decode["model"], decode["max_num_seqs"], decode["max_num_batched_tokens"]) == ("dry-run", 4, 64)
    assert (decode["host"], decode["kv_lease_seconds"], decode["worker_id"]) == ("127.0.0.1", 5.0, "decode-2")
    assert (agent["host_tier_gb"], agent["host"], agent["drain_grace_seconds"]) == (0.5, "127.0.0.1", 5.0)
    assert specs["decode-2"].grace_seconds == 7.0


def test_objectives_reach_the_router_and_every_engine():
    _, specs = plan("--prefill=1", "--decode=1", "--dry-run", "--ttft-objective-ms=800", "--itl-objective-ms=30")
    router, prefill, decode = (settings(specs[name]) for name in ("router", "prefill-0", "decode-0"))
    assert (router["ttft_objective_ms"], router["itl_objective_ms"]) == (800.0, 30.0)
    assert (prefill["itl_objective_ms"], decode["itl_objective_ms"]) == (30.0, 30.0)


def test_environment_is_read_once_and_not_inherited():
    env = {
        "MINI_INFER_MODEL": "dry-run", "MINI_INFER_PORT": "8009", "MINI_INFER_BLOCK_SIZE": "32",
        "MINI_INFER_WORKER_ID": "mine", "MINI_INFER_DECODE": "2", "PATH": "/bin",
    }  # fmt: skip
    _, specs = plan("--block-size", "16", env=env)
    assert "decode-1" in specs
    decode = settings(specs["decode-0"])
    assert (decode["block_size"], decode["model"], decode["worker_id"]) == (16, "dry-run", "decode-0")
    assert decode["port"] != 8009
    assert settings(specs["router"])["port"] == 8009
    assert specs["decode-0"].env["PATH"] == "/bin"


def test_secrets_travel_by_environment_to_those_that_need_them():
    env = {"MINI_INFER_API_KEY": "sesame", "MINI_INFER_CLUSTER_TOKEN": "of the user"}
    _, specs = plan("--dry-run", env=env)
    for name, spec in specs.items():
        assert not any("sesame" in part or "of the user" in part for part in spec.command)
        assert settings(spec)["cluster_token"] == "of the user"
        assert ("sesame" in spec.env.values()) is (name == "router")
    assert settings(specs["router"])["api_key"] == "sesame"
    assert {settings(spec)["cluster_token"] for spec in plan()[1].values()} == {"secret"}


@pytest.fixture
def fixed_ports(monkeypatch):
    monkeypatch.setattr("cli.cluster.flags.free_ports", lambda count: list(range(50000, 50000 + count)))


# Flags of `serve` itself, whose effect is not in the plan: tests/cli/cluster/test_serve.py and test_supervisor.py see
# it.
OF_SERVE_ITSELF = {"--verbose", "--exit-on-failure"}
OTHER_VALUES = {
    "--cors-origins": "https://x.example",
    "--model": "dry-run", "--host": "0.0.0.0", "--gpu-memory-fraction": "0.5", "--max-body-memory-mb": "64",
    "--max-num-batched-tokens": "512", "--log-level": "debug", "--metrics-port": "9100",
    "--simulated-steps": "base=1", "--speculative": "ngram", "--speculative-config": "{}",
    "--otlp-traces-endpoint": "http://x:4318/v1/traces", "--trace-sample-ratio": "0.5",
}  # fmt: skip


def other_value(action):
    """Return the flag with a value that is not its default."""
    name = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        no = next(text for text in action.option_strings if text.startswith("--no-"))
        return [no if str(action.help).endswith("(default: True)") else name]
    if action.choices:
        value = next(choice for choice in action.choices if f"(default: {choice})" not in str(action.help))
    else:
        value = OTHER_VALUES.get(name, "x" if action.type is str else "3")
    return [f"{name}={value}"]


def test_every_flag_has_an_effect_or_is_refused(fixed_ports):
    """Neither a flag nor a variable of the same name may be listed, taken and ignored."""

    def planned(*flags, env=None):
        config = parse_config(flags, env or {})
        return plan_cluster(config, RUN_DIR, {}, token="secret"), config.serve

    usual, usual_serve = planned()
    ignored = []
    for action in build_parser()._actions:
        if not isinstance(action, argparse._HelpAction):
            flags = other_value(action)
            try:
                specs, serve = planned(*flags)
            except ConfigError:
                alone = (
                    "--expert-parallel", "--expert-exchange=dispatch", "--stage-address=x",  # without --tp, --pp
                    "--expert-placement=x", "--num-redundant-experts=3", "--expert-rebalance-interval=3",
                    "--lora-modules=x", "--lora-target-modules=x", "--speculative-sampling=rejection",
                )  # fmt: skip
                assert flags[0] in alone
                continue
            has_effect = serve != usual_serve if flags[0] in OF_SERVE_ITSELF else specs != usual
            ignored += [] if has_effect else flags
    assert ignored == []


def test_services_that_read_the_same_variable_take_the_same_values_of_it():
    """MINI_INFER_LOG_LEVEL and the like are set once for all services."""
    choices = {}
    classes: set[Any] = {StageConfig}.union(*SETTINGS.values())
    for cls in classes:
        for field in dataclasses.fields(cls):
            choices.setdefault(field.name, set()).add(field.metadata["choices"])
    assert {name: values for name, values in choices.items() if len(values) > 1} == {}


def test_settings_that_the_cluster_makes_itself_are_no_flags_and_no_variables(fixed_ports, capsys):
    values = {
        "worker_id": "w", "advertise_host": "h", "run_dir": "/r", "agent_socket": "/s", "socket": "/s",
    }  # fmt: skip
    for name, value in values.items():
        with pytest.raises(SystemExit):
            parse_config([f"--{name.replace('_', '-')}={value}"], {})
        assert "unrecognized arguments" in capsys.readouterr().err
    env = {f"MINI_INFER_{name.upper()}": value for name, value in values.items()}
    assert parse_config([], env) == parse_config([], {})


def test_each_service_has_its_metrics_on_a_port_of_its_own():
    config, specs = plan("--prefill=2", "--metrics-port=9100")
    ports = {name: settings(spec).get("metrics_port") for name, spec in specs.items()}
    assert ports == {"prefill-0": 9100, "prefill-1": 9101, "decode-0": 9102, "agent": 9103, "router": 9104}
    told = "metrics: http://127.0.0.1:8000/metrics, prefill-0 on :9100, prefill-1 on :9101, decode-0 on :9102, agent"
    assert f"{told} on :9103, router on :9104\n" in ready_message(config, "m")
    assert "metrics" not in ready_message(plan()[0], "m")
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match=f"gives prefill-0 port {port}, which is the router's"):
        check_ports(plan(f"--metrics-port={port}", f"--port={port}")[0])
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="choose another with --metrics-port"),
    ):
        check_ports(plan(f"--metrics-port={taken.getsockname()[1]}", f"--port={port}")[0])


def test_no_host_tier_is_no_agent():
    config, specs = plan("--host-tier-gb=0", "--metrics-port=9100")
    assert list(specs) == ["prefill-0", "decode-0", "router"]
    assert settings(specs["decode-0"])["agent_socket"] == ""
    assert settings(specs["decode-0"])["host_tier_gb"] == 0
    assert list(config.metrics_ports) == ["prefill-0", "decode-0", "router"]
    with pytest.raises(ConfigError, match="must not be negative"):
        plan("--host-tier-gb=-1")


@pytest.mark.parametrize(("flags", "threads"), [([], 0), (["--num-threads=3"], 3)])
def test_workers_share_cores_unless_told_how_many(flags, threads):
    _, specs = plan("--decode=3", *flags)
    assert [settings(specs[name])["num_threads"] for name in ("prefill-0", "decode-0", "decode-2")] == [threads] * 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decode=0"], "at least one decode worker"),
        (["--tp=0"], "--tp 0: choose 1 to 256"),
        (["--prefill-tp=-1"], "--prefill-tp -1: choose 1 or more"),
        (["--ep=0"], "--ep 0: choose 1 or more"),
        (["--block-size=-1"], "--block-size -1"),
        (["--port=99999"], "--port 99999"),
        (["--metrics-port=65535"], "--metrics-port 65535"),
    ],
)
def test_settings_that_cannot_work_say_what_to_do(flags, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(flags, {})


def test_flags_of_vllm():
    given = (
        "--tensor-parallel-size=2 --pipeline-parallel-size=3 --enable-expert-parallel --num-gpu-blocks-override=64"
    )
    config = parse_config([*given.split(), "--no-enable-prefix-caching", "--gpu-memory-utilization=0.5"], {})
    assert (config.engine.tp, config.engine.pp) == (2, 3)
    assert "--expert-parallel" in to_argv(config.engine)
    assert (config.engine.num_gpu_blocks, config.engine.prefix_cache) == (64, False)
    assert {worker.gpu.gpu_memory_fraction for worker in config.workers} == {0.5}


def test_port_0_is_one_that_is_free():
    config, specs = plan("--port=0")
    assert config.router.port
    assert settings(specs["router"])["port"] == config.router.port
    assert f"127.0.0.1:{config.router.port}/readyz" in specs["router"].health_target
    assert f"http://127.0.0.1:{config.router.port}/v1" in ready_message(config, "m")


@pytest.mark.parametrize(
    ("host", "told"),
    [("192.0.2.1", "192.0.2.1 is no address of this machine"), ("no host", "no host is no address of this machine")],
)
def test_a_host_that_is_not_here_is_not_a_port_that_is_taken(host, told):
    with pytest.raises(ConfigError, match=told):
        check_ports(plan(f"--host={host}", "--port=0")[0])


def test_ready_message_names_the_model_and_hides_the_key():
    config, _ = plan("--api-key=sesame", "--port=8123", "--served-model-name=it's")
    text = ready_message(config, "real-name")
    assert "it's on http://127.0.0.1:8123 (1 prefill, 1 decode)" in text
    assert "$MINI_INFER_API_KEY" in text
    assert "sesame" not in text
    assert "--model" not in text
    assert "--model Qwen/Qwen3-0.6B\n" in ready_message(config, DEFAULT_MODEL_NAME)
    assert (config.serve.prefill, config.serve.decode) == (1, 1)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_the_url_is_one_that_clients_take(host: str, shown: str) -> None:
    assert parse_config(["--dry-run", f"--host={host}", "--port=8123"], {}).url == f"http://{shown}:8123"
