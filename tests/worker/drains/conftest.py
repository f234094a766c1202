"""A front with one router's stream, as the front's own tests have it."""

from tests.worker.front.test_front import attached  # noqa: F401
