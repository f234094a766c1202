"""Workers of `serve` on several GPUs: the GPUs and the settings of each."""

import pytest

from cli.cluster.flags import parse_config
from cli.cluster.plan import plan_cluster
from cli.gpus.placement import Placement, choose_workers, place, visible_gpus
from cli.gpus.workers import placement_lines
from common.config import to_argv
from common.errors import ConfigError
from tests.cli.cluster.planned import RUN_DIR, plan, settings


@pytest.mark.parametrize(
    ("gpus", "fractions", "visible"),
    [
        (["0"], [0.2667, 0.2667, 0.2667], ["0", "0", "0"]),
        (["4", "6"], [0.4, 0.8, 0.4], ["4,6", "6,4", "4,6"]),
        (["0", "1", "2", "3"], [0.8, 0.8, 0.8], ["0,1,2,3", "1,0,2,3", "2,0,1,3"]),
    ],
)
def test_workers_take_gpus_in_turn_and_share_one_equally(gpus, fractions, visible):
    _, specs = plan("--prefill=1", "--decode=2", "--gpu-memory-fraction=0.8", "--no-overlap", gpus=gpus)
    workers = [specs[name] for name in ("prefill-0", "decode-0", "decode-1")]
    assert [settings(worker)["gpu_memory_fraction"] for worker in workers] == fractions
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == visible
    assert not any(settings(worker)["overlap"] for worker in workers)


def test_workers_of_several_ranks_take_as_many_gpus():
    assert place("abcd", [2, 2]) == [Placement(("a", "b"), "a,b,c,d", 1), Placement(("c", "d"), "c,d,a,b", 1)]
    assert place("ab", [2, 2]) == [Placement(("a", "b"), "a,b", 2)] * 2
    assert [each.num_sharing for each in place("abc", [2, 2])] == [2, 2]  # the second one takes c and a
    assert [each.num_sharing for each in place("abc", [2, 1, 1])] == [2, 1, 2]
    _, specs = plan("--prefill=1", "--prefill-tp=2", "--decode=1", gpus=["0", "1", "2"])
    assert [specs[name].env["CUDA_VISIBLE_DEVICES"] for name in ("prefill-0", "decode-0")] == ["0,1,2", "2,0,1"]
    assert [settings(specs[name])["tp"] for name in ("prefill-0", "decode-0")] == [2, 1]
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        plan("--tp=4", gpus=["0", "1"])


def test_a_pipeline_takes_a_gpu_for_each_stage():
    _, specs = plan("--pp=2", gpus=["0", "1", "2", "3"])
    assert [specs[name].env["CUDA_VISIBLE_DEVICES"] for name in ("decode-0", "decode-1")] == ["0,1,2,3", "2,3,0,1"]
    assert all(settings(specs[name])["pp"] == 2 for name in ("decode-0", "decode-1"))
    with pytest.raises(ConfigError, match="--pp 4: there are 2 GPUs"):
        plan("--pp=4", gpus=["0", "1"])
    with pytest.raises(ConfigError, match="--pp 2 --tp 2: there are 3 GPUs"):
        plan("--pp=2", "--tp=2", gpus=["0", "1", "2"])


NOT_GIVEN = -1


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "given", "chosen"),
    [
        (1, 1, (NOT_GIVEN, NOT_GIVEN), (0, 1)),
        (8, 1, (NOT_GIVEN, NOT_GIVEN), (0, 8)),
        (8, 2, (NOT_GIVEN, NOT_GIVEN), (0, 4)),
        (2, 2, (NOT_GIVEN, NOT_GIVEN), (0, 1)),
        (8, 1, (2, NOT_GIVEN), (2, 6)),
        (2, 1, (1, 1), (1, 1)),
        (1, 1, (1, NOT_GIVEN), (1, 1)),
    ],
)
def test_defaults_follow_gpus(num_gpus, num_ranks, given, chosen):
    prefill, decode, reason = choose_workers(given[0], given[1], num_ranks, num_gpus)
    assert (prefill, decode) == chosen
    assert bool(reason) == (given[0] == NOT_GIVEN)


def test_serve_says_which_worker_takes_which_gpu():
    config = parse_config([], {}, lambda device: ["4", "7"])
    assert (config.serve.prefill, config.serve.decode, config.engine.tp) == (0, 2, 1)
    first, second, why = placement_lines(config)
    assert (first, second) == ("decode-0 on GPU 4", "decode-1 on GPU 7")
    assert why.endswith("(--prefill, --decode and --tp override)")
    assert placement_lines(parse_config([], {})) == []


def test_gpus_are_what_the_environment_lists_or_dev_has():
    files = ["nvidia1", "nvidiactl", "nvidia0", "nvidia10", "nvidia-uvm", "null"]
    assert visible_gpus({}, files) == ["0", "1", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-7f"}, files) == ["3", "GPU-7f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, files) == []


def test_ep_gives_ranks_whole_experts():
    config = parse_config(["--ep=2"], {})
    assert (config.engine.tp, "--expert-parallel" in to_argv(config.engine)) == (2, True)
    config = parse_config(["--ep=2", "--expert-exchange=dispatch"], {})
    lines = [" ".join(spec.command) for spec in plan_cluster(config, RUN_DIR, {}, token="secret")]
    workers = [line for line in lines if "_service" in line]
    assert len(workers) == 2
    assert all("--expert-parallel" in line and "--expert-exchange=dispatch" in line for line in workers), workers
    config = parse_config(["--ep=2", "--expert-load-file=/r/loads"], {})
    lines = [" ".join(spec.command) for spec in plan_cluster(config, RUN_DIR, {}, token="secret")]
    assert all(f"--expert-load-file=/r/loads.{name}" in str(lines) for name in ("prefill-0", "decode-0"))
    with pytest.raises(ConfigError, match="--ep 2 --tp 4"):
        parse_config(["--ep=2", "--tp=4"], {})
