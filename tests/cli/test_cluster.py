"""The plan of a local cluster, read back with each service's own parser."""

from pathlib import Path

import pytest

from cli.cluster import ServeConfig, plan_cluster
from cli.gpus import visible_gpus
from cli.serve import parse_config, ready_message
from common.errors import ConfigError
from tests.deploy.settings import parse

RUN_DIR = Path("/run/x")


def plan(*flags, env=None, gpus=()):
    config = parse_config(flags, env or {})
    specs = plan_cluster(config, RUN_DIR, env or {}, token="secret", gpus=gpus)
    return config, {spec.name: spec for spec in specs}


def settings(spec):
    module = spec.command.index("cli.child") + 2
    return parse(list(spec.command[module:]), dict(spec.env))


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
    assert [specs[name].stage for name in specs] == [0, 1, 1, 1]
    assert [specs[name].stop_stage for name in specs] == [2, 1, 1, 0]


def test_one_worker_that_does_both():
    _, specs = plan("--prefill", "0", "--decode", "1")
    assert list(specs) == ["agent", "decode-0", "router"]
    assert settings(specs["router"])["prefill"] == ""


@pytest.mark.parametrize(
    ("gpus", "fractions", "visible"),
    [
        (["0"], [0.2667, 0.2667, 0.2667], ["0", "0", "0"]),
        (["4", "6"], [0.4, 0.8, 0.4], ["4,6", "6,4", "4,6"]),
        (["0", "1", "2", "3"], [0.8, 0.8, 0.8], ["0,1,2,3", "1,2,3,0", "2,3,0,1"]),
    ],
)
def test_workers_take_gpus_in_turn_and_share_one_equally(gpus, fractions, visible):
    _, specs = plan("--prefill=1", "--decode=2", "--gpu-memory-fraction=0.8", "--no-overlap", gpus=gpus)
    workers = [specs[name] for name in ("prefill-0", "decode-0", "decode-1")]
    assert [settings(worker)["gpu_memory_fraction"] for worker in workers] == fractions
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == visible
    assert not any(settings(worker)["overlap"] for worker in workers)


def test_gpus_are_what_the_environment_lists_or_dev_has():
    files = ["nvidia1", "nvidiactl", "nvidia0", "nvidia10", "nvidia-uvm", "null"]
    assert visible_gpus({}, files) == ["0", "1", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-7f"}, files) == ["3", "GPU-7f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, files) == []


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


def test_secrets_travel_by_environment_only():
    _, specs = plan("--api-key=sesame", "--dry-run")
    for spec in specs.values():
        assert not any("sesame" in part or "secret" in part for part in spec.command)
        assert settings(spec)["cluster_token"] == "secret"
    assert settings(specs["router"])["api_key"] == "sesame"


@pytest.mark.parametrize(("flags", "threads"), [([], 0), (["--num-threads=3"], 3)])
def test_workers_share_cores_unless_told_how_many(flags, threads):
    _, specs = plan("--decode=3", *flags)
    assert [settings(specs[name])["num_threads"] for name in ("prefill-0", "decode-0", "decode-2")] == [threads] * 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decode=0"], "at least one decode worker"),
        (["--tp=2"], "one GPU per worker for now"),
        (["--ep=2"], "one GPU per worker for now"),
        (["--quant-mode=w8a16"], "use int8-weight"),
        (["--quant-mode", "w8a16"], "use int8-weight"),
        (["--quant-mode=fp4"], "choose one of auto, none, int8-weight"),
        (["--block-size=-1"], "--block-size -1"),
        (["--port=99999"], "--port 99999"),
    ],
)
def test_settings_that_cannot_work_say_what_to_do(flags, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(flags, {})


def test_a_quantization_of_other_programs_in_the_environment():
    with pytest.raises(ConfigError, match="use int8-weight"):
        parse_config([], {"MINI_INFER_QUANT_MODE": "w8a16"})
    assert parse_config(["--quant-mode=none"], {"MINI_INFER_QUANT_MODE": "w8a16"}).engine.quant_mode == "none"


def test_ready_message_names_the_model_and_hides_the_key():
    config, _ = plan("--api-key=sesame", "--port=8123", "--served-model-name=it's")
    text = ready_message(config, "real-name")
    assert "it's on http://127.0.0.1:8123 (1 prefill, 1 decode)" in text
    assert "$MINI_INFER_API_KEY" in text
    assert "sesame" not in text
    assert ServeConfig().prefill == 1
