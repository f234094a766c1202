"""Connections of a listener, for a thread that accepts them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator

from common.logging import RateLimit

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

RETRY_SECONDS = 0.1


def accepted(listener: socket.socket, is_closing: Callable[[], bool], purpose: str) -> Iterator[socket.socket]:
    """Yield connections as they come, until `listener` fails while it is being closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if is_closing():
                return
            # Out of descriptors, most likely: a moment later there may be some again.
            logger.warning("cannot accept a connection for %s: %s", purpose, error.strerror)
            time.sleep(RETRY_SECONDS)
            continue
        yield connection
