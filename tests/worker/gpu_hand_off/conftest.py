"""Fixtures of other folders' tests."""

from tests.kvstore.conftest import patience  # noqa: F401
from tests.kvstore.transports.conftest import client, mine  # noqa: F401
