from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.net.hosts import with_port
from common.wings import call_wing, from_wing, has_wing, require_wing


def test_packages_and_modules_are_found_without_importing_them() -> None:
    assert has_wing("common.net")
    assert has_wing("common.wings")
    assert not has_wing("common.no_such_wing")
    assert not has_wing("common.no_such_wing.module")


def test_a_folder_without_code_is_no_wing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_over" / "__pycache__").mkdir(parents=True)
    assert not has_wing("left_over")


def test_what_a_wing_has_is_none_where_the_wing_is_not() -> None:
    assert from_wing("common.net.hosts:with_port") is with_port
    assert from_wing("common.feathers:Feather") is None
    assert call_wing("common.net.hosts:with_port", "router", 8000) == with_port("router", 8000)
    assert call_wing("common.feathers:Feather", 1) is None


def test_what_asks_for_an_absent_wing_is_named() -> None:
    require_wing("common.net", "--net")
    with pytest.raises(ConfigError, match=r"^--fly needs common\.feathers, which this installation lacks$"):
        require_wing("common.feathers", "--fly")
