"""Settings of tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Settings, setting
from common.tools.tool_format import FORMATS


@dataclass(frozen=True)
class ToolSettings:
    tool_call_parser: str = setting(
        "auto", "how models write tool calls; auto: as their chat template shows", choices=("auto", *FORMATS)
    )


def tool_call_parser(config: Settings) -> str:
    """Return the format of calls that the operator has set; auto: not set."""
    return config.of(ToolSettings).tool_call_parser
