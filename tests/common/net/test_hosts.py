from functools import partial
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.net.hosts import check_cluster_token
from router.config import RouterConfig
from worker.config import WorkerConfig

EXAMPLE = dict(
    line.partition("=")[::2]
    for line in (Path(__file__).parents[3] / "k8s" / "base" / "secret.example.env").read_text().splitlines()
)["cluster-token"]


@pytest.mark.parametrize("settings", [WorkerConfig, partial(RouterConfig, decode="a:1")])
def test_no_service_starts_with_the_examples_token(settings):
    settings(cluster_token="one-of-our-own")
    with pytest.raises(ConfigError, match="the cluster token is the example's"):
        settings(cluster_token=EXAMPLE)


@pytest.mark.parametrize("token", ["a\n", " a", "a b\tc"])
def test_a_token_that_cannot_travel_as_metadata(token):
    with pytest.raises(ConfigError, match="white space"):
        check_cluster_token(token)
