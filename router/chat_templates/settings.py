"""Settings of chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config import setting

BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parent / "builtin").glob("*.jinja"))}


@dataclass(frozen=True)
class ChatTemplateSettings:
    chat_template: str = setting(
        "", f"chat template in place of the model's: a file, or one of {', '.join(BUILT_IN)}; empty: the model's"
    )
