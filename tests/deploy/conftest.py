"""One control plane with one node for all tests that need a kubelet.

IMAGE_ARCHIVE: file in which the images are kept from one run to the next; made when it is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.docker_engine import IMAGE, build_image, docker_engine
from tests.deploy.kubernetes.control_plane import ControlPlane
from tests.deploy.kubernetes.kubelet_node import PAUSE_IMAGE, Node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    scratch = tmp_path_factory.mktemp("node")
    archive = Path(os.environ.get("IMAGE_ARCHIVE") or scratch / "images.tar")
    if not archive.exists():
        save_images(archive, tmp_path_factory.mktemp("docker"))
    with ControlPlane(nodes_live=True) as plane, Node(plane, archive, scratch) as found:
        yield found
    assert not found.left_behind()


def save_images(archive: Path, scratch: Path) -> None:
    """Save mini-infer:cpu, and the image that keeps a pod's namespaces."""
    pause = scratch / "pause"
    pause.mkdir()
    (pause / "Dockerfile").write_text('FROM mini-infer:cpu\nENTRYPOINT ["sleep", "infinity"]\n')
    with docker_engine(scratch, {"MINI_INFER_IMAGE": IMAGE}) as docker:
        build_image(docker, scratch)
        docker.run("tag", IMAGE, "mini-infer:cpu")
        docker.run("build", "--tag", PAUSE_IMAGE, str(pause))
        docker.run("save", "--output", str(archive), "mini-infer:cpu", PAUSE_IMAGE)
