"""The plan of a local cluster, read back with each service's own parser."""

from pathlib import Path

from cli.cluster.flags import parse_config
from cli.cluster.plan import plan_cluster
from tests.deploy.settings import parse

RUN_DIR = Path("/run/x")


def plan(*flags, env=None, gpus=()):
    config = parse_config(flags, env or {}, lambda device: gpus)
    specs = plan_cluster(config, RUN_DIR, env or {}, token="secret")
    return config, {spec.name: spec for spec in specs}


def settings(spec):
    module = spec.command.index("cli.cluster.child") + 2
    return parse(list(spec.command[module:]), dict(spec.env))
