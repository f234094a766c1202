"""Serves the adapters of --lora-dir while they are in that folder."""

from __future__ import annotations

import asyncio
import logging

from common.errors import ConfigError, InvalidRequestError, MiniInferError
from common.lora.adapter_ref import AdapterRef
from router.lora.adapters import LoraAdapters
from router.lora.folder import AdapterFolder

logger = logging.getLogger(__name__)
SCAN_SECONDS = 2.0


class WatchedAdapters:
    """Keeps a router's adapters the same as those in a folder."""

    def __init__(self, adapters: LoraAdapters, folder: AdapterFolder) -> None:
        self._adapters = adapters
        self._folder = folder
        self._refused: dict[str, AdapterRef] = {}  # until its files change: workers refused it, or its name is taken
        self._late: dict[str, AdapterRef] = {}  # that a worker could not read yet
        self._is_readable = True

    def serve(self) -> None:
        """Serve the adapters found at the start, before any worker has attached. Raises ConfigError."""
        try:
            found = self._folder.scan()
        except OSError as error:
            raise ConfigError(f"--lora-dir cannot be read ({error.strerror})") from None
        for name, ref in found.items():
            try:
                self._adapters.add_watched(name, ref)
            except InvalidRequestError as error:
                self._refuse(name, ref, error)

    async def follow(self) -> None:
        """Call `look` every two seconds while the router serves."""
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Serve new and changed adapters once all workers have read them, and stop serving removed ones."""
        try:
            found = await asyncio.to_thread(self._folder.scan)
        except OSError as error:  # a volume that is briefly unavailable does not remove adapters
            if self._is_readable:
                logger.warning("--lora-dir cannot be read (%s): its adapters are served as they were", error.strerror)
            self._is_readable = False
            return
        self._is_readable = True
        served = self._adapters.watched()
        for name in served.keys() - found.keys():
            await self._adapters.remove_watched(name)
            logger.info("the adapter %s is gone", name)
        for name, ref in found.items():
            if served.get(name) == str(ref) or self._refused.get(name) == ref:
                continue
            try:
                await self._adapters.load_watched(name, ref)
                logger.info("the adapter %s is served from %s", name, ref.folder)
            except InvalidRequestError as error:
                self._refuse(name, ref, error)
            except MiniInferError as error:  # a worker's error: the next look tries again
                if self._late.get(name) != ref:
                    logger.warning("the adapter %s is not served yet: %s", name, error)
                self._late[name] = ref

    def _refuse(self, name: str, ref: AdapterRef, error: InvalidRequestError) -> None:
        self._refused[name] = ref
        logger.warning("the adapter %s is not served: %s", name, error)
