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
    """With ${NAME:-default} as Compose would see it without a .env, and its own tags left out."""
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    return yaml.safe_load(text.replace(" !override", ""))["services"]


SERVICES = services_of(TEXT)
CUDA = services_of(CUDA_TEXT)  # is merged into the other file's
OURS = {name: service for name, service in SERVICES.items() if name not in ("prometheus", "grafana")}


def settings(name):
    env = {key: str(value if value is not None else "") for key, value in OURS[name]["environment"].items()}
    assert env.keys() <= VARIABLES
    return parse(OURS[name]["command"], env)


def test_roles():
    modules = [service["command"][0] for service in OURS.values()]
    assert sorted(modules) == sorted(["router", "kvstore", *["prefill_service"] * 2, *["decode_service"] * 2])


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
        (mount,) = OURS[name]["volumes"]
        assert mount == "sockets:/run/mini-infer"
        found = settings(name)
        assert found.get("socket", found.get("agent_socket")) == "/run/mini-infer/agent.sock"


def test_health_checks_ask_the_port_that_is_served_and_start_order_waits_for_them():
    for name, service in OURS.items():
        command = service["healthcheck"]["test"]
        assert command[:4] == ["CMD", "python", "-m", "common.healthcheck"]
        assert f":{settings(name)['port']}" in command[4]
    assert set(SERVICES["router"]["depends_on"]) == {n for n in OURS if n.startswith(("prefill", "decode"))}
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[name]


def test_only_loopback_is_published():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_memory_is_bounded_everywhere():
    assert all("mem_limit" in service for service in SERVICES.values())


def test_example_settings_are_settings():
    named = set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))
    used = set(re.findall(r"\$\{([A-Z_]+):-", TEXT + CUDA_TEXT))
    assert named <= used


def test_on_a_gpu_the_workers_that_start_divide_it():
    assert CUDA.keys() <= SERVICES.keys()
    workers = {name: CUDA[name] for name in CUDA if name.startswith(("prefill", "decode"))}
    started = {name: service for name, service in workers.items() if "profiles" not in service}
    assert started.keys() == {"prefill-0", "decode-0"}
    total = 0.0
    for name, service in started.items():
        own = {key: str(value) for key, value in service["environment"].items()}
        env = {key: "" if value is None else str(value) for key, value in OURS[name]["environment"].items()} | own
        found = parse(OURS[name]["command"], env)
        assert found["kv_cache_gb"] == 0  # else the fraction would not count
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["capabilities"], device["device_ids"]) == (["gpu"], ["0"])
        total += found["gpu_memory_fraction"]
    assert 0.5 < total <= 0.9
    router = parse(CUDA["router"]["command"], {})
    assert [router["prefill"], router["decode"]] == ["prefill-0:9000", "decode-0:9000"]
    assert CUDA["router"]["depends_on"].keys() == started.keys()
    assert {CUDA[name]["image"] for name in (*started, "router", "agent")} == {"mini-infer:cuda"}


def test_compiled_kernels_are_kept_where_the_image_puts_them():
    image = (ROOT / "Dockerfile").read_text()
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(/\S+)/triton", image)
    assert f"{folder}\n" in image  # made, for the user of the services
    assert CUDA["prefill-0"]["volumes"] == CUDA["decode-0"]["volumes"] == [f"kernels:{folder}"]


def test_the_image_holds_every_package_that_the_project_lists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(packages) > 5
    assert packages <= allowed
