"""docker-compose.yml without a Docker engine: settings parse, health checks and start order fit."""

import re
import tomllib
from pathlib import Path

import yaml

from tests.deploy.settings import VARIABLES, parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
# ${NAME:-default} as Compose would see it without a .env
SERVICES = yaml.safe_load(re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", TEXT))["services"]
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
    used = set(re.findall(r"\$\{([A-Z_]+):-", TEXT))
    assert named <= used


def test_the_image_holds_every_package_that_the_project_lists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(packages) > 5
    assert packages <= allowed
