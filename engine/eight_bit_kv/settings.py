"""The setting of how KV is stored."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class KvDtypeSettings(EngineWing):
    kv_cache_dtype: str = setting(
        "auto", "auto: as --dtype; fp8: e4m3, half the memory, twice the tokens in it", choices=("auto", "fp8")
    )
