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
    """The format of calls that an operator has named; auto: none."""
    return config.of(ToolSettings).tool_call_parser
