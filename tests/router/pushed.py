"""The parts of a router between a request and its workers, which a test pushes by hand: no network, no clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from common.wings import from_wing
from kvstore.pool.block_hash import HASH_VERSION
from protos import types_pb2 as pb
from router.api.text import ChoiceText, NewTextEnd, TextRules, Update
from router.choice import Choice
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.journal import Journal
from router.metrics import RouterMetrics
from router.request import GenerationRequest
from router.served_model import roles_of
from router.workers.model_workers import ModelWorkers
from tests.harness.router import DRY_RUN, has_work

HANDLE = pb.KvHandle(lease_id="lease", worker_id="p0", epoch=1)
PART = pb.KvHandle(lease_id="part", worker_id="p0", epoch=1, num_tokens=32)


def delta_of(submit: pb.Submit, text: str, **fields: Any) -> pb.TokenDelta:
    return pb.TokenDelta(request_id=submit.request_id, token_ids=list(text.encode()), **fields)


class Worker:
    """A link that keeps its commands, and reports what a test says."""

    def __init__(self, workers: ModelWorkers, role: str, name: str) -> None:
        self.commands: list[pb.Command] = []
        self.submits: list[pb.Submit] = []
        self.link = workers.add(role, name)
        self.info = pb.WorkerInfo(
            worker_id=name, role=role, epoch=1, block_size=16, hash_version=HASH_VERSION, max_num_seqs=8,
            max_model_len=100, vocab_size=320,
        )  # fmt: skip
        self.come_back()

    def come_back(self) -> None:
        self.link.attached(self.info, self)  # type: ignore[arg-type]

    def send(self, command: pb.Command) -> None:
        self.commands.append(command)
        if command.HasField("submit"):
            self.submits.append(command.submit)

    async def fetch_snapshot(self) -> Sequence[pb.KvEvent]:
        return []

    @property
    def cancels(self) -> list[str]:
        return [command.cancel.request_id for command in self.commands if command.HasField("cancel")]

    @property
    def releases(self) -> list[str]:
        return [command.release.lease_id for command in self.commands if command.HasField("release")]

    @property
    def prefetches(self) -> list[pb.KvOffer]:
        return [command.prefetch for command in self.commands if command.HasField("prefetch")]

    def says(self, text: str, **fields: Any) -> None:
        """Report one step for the leg that was opened last."""
        self.link.apply(pb.StepReport(deltas=[delta_of(self.submits[-1], text, **fields)]))

    def offers(self) -> pb.KvOffer:
        """Report that a part of the prompt is computed, for the leg that was opened last."""
        offer = pb.KvOffer(request_id=self.submits[-1].request_id, kv_handle=PART, block_keys=[b"a", b"b"])
        self.link.apply(pb.StepReport(kv_offers=[offer]))
        return offer

    def prefilled(self, text: str) -> None:
        self.says(text, finish_reason=pb.FINISH_REASON_PREFILLED, kv_handle=HANDLE)

    def fails(self, code: Any, message: str = "as the test says") -> None:
        failure = pb.Failure(request_id=self.submits[-1].request_id, code=code, message=message)
        self.link.apply(pb.StepReport(failures=[failure]))


class Listener:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, Update]] = []
        self.errors: list[Exception] = []

    def on_update(self, index: int, update: Update) -> None:
        self.updates.append((index, update))

    def on_failure(self, error: Exception) -> None:
        self.errors.append(error)

    def text(self, index: int = 0) -> str:
        return "".join(update.text for number, update in self.updates if number == index)

    def ends(self) -> list[tuple[int, str | None, str | int | None]]:
        return [(index, u.finish_reason, u.stop_reason) for index, u in self.updates if u.finish_reason is not None]


def end_of(stops: tuple[str, ...]) -> NewTextEnd:
    from router.stop_strings.stops import StopStrings

    return partial(StopStrings, stops, False, 0)


class Router:
    """The parts of one router between a request and its workers."""

    def __init__(self, prefill: int = 0, decode: int = 1, **config: Any) -> None:
        settings = RouterConfig(model="dry-run", decode="127.0.0.1:1", **{"local_prefill_tokens": 0, **config})
        self.workers = ModelWorkers("dry-run", "dry-run", "")
        self.metrics = RouterMetrics("dry-run")
        self.num_requests = 0
        self.dispatcher = Dispatcher(settings, self.workers, self.metrics, roles_of(settings, self.workers))
        self.prefill = [Worker(self.workers, "prefill", f"p{number}") for number in range(prefill)]
        self.decode = [Worker(self.workers, "decode", f"d{number}") for number in range(decode)]

    def request(
        self,
        num_choices: int = 1,
        num_prompts: int = 1,
        seconds: float = 60.0,
        stops: tuple[str, ...] = (),
        grammar: str = "",
    ) -> tuple[GenerationRequest, Listener]:
        now = time.monotonic()
        self.num_requests += 1
        choices = []
        for index in range(num_choices * num_prompts):
            sampling = pb.SamplingParams(max_tokens=50, seed=index, grammar=grammar)
            journal = Journal(
                f"r{self.num_requests}-{index}", [1, 2, 3], sampling, deadline=now + seconds, arrival=now
            )
            text = ChoiceText(DRY_RUN, TextRules(new_end=end_of(stops) if stops else None))
            choices.append(Choice(index, journal, text, self.dispatcher))
        request, sink = GenerationRequest("r", choices, self.metrics), Listener()
        several = from_wing("router.several_choices.request:SeveralChoices")
        if several and num_choices > 1:
            request = several("r", choices, self.metrics, num_choices)
        request.start(sink)
        return request, sink

    def is_quiet(self) -> bool:
        links = self.workers.links
        return not (
            self.dispatcher.num_running
            or self.dispatcher.num_waiting
            or any(link.num_expected or has_work(link) for link in links)
        )
