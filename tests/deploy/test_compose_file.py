"""docker-compose.yml without a Docker engine: settings parse, health checks and start order fit."""

import re
import tomllib
from pathlib import Path

import yaml

from tests.deploy.settings import VARIABLES, parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
CUDA_TEXT = (ROOT / "docker-compose.cuda.yml").read_text()


def services_of(text):
    """Read the services with ${NAME:-default} as without a .env, and without Compose's own tags."""
    text = re.sub(r"\$\{[A-Z_]+:?-([^}]*)\}", r"\1", text)
    return yaml.safe_load(text.replace(" !override", ""))["services"]


SERVICES = services_of(TEXT)
CUDA = services_of(CUDA_TEXT)  # is merged into the other file's
OURS = {name: service for name, service in SERVICES.items() if name not in ("prometheus", "grafana", "jaeger")}


PASSED_ON = {"HF_TOKEN", "HF_ENDPOINT"}  # for huggingface_hub, when they are set


def environment(service):
    return {key: str(value) for key, value in service.get("environment", {}).items() if value is not None}


def settings(name):
    assert OURS[name]["environment"].keys() - PASSED_ON <= VARIABLES
    return parse(OURS[name]["command"], environment(OURS[name]))


def test_each_service_understands_its_flags_and_variables():
    for name, service in OURS.items():
        found = settings(name)
        assert found["host"] == "0.0.0.0"
        assert found["cluster_token"]
        if "service" in service["command"][0]:
            assert found["worker_id"] == found["advertise_host"] == name


def test_the_router_knows_every_worker():
    found = settings("router")
    for role in ("prefill", "decode"):
        names = [name for name, service in OURS.items() if service["command"][0] == f"{role}_service"]
        assert found[role] == ",".join(f"{name}:{settings(name)['port']}" for name in names)


def test_sockets_lie_in_the_volume_that_all_workers_share():
    for name in OURS.keys() - {"router"}:
        assert "sockets:/run/mini-infer" in OURS[name]["volumes"]
        found = settings(name)
        assert found.get("socket", found.get("agent_socket")) == "/run/mini-infer/agent.sock"


def test_health_checks_ask_the_port_that_is_served_and_start_order_waits_for_them():
    for name, service in OURS.items():
        *command, url = service["healthcheck"]["test"]
        assert command == ["CMD", "python", "-I", "-S", "/app/common/net/healthcheck.py"]
        port = settings(name)["port" if name == "router" else "metrics_port"]
        assert url == f"http://127.0.0.1:{port}/readyz"
    assert set(SERVICES["router"]["depends_on"]) == {n for n in OURS if n.startswith(("prefill", "decode"))}
    for name in OURS.keys() - {"router", "agent"}:
        assert OURS[name]["depends_on"] == {"agent": {"condition": "service_healthy"}}


def test_only_loopback_is_published():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_traces_are_off_and_go_where_their_profile_takes_them_when_asked_for():
    found = settings("router")
    assert (found["otlp_traces_endpoint"], found["trace_sample_ratio"]) == ("", 1.0)
    jaeger = SERVICES["jaeger"]
    assert jaeger["profiles"] == ["tracing"]
    [told] = re.findall(r"http://\S+:\d+", (ROOT / ".env.example").read_text())
    host, port = told.removeprefix("http://").split(":")
    assert SERVICES[host] is jaeger
    assert f"--collector.otlp.http.host-port=:{port}" in jaeger["command"]


def test_memory_is_bounded_everywhere():
    assert all("mem_limit" in service for service in SERVICES.values())


def test_the_example_of_settings_lists_every_variable_that_is_read_with_its_default():
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)", (ROOT / ".env.example").read_text(), re.M))
    used = dict(re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", CUDA_TEXT + TEXT))  # the second one wins
    assert example.keys() == used.keys() | PASSED_ON | {"COMPOSE_PROFILES"}
    shown_by_example = {"MINI_INFER_PREFILL", "COMPOSE_PROFILES"}
    differing = {name for name in used if example[name] and example[name] != used[name]}
    assert differing <= shown_by_example


def test_models_that_are_downloaded_are_kept_for_all_who_read_them():
    image = (ROOT / "Dockerfile").read_text()
    (home,) = re.findall(r"HF_HOME=(/\S+)/huggingface", image)
    assert f"install -d -o mini-infer -g mini-infer {home}\n" in image
    for name in OURS.keys() - {"agent"}:
        assert f"cache:{home}" in OURS[name]["volumes"]
        assert OURS[name]["environment"].keys() >= PASSED_ON


def test_the_image_is_built_once_with_arguments_that_it_declares():
    assert [name for name, service in SERVICES.items() if "build" in service] == ["agent"]
    assert len({service["image"] for service in OURS.values()}) == 1
    arguments = OURS["agent"]["build"]["args"]
    declared = dict(re.findall(r"^ARG ([A-Z_]+)=(.*)", (ROOT / "Dockerfile").read_text(), re.M))
    assert arguments.keys() == declared.keys()
    assert arguments["BASE_IMAGE"] == declared["BASE_IMAGE"]


def merged(name):
    """Return the settings of a service with the file for GPUs."""
    return parse(CUDA[name].get("command", OURS[name]["command"]), environment(OURS[name]) | environment(CUDA[name]))


def test_on_a_gpu_one_worker_takes_it_and_a_second_one_another():
    assert CUDA.keys() <= SERVICES.keys()
    assert {name: service["profiles"] for name, service in CUDA.items() if "profiles" in service} == {
        "prefill-0": ["disaggregated"], "prefill-1": ["cpu"], "decode-1": ["cpu"]
    }  # fmt: skip
    for name, gpu in (("decode-0", "0"), ("prefill-0", "1")):
        found = merged(name)
        assert found["kv_cache_gb"] == 0  # otherwise the fraction would not count
        assert found["gpu_memory_fraction"] == 0.9
        (device,) = CUDA[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["capabilities"], device["device_ids"]) == (["gpu"], [gpu])
    router = merged("router")
    assert [router["prefill"], router["decode"]] == ["", "decode-0:9000"]
    assert CUDA["router"]["depends_on"] == ["decode-0"]
    assert {CUDA[name]["image"] for name in ("agent", "decode-0", "prefill-0", "router")} == {"mini-infer:cuda"}


def test_compiled_kernels_are_kept_with_the_models():
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(/\S+)/triton", (ROOT / "Dockerfile").read_text())
    assert f"cache:{folder}" in OURS["decode-0"]["volumes"]


def test_the_image_holds_every_package_that_the_project_lists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(packages) > 5
    assert packages <= allowed
