"""`python -m worker.engine_process.main`: receives settings, loads the model, sends Ready, runs the main loop."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from common.errors import MiniInferError
from common.logging import setup_logging
from common.wings import call_wing, from_wing
from engine.assembly import EngineParts, assemble
from engine.engine import DeviceLostError
from engine.wings import no_progress
from kvstore.handle.handle import HandleWriter
from kvstore.pool.block_hash import HASH_VERSION
from protos import types_pb2 as pb
from worker.engine_process.process import EngineProcess
from worker.frames import FrameSocket
from worker.kv.kv_leases import PromptLeases
from worker.kv.kv_loads import KvLoads, KvPuller
from worker.kv.shared_pool import SharedPoolMemory
from worker.messages import Failed, Ready, Start

logger = logging.getLogger("engine")


def main(argv: list[str] | None = None) -> int:
    """Run the process; the front passes the descriptor of its socket."""
    parser = argparse.ArgumentParser(prog="worker.engine_process.main")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = FrameSocket(socket.socket(fileno=args.fd))
    beat = call_wing("worker.hangs.heartbeat:beat_for", args.heartbeat_fd) or (lambda: None)
    try:
        [start] = link.receive(60.0)
        assert isinstance(start, Start)  # always the front's first message
        setup_logging("engine", start.worker.log_level, start.worker.log_format)
        process = _start(link, start, beat)
        process.run()
    except ConnectionError:
        logger.warning("the worker's front is gone: exiting")
    except MiniInferError as error:
        link.send(Failed(str(error)))
        return 1
    except DeviceLostError as error:
        logger.exception("the engine cannot go on")
        link.send(Failed(str(error)))
        os._exit(1)  # an orderly end would wait for the lost device
    return 0


def _start(link: FrameSocket, start: Start, beat: Callable[[], None]) -> EngineProcess:
    config, worker = start.engine, start.worker
    memory = SharedPoolMemory(worker)
    cores = None
    if not (config.num_threads or config.num_ranks > 1):
        cores = call_wing("worker.cores.shared_cores:join_cores", worker.run_dir)
    start_reports = call_wing("worker.start_progress.reports:StartReports")
    parts = assemble(config, memory, start.gpu, on_progress=start_reports or no_progress)
    if cores is not None and parts.loaded.device.type != "cpu":
        cores.close()
        cores = None
    parts.runner.tell_of_work(beat)
    if config.num_ranks > 1:
        parts.runner.watch_ranks(_end_process)
    gc.collect()
    gc.freeze()  # loaded objects stay alive; collections that visit them take 90 ms of a step
    engine = parts.engine
    puller = KvPuller(memory.clients, memory.leases, link.wake)
    handles = HandleWriter(worker.worker_id, memory.serve(start.kv_address), worker.kv_lease_seconds)
    leases = memory.open_leases(engine.kv.give_back, handles)
    kind_of_leases = call_wing("worker.progressive_pulls.part_leases:kind_of_leases", worker) or PromptLeases
    prompt_leases = kind_of_leases(engine.kv, leases)
    # On a CPU, steps have ended when the loop gives blocks to loads; a pipeline's steps end in this fence.
    fence = parts.runner.start_queued if config.pp > 1 and not memory.needs_staging else memory.fence
    kind_of_loads = from_wing("worker.progressive_pulls.progressive_loads:ProgressiveLoads") or KvLoads
    loads = kind_of_loads(engine, puller, fence, can_read=not config.stage_address)
    readable = () if config.stage_address else memory.clients[0].transports  # a pull must fill all layers
    info = _engine_info(parts, memory, readable)
    sockets = [rank.socket_path for rank in memory.ranks]
    link.send(Ready(info.SerializeToString(), sockets, memory.needs_staging, memory.descriptions))
    adjust_cores = None if cores is None else cores.adjust
    return EngineProcess(link, engine, leases, prompt_leases, loads, beat, adjust_cores)


def _end_process(reason: str) -> None:
    """End the process from any thread: the engine's thread may wait on a GPU for a rank that is gone."""
    logger.error("the engine cannot go on: %s", reason)
    os._exit(1)


def _engine_info(parts: EngineParts, memory: SharedPoolMemory, transports: Sequence[str]) -> pb.WorkerInfo:
    """Return the engine's part of the worker's description for routers."""
    geometry = parts.geometry
    return pb.WorkerInfo(
        epoch=memory.epoch,
        model=parts.files.name,
        model_fingerprint=geometry.fingerprint,
        vocab_size=parts.loaded.config.vocab_size,
        max_model_len=parts.engine.max_model_len,
        block_size=geometry.block_size,
        hash_version=HASH_VERSION,
        kv_dtype=geometry.dtype,
        num_blocks=geometry.num_blocks,
        block_bytes=geometry.block_bytes,
        transports=transports,
        quantization=parts.loaded.quant_mode,
        device=str(parts.loaded.device),
        cuda_graphs=parts.cuda_graphs,
        attention_backend=parts.runner.attention_backend,
        max_num_seqs=parts.config.max_num_seqs,
        kv_layout=str(geometry.layout),
        tokenizer_hash=parts.use_tokenizer().tokenizer_hash(),
    )


if __name__ == "__main__":
    sys.exit(main())
