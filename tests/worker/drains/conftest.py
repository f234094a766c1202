"""A front with one router's stream, as in the front's own tests."""

from tests.worker.front.test_front import attached  # noqa: F401
