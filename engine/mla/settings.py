"""Settings of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.config import Settings, require, setting
from common.errors import ConfigError
from engine.wings import EngineWing

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

FORMS = ("absorbed", "latent", "naive")


@dataclass(frozen=True)
class LatentSettings(EngineWing):
    """The form of latent attention. Raises ConfigError for unknown values."""

    mla: str = setting(
        "absorbed", "latent attention: absorbed keeps latents and attends to them; latent expands the kept ones to K "
        "and V when it attends; naive keeps K and V",
        choices=FORMS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require(self.mla in FORMS, f"--mla {self.mla}: choose {', '.join(FORMS)}")


def check_settings(config: ModelConfig, engine_config: Settings) -> None:
    """Raise ConfigError if `--mla` does not apply to the model."""
    form = engine_config.of(LatentSettings).mla
    if config.latent is None and form != LatentSettings.mla:
        raise ConfigError(f"--mla {form}: {config.architecture} has no latent attention; leave it out")
