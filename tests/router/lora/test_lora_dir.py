"""--lora-dir: adapters come, change and go with their folders."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import httpx
import pytest

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from protos import types_pb2 as pb
from router.lora import watched
from router.lora.folder import AdapterFolder
from router.lora.watched import WatchedAdapters
from tests.harness.adapters import write_adapter
from tests.harness.router import Cluster, cluster
from tests.harness.waiting import until

pytestmark = pytest.mark.wing("router.lora")
SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}


@pytest.fixture(autouse=True)
def looks_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "SCAN_SECONDS", 0.02)


def put(folder: Path, name: str, seed: int = 0) -> AdapterRef:
    written = AdapterRef.of(write_adapter(folder / name, SHAPES, seed=seed))
    stamp = 1_000_000_000 + seed
    for file in written.folder.iterdir():
        os.utime(file, (stamp, stamp))
    return written


def names(c: Cluster) -> set[str]:
    return {model.name for model in c.gateway.models if model.adapter}


def adapter_of(c: Cluster, name: str) -> str:
    return c.gateway.model(name).adapter


def test_a_scan_takes_what_is_complete(tmp_path: Path) -> None:
    poet = put(tmp_path, "poet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    put(tmp_path, ".hidden")
    folder = AdapterFolder(tmp_path)
    assert folder.scan() == {"poet": poet}
    bard = put(tmp_path, "bard", seed=1)
    assert folder.scan() == {"poet": poet}  # may be half written
    assert folder.scan() == {"poet": poet, "bard": bard}
    changed = put(tmp_path, "poet", seed=2)
    assert changed != poet
    assert folder.scan() == {"poet": poet, "bard": bard}
    assert folder.scan() == {"poet": changed, "bard": bard}
    shutil.rmtree(tmp_path / "poet")
    assert folder.scan() == {"bard": bard}
    with pytest.raises(ConfigError, match="is not a folder"):
        AdapterFolder(tmp_path / "bard" / "adapter_config.json")


def test_a_link_that_is_moved_is_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces a volume's files so."""
    old, new = put(tmp_path, ".old"), put(tmp_path, ".new")
    link = tmp_path / "poet"
    link.symlink_to(old.folder)
    folder = AdapterFolder(tmp_path)
    assert folder.scan() == {"poet": old}
    link.unlink()
    link.symlink_to(new.folder)
    assert [folder.scan(), folder.scan()] == [{"poet": old}, {"poet": new}]


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "poet")
    (tmp_path / "bad").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "bad" / name).write_text("{")
    folder = AdapterFolder(tmp_path)
    found = folder.scan()
    monkeypatch.setattr("router.lora.folder._read", None)
    assert folder.scan() == found
    assert found.keys() == {"poet"}


async def test_adapters_come_change_and_go(tmp_path: Path) -> None:
    poet = put(tmp_path, "poet")
    async with cluster(num_decode=2, lora_dir=str(tmp_path)) as c:
        assert names(c) == {"poet"}
        assert (await c.complete("to whom", model="poet")).status_code == 200
        assert {submit.adapter for worker in c.decode for submit in worker.submits} == {str(poet)}
        bard = put(tmp_path, "bard", seed=1)
        await until(lambda: names(c) == {"poet", "bard"})
        assert all(worker.submits[-1].adapter == str(bard) for worker in c.decode)  # each has tried it
        changed = put(tmp_path, "poet", seed=2)
        await until(lambda: adapter_of(c, "poet") == str(changed))
        shutil.rmtree(tmp_path / "bard")
        await until(lambda: names(c) == {"poet"})
        assert (await c.complete("to whom", model="bard")).status_code == 404


async def test_names_belong_to_the_folder_or_to_operators(tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "elsewhere" / "poet", SHAPES)
    watched_folder = tmp_path / "watched"
    put(watched_folder, "poet")
    put(watched_folder, "dry-run")

    async def post(c: Cluster, what: str, **fields: str) -> httpx.Response:
        return await c.http.post(f"/v1/{what}_lora_adapter", json=fields)

    async with cluster(lora_dir=str(watched_folder)) as c:
        assert names(c) == {"poet"}
        assert c.gateway.model("dry-run").adapter == ""
        for answer in (
            await post(c, "load", lora_name="poet", lora_path=str(other)), await post(c, "unload", lora_name="poet"),
        ):  # fmt: skip
            assert answer.status_code == 400
            assert "is served from --lora-dir" in answer.json()["error"]["message"]
        assert (await post(c, "load", lora_name="bard", lora_path=str(other))).status_code == 200
        mine = adapter_of(c, "bard")
        put(watched_folder, "bard", seed=1)
        put(watched_folder, "later", seed=2)
        await until(lambda: names(c) == {"poet", "bard", "later"})
        assert adapter_of(c, "bard") == mine


async def test_an_adapter_that_workers_refuse_is_tried_once(tmp_path: Path) -> None:
    put(tmp_path, "poet")
    async with cluster(lora_dir=str(tmp_path)) as c:
        script = c.decode[0].script
        script.refuse, script.refuse_param = pb.FAILURE_CODE_INVALID_ARGUMENT, "model"
        refused = put(tmp_path, "bard", seed=1)

        def tried(ref: AdapterRef) -> int:
            return sum(submit.adapter == str(ref) for submit in c.decode[0].submits)

        await until(lambda: tried(refused) > 0)
        script.refuse = pb.FAILURE_CODE_INTERNAL
        later = put(tmp_path, "later", seed=2)
        await until(lambda: tried(later) > 1)  # not the adapter's fault: again
        assert tried(refused) == 1
        script.refuse = None
        await until(lambda: names(c) == {"poet", "later"})


async def test_a_volume_that_is_away_takes_no_adapter_with_it(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    put(volume, "poet")
    async with cluster(lora_dir=str(volume)) as c:
        volume.rename(tmp_path / "away")
        await asyncio.sleep(0.2)
        assert names(c) == {"poet"}
        (tmp_path / "away").rename(volume)
        put(volume, "bard", seed=1)
        await until(lambda: names(c) == {"poet", "bard"})


async def test_a_bug_that_ends_the_watch_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: WatchedAdapters) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(WatchedAdapters, "look", broken)
    async with cluster(lora_dir=str(tmp_path)) as c:
        await until(lambda: "a background task of the router has ended" in caplog.text)
        assert (await c.complete("still served")).status_code == 200
