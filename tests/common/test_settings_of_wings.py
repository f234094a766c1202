"""Settings that a wing declares in its folder are the program's, as long as the folder is there."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.config import Settings, add_arguments, from_namespace, setting, to_argv, with_wings
from common.errors import ConfigError
from common.wings import wing_modules

WING = """
from dataclasses import dataclass
from common.config import require, setting

@dataclass(frozen=True)
class FlightSettings:
    altitude: int = setting(0, "metres", needs={("fuel",): "--altitude: give --fuel"})
    formation: bool = setting(False, "side by side", excludes={("fuel", "altitude"): "--formation is for birds"})

    def __post_init__(self):
        require(self.altitude < 9000, f"--altitude {self.altitude}: too high")
"""


@dataclass(frozen=True)
class Trip(Settings):
    """A trip."""

    fuel: str = setting("none", "what burns", off=("tea",))

    def __post_init__(self) -> None:
        self.check_together()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package of one wing and one folder without settings."""
    monkeypatch.syspath_prepend(tmp_path)
    root = tmp_path / f"trips_{tmp_path.name}"
    for folder in (root, root / "flight", root / "plain"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (root / "flight" / "settings.py").write_text(WING)
    return root


def parsed(cls: type[Trip], *argv: str) -> Trip:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return from_namespace(cls, parser.parse_args(argv), {})


def test_a_wings_fields_are_flags_and_only_it_reads_them(package: Path) -> None:
    cls = with_wings(package.name)(Trip)
    assert (cls.__name__, cls.__doc__) == ("Trip", "A trip.")
    trip = parsed(cls, "--altitude=100", "--fuel=wood")
    assert to_argv(trip) == ["--fuel=wood", "--altitude=100"]
    [flight] = trip.wings
    assert trip.of(flight) == flight(altitude=100)
    with pytest.raises(ConfigError, match="--altitude 9001: too high"):
        parsed(cls, "--altitude=9001", "--fuel=wood")


def test_settings_exclude_and_need_others(package: Path) -> None:
    cls = with_wings(package.name)(Trip)
    parsed(cls, "--formation", "--fuel=tea")
    with pytest.raises(ConfigError, match="--altitude: give --fuel"):
        parsed(cls, "--altitude=1", "--fuel=tea")
    with pytest.raises(ConfigError, match="--formation is for birds"):
        parsed(cls, "--altitude=1", "--formation")  # what excludes comes first
    with pytest.raises(ConfigError, match="--formation is for birds"):
        parsed(cls, "--fuel=wood", "--formation")


def test_a_wing_that_is_deleted_takes_its_flags_along(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(package / "flight")
    cls = with_wings(package.name)(Trip)
    assert cls.wings == ()
    with pytest.raises(SystemExit):
        parsed(cls, "--altitude=1")
    assert "unrecognized arguments: --altitude=1" in capsys.readouterr().err


def test_modules_are_found_by_their_names(package: Path) -> None:
    assert [module.__name__ for module in wing_modules(package.name, "settings")] == [
        f"{package.name}.flight.settings"
    ]
    assert wing_modules(package.name, "metrics") == ()
    assert f"{package.name}.plain" not in sys.modules
