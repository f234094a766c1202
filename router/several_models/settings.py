"""Settings of several models behind one router."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from common.errors import ConfigError


@dataclass(frozen=True)
class ModelsSettings:
    models: str = setting(
        "",
        "several models in place of --model, [NAME=]MODEL separated by commas; the first is the default one",
        excludes={
            ("model", "served_model_name"): "--models names all models: leave --model and --served-model-name out"
        },
    )

    def __post_init__(self) -> None:
        self.named_models()

    def named_models(self) -> list[tuple[str, str]]:
        """Parse the models as (name, model), the default first. An empty name means the model's own.

        Empty without --models. Raises ConfigError.
        """
        models = []
        for item in self.models.split(",") if self.models else ():
            name, equals, model = item.strip().partition("=")
            if not (model if equals else name):
                raise ConfigError(f"--models {self.models!r}: expected MODEL or NAME=MODEL, separated by commas")
            models.append((name, model) if equals else ("", name))
        return models
