from __future__ import annotations

import pickle
from dataclasses import replace

import msgspec
import pytest

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.speculation.settings import SpeculationSettings
from tests.engine.driving import engine_config


def test_settings_of_wings_travel_with_the_cores() -> None:
    """To an engine process, and to ranks."""
    config = engine_config("m", tp=2, num_speculative_tokens=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, num_gpu_blocks=3).of(SpeculationSettings).num_speculative_tokens == 3
    with pytest.raises(ConfigError, match="--num-speculative-tokens 65: choose 1 to 64"):
        engine_config(num_speculative_tokens=65)
