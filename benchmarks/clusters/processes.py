"""Compares the simulator with real processes on this machine: `mini-infer simulate --against` a cluster started here.

    python -m benchmarks.clusters.processes --trace AzureLLMInferenceTrace_conv.csv --length-scale 0.2 \\
        --max-requests 150 --request-rate 2.5

Router, workers, pulls and clients are real. Steps sleep as long as --steps says (`--simulated-steps`), which the
simulator has to find out.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.model_folder import with_tokenizer
from cli.load.bench import ReportConfig, WorkloadConfig, write_json
from cli.local_cluster.local_server import LocalServer
from cli.simulation.against import against
from cli.simulation.settings import ClusterConfig
from common.config import SettingsParser, add_arguments, from_namespace

STEPS = "base=0.05,row=5e-5,context=2.5e-7,prompt=0.0075,prompt_token=2.5e-4"
MAX_NUM_SEQS = 64
PULL_TOKENS_PER_SECOND = 1e7  # of the one-layer model, within a machine, also from host memory


def main() -> None:
    parser = SettingsParser(description="The simulator against real processes.")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--steps", default=STEPS, help="seconds of a step's parts")
    parser.add_argument("--num-gpu-blocks", type=int, default=20_000, help="KV blocks of a worker")
    parser.add_argument(
        "--host-tier-blocks",
        type=int,
        default=0,
        help="those of the host, simulated; 1 GB that holds a million is real",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens in one step")
    for title, cls in (("workload", WorkloadConfig), ("report", ReportConfig)):
        add_arguments(parser.add_argument_group(title), cls)
    parser.set_defaults(num_requests=80, input_len="20-600", output_len="5-60")  # of the calibrating load
    options = parser.parse_args()
    workload = from_namespace(WorkloadConfig, options, {})
    report = from_namespace(ReportConfig, options, {})
    with tempfile.TemporaryDirectory(prefix="mini-infer-") as folder:
        model, vocab_size = with_tokenizer(["--model", "benchmarks/configs/one-layer"], Path(folder))
        served = [
            *model, "--load-format=dummy", "--num-threads=1", f"--num-gpu-blocks={options.num_gpu_blocks}",
            f"--max-num-seqs={MAX_NUM_SEQS}", f"--max-num-batched-tokens={options.max_num_batched_tokens}",
            f"--prefill={options.prefill}", f"--decode={options.decode}", f"--simulated-steps={options.steps}",
        ]  # fmt: skip
        config = ClusterConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=options.max_num_batched_tokens,
            pull_tokens_per_second=PULL_TOKENS_PER_SECOND, host_tier_blocks=options.host_tier_blocks,
            host_tokens_per_second=PULL_TOKENS_PER_SECOND,
        )  # fmt: skip
        with LocalServer(served) as server:
            write_json(against(server.url, config, replace(workload, vocab_size=vocab_size)), report.json)


if __name__ == "__main__":
    main()
