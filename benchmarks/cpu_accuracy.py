"""Log-probabilities of the engine on a CPU beside float32 arithmetic over the same weights, path by path.

    python -m benchmarks.cpu_accuracy --json

The default model reads a text and is made to follow it for some tokens more. The path is how its tokens are computed:
prompts in steps of different sizes, decode steps alone or beside others. A prefix from the cache is a path, too: its
blocks hold what an earlier step computed. Compared are the tokens that the reference finds likely (5 a position, at
least 1%) and the one that follows:

    mean, max        difference to the reference, in nats
    to_alone_max     difference to the first path, one prompt in one step and then decoded alone
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.model_files import resolve_model
from common.text.tokenizer import load_tokenizer
from engine.config import EngineConfig
from engine.cpu.runner import ModelRunner
from engine.kv_memory import allocate_pool, pool_geometry
from engine.loader.gguf import GgufFile, GgufWeights
from engine.loader.load import LoadedModel, load_model
from engine.models.config import config_from_gguf
from engine.models.families import family_of
from engine.plan import ScheduledRow
from engine.request import Request, RequestId, SamplingParams
from engine.request_states import RequestState
from engine.scheduled_step import ScheduledStep
from kvstore.types import BlockId

BLOCK_SIZE = 16
MIN_LOGPROB = math.log(0.01)
NUM_LIKELY = 5
TEXT = """<|im_start|>user
Explain gravity to a child, in a story about a fox.<|im_end|>
<|im_start|>assistant
Once upon a time, in a dense forest, there lived a clever fox named Finn. He was known for his quick
wit and for asking more questions than all the other animals together. One day he saw an apple fall
from a tree, and he began to wonder why things always fall down and never up. He asked the owl, who
had read many books. "The earth is very large," said the owl, "and it pulls on everything that is
near it: on apples, on rain, on clever foxes. The moon does the same, but it is far smaller, and so
you could jump six times higher there." Finn looked at the moon for a long while. 12 + 7 = 19, he
thought, and 19 - 7 = 12; so what goes up must come down. def fall(height): return (2 * height /
9.81) ** 0.5"""


@dataclass(frozen=True)
class Path:
    """chunks: tokens of the prompt in each step; what they leave goes into one more. batch: sequences that decode."""

    name: str
    chunks: tuple[int, ...] = ()
    batch: int = 1


PATHS = (
    Path("alone"),
    Path("2 in a batch", batch=2),
    Path("8 in a batch", batch=8),
    Path("16 in a batch", batch=16),
    Path("64 in a batch", batch=64),
    Path("all but 24 tokens cached", (-24,)),
    Path("all but 3 tokens cached", (-3,)),
    Path("all but 1 token cached", (-1,)),
    Path("chunks of 100", (100,) * 2),
    Path("chunks of 48", (48,) * 4),
    Path("chunks of 6", (6,) * 30),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=180, help="tokens before the first one that is compared")
    parser.add_argument("--output", type=int, default=30, help="tokens compared in each of the sequences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    measured = Accuracy(options.prompt, options.output)
    for path in PATHS:
        figures = measured.of(path)
        line = f"{path.name:28} " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(json.dumps({"path": path.name, **figures}) if options.json else line, flush=True)
    return 0


class Accuracy:
    """The default model as it is served, and what it should say.

    Every sequence is the text from another word on, so that a batch has different ones; the first is compared in all
    paths, so that they can be compared with each other.
    """

    def __init__(self, num_prompt: int, num_output: int, **settings: str) -> None:
        config = EngineConfig(device="cpu", block_size=BLOCK_SIZE, num_gpu_blocks=1024, **settings)  # type: ignore[arg-type]
        self._num_prompt, self._num_output = num_prompt, num_output
        files = resolve_model("")
        ids = load_tokenizer(files).encode(TEXT, add_special_tokens=True)
        self._text = (ids * 2)[: num_prompt + num_output]
        self.runner = open_runner(load_model(files, config), config)
        reference = open_runner(float32_model(), EngineConfig(**{**vars(config), "dtype": "float32"}))
        self.reference = self._follow(reference, Path("reference"))
        self._alone: Tensor | None = None

    def of(self, path: Path) -> dict[str, float]:
        """Differences of one path."""
        logprobs = self._follow(self.runner, path)
        if self._alone is None:
            self._alone = logprobs if path.name == "alone" else self._follow(self.runner, PATHS[0])
        likely = self.reference.topk(NUM_LIKELY, dim=-1).indices
        following = torch.tensor(self._text[self._num_prompt :])[:, None]
        wanted = torch.cat([likely, following], dim=1)
        expected, found = self.reference.gather(1, wanted), logprobs.gather(1, wanted)
        counted = expected > MIN_LOGPROB
        errors = (found - expected).abs()[counted]
        to_alone = (found - self._alone.gather(1, wanted)).abs()[counted]
        return {
            "mean": round(float(errors.mean()), 5),
            "max": round(float(errors.max()), 5),
            "to_alone_max": round(float(to_alone.max()), 5),
        }

    def _follow(self, runner: ModelRunner, path: Path) -> Tensor:
        """Log-probabilities (num_output, vocab) of the first sequence, before each of its last tokens."""
        seen: list[Tensor] = []
        num_blocks = -(-len(self._text) // BLOCK_SIZE)
        requests = []
        for index in range(path.batch):
            text = self._text[index:] + self._text[:index]
            request = Request(RequestId(f"{path.name} {index}"), text[: self._num_prompt], SamplingParams())
            request.block_ids = [BlockId(index * num_blocks + block) for block in range(num_blocks)]
            requests.append(request)

            def force(state: RequestState, row: Tensor, text: list[int] = text, is_first: bool = index == 0) -> None:
                if is_first:
                    seen.append(row.log_softmax(-1))
                row[text[len(state.token_ids)]] = 1e4

            runner.hooks[request.request_id] = force
        for request in requests:
            for count in self._steps_of(path) if request is requests[0] else [self._num_prompt]:
                self._step(runner, [request], count)
        for _ in range(self._num_output - 1):
            self._step(runner, requests, 1)
        runner.hooks.clear()
        return torch.stack(seen)

    def _steps_of(self, path: Path) -> list[int]:
        """How many of the prompt's tokens go into each step."""
        steps: list[int] = []
        for count in path.chunks:
            left = self._num_prompt - sum(steps)
            steps.append(left + count if count < 0 else min(count, left))
        return [count for count in [*steps, self._num_prompt - sum(steps)] if count]

    def _step(self, runner: ModelRunner, requests: Sequence[Request], count: int) -> None:
        step = ScheduledStep()
        for request in requests:
            start = request.num_computed_tokens
            samples = start + count >= self._num_prompt
            step.rows[request] = ScheduledRow(request.request_id, start, count, samples)
            request.num_computed_tokens += count
        step.seal([])
        errors = runner.launch(step.plan).result().errors
        if errors:
            raise RuntimeError(str(errors))


def open_runner(loaded: LoadedModel, config: EngineConfig) -> ModelRunner:
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    return ModelRunner(loaded, allocate_pool(geometry, loaded.device), None, config)


def float32_model() -> LoadedModel:
    """The default model in float32, with the numbers that the engine's 4-bit and bfloat16 weights stand for."""
    device = torch.device("cpu")
    file = GgufFile(resolve_model("").path)
    config = config_from_gguf(file.metadata, "LlamaForCausalLM", has_output_weight=False)
    weights = GgufWeights(file, config, True, torch.float32, device)
    weights.keep_int4 = True
    model = family_of(config.architecture).build(config, weights)
    model.embedding.copy_(model.embedding.bfloat16())  # the output projection's, too: they are one tensor
    return LoadedModel(model, config, "float32", torch.float32, "none", device)


if __name__ == "__main__":
    sys.exit(main())
