"""documented_commands.toml lists every command of the documentation; what the commands name exists.

Flags are looked at in test_documented_flags.py. Commands that need a cluster run in test_wheel.py, among others.
"""

from __future__ import annotations

import ast
import base64
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.kubernetes.kustomize import build, copy_with_secret
from tests.packaging.documentation import GUIDES, RECORDS, ROOT, commands_of, documented, groups, matches, page

KUBECTL = "tests/packaging/test_documented_commands.py::test_what_kubectl_is_told_makes_and_names_what_exists"


def commands(program: str) -> list[list[str]]:
    """Return the arguments of every documented command of a program."""
    return [shlex.split(command)[1:] for command in documented() if command.split()[0] == program]


def test_every_command_is_in_the_table_once_and_the_table_has_no_other() -> None:
    patterns = [pattern for group in groups() for pattern in group.patterns]
    for command, pages in documented().items():
        found = [pattern for pattern in patterns if matches(pattern, command)]
        assert len(found) == 1, f"{command} in {pages}: {found}"
    unused = [pattern for pattern in patterns if not any(matches(pattern, command) for command in documented())]
    assert unused == []


def test_what_the_table_says_runs_them_exists() -> None:
    for group in groups():
        assert bool(group.tests) + bool(group.script) + bool(group.reason) == 1, group
        for test in group.tests:
            path, name = test.split("::")
            assert name in (getattr(node, "name", "") for node in ast.parse((ROOT / path).read_text()).body), test
        script = (ROOT / group.script).read_text().replace("'", '"') if group.script else ""
        for command in group.commands if group.script else ():
            last = command.split()[-1].partition("==")[0]  # constraints.txt has versions
            assert last in script, f"{group.script} does not run {command}"


def test_versions_that_are_named_are_those_that_are_tested() -> None:
    named = {word for command in documented() for word in command.split() if "==" in word}
    assert named
    assert named <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_make_has_the_targets_and_lists_them() -> None:
    targets = {arguments[0] for arguments in commands("make")}
    assert len(targets) >= 10
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert targets <= {line.split(" - ")[0] for line in listed.splitlines()}
    for target in ("serve", "chat"):
        argv, bare = ["make", "-n", target], {"PATH": os.environ["PATH"]}  # not what a make around this one tells it
        printed = subprocess.run(argv, cwd=ROOT, env=bare, capture_output=True, text=True, check=True).stdout
        assert printed.splitlines()[-1].strip() == f".venv/bin/mini-infer {target}"


@pytest.mark.skipif(not (shutil.which("kubectl") and shutil.which("openssl")), reason="are what it runs")
def test_what_kubectl_is_told_makes_and_names_what_exists(tmp_path: Path) -> None:
    copy_with_secret(tmp_path)
    (tmp_path / "k8s/components/secret/secret.env").unlink()
    for command in commands_of(KUBECTL):  # those that write the secret
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    made, names = [], set()
    for arguments in commands("kubectl"):
        line = " ".join(arguments)
        if arguments[0] == "apply":
            done = subprocess.run(
                ["kubectl", "kustomize", arguments[-1]], cwd=tmp_path, capture_output=True, text=True, check=True
            )
            made += list(yaml.safe_load_all(done.stdout))
        else:
            assert arguments[:2] == ["-n", "mini-infer"], line
        names |= set(re.findall(r"\b(service|deployment|statefulset)/(\w+)", line))
    objects = {(document["kind"].lower(), document["metadata"]["name"]): document for document in made}
    assert names <= objects.keys()
    assert len(names) >= 4
    assert {document["metadata"].get("namespace", "mini-infer") for document in made} == {"mini-infer"}
    assert 80 in [port["port"] for port in objects["service", "router"]["spec"]["ports"]]  # port-forward 8000:80
    (secret,) = (document["data"] for document in made if document["kind"] == "Secret")
    for key in ("cluster-token", "api-key"):
        assert re.fullmatch(r"[0-9a-f]{64}", base64.b64decode(secret[key]).decode())
    assert "name: wait-for-agent" in build("node-agent")  # logs POD -c wait-for-agent
    assert "name: hugging-face" in build("model-cache")  # create secret generic hugging-face


def test_docker_is_told_files_targets_images_and_services_that_exist() -> None:
    services, compose = {}, []
    for name in ("docker-compose.yml", "docker-compose.cuda.yml"):
        text = (ROOT / name).read_text()
        compose.append(text)
        services |= yaml.safe_load(text.replace(" !override", ""))["services"]
    images = set(re.findall(r"mini-infer:\w+", "".join(compose)))
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\w+)", dockerfile, re.M)
    seen = set()
    for first, *rest in commands("docker"):
        words = [word for word in rest if not word.startswith("-")]
        if first == "build":
            assert rest[rest.index("--target") + 1] in targets
            assert rest[rest.index("-t") + 1] in images
        elif first == "run":
            assert [word for word in words if word in images], rest
        elif first == "compose":
            files = [word for word in words if word.endswith(".yml")]
            assert all((ROOT / name).exists() for name in files)
            _, *named = [word for word in words if word not in files]
            assert set(named) <= services.keys(), rest
        seen.add(first)
    assert seen == {"build", "run", "compose", "images"}


def test_tests_that_pages_name_exist() -> None:
    found = 0
    for path in (*GUIDES, *RECORDS):
        for command in page(path).commands:
            words = shlex.split(command)
            if "pytest" not in words:
                continue
            paths = [word for word in words if word.startswith("tests/")]
            assert all((ROOT / name).exists() for name in paths), command
            found += len(paths)
            keyword = words[words.index("-k") + 1] if "-k" in words else "your"
            if not keyword.startswith("your"):
                assert re.search(rf"def test_\w*{keyword}", (ROOT / paths[0]).read_text()), command
    assert found >= 8
