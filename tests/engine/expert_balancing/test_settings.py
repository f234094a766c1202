from __future__ import annotations

import pytest

from common.errors import ConfigError
from engine.expert_balancing import settings  # noqa: F401 - these tests are the wing's
from tests.engine.driving import engine_config


def test_experts_that_are_exchanged_are_refused_where_nothing_divides_them() -> None:
    with pytest.raises(ConfigError, match="give --expert-parallel"):
        engine_config(expert_exchange="dispatch", tp=2)
    with pytest.raises(ConfigError, match="expert-placement is of ranks"):
        engine_config(expert_placement="loads.json", tp=2)
    with pytest.raises(ConfigError, match="num-redundant-experts: which ones"):
        engine_config(num_redundant_experts=2, expert_parallel=True, tp=2)
    with pytest.raises(ConfigError, match="--pp with --expert-load-file"):
        engine_config(expert_load_file="loads.json", pp=2)
    with pytest.raises(ConfigError, match="choose 1 or more, or 0 for never"):
        engine_config(expert_rebalance_interval=-1, expert_parallel=True, tp=2)
    with pytest.raises(ConfigError, match="between ranks that have whole ones: give --expert-parallel"):
        engine_config(expert_rebalance_interval=100, tp=2)
    with pytest.raises(ConfigError, match="a stage of --pp passes all of them on: use --expert-exchange sum"):
        engine_config(expert_exchange="dispatch", expert_parallel=True, tp=2, pp=2)
