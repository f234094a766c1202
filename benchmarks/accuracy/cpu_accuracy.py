"""Log-probabilities of the engine on a CPU beside float32 arithmetic over the same weights, path by path.

    python -m benchmarks.accuracy.cpu_accuracy --json

The default model reads a text and is made to follow it for some tokens more. The path is how its tokens are computed:
prompts in steps of different sizes, decode steps alone or beside others. A prefix from the cache is a path, too: its
blocks hold what an earlier step computed. Compared are the tokens that the reference finds likely (5 a position, at
least 1%) and the one that follows:

    mean, max        difference to the reference, in nats
    to_alone_max     difference to the first path, one prompt in one step and then decoded alone
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.accuracy.agreement import Answer, follow, num_blocks, open_plain, read
from benchmarks.harness import default_weights, report
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.config import EngineConfig
from engine.loader.load import LoadedModel, load_model
from engine.models.families import family_of

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
    """chunk: prompt tokens per step; below 0: the first step takes all but so many; 0: all prompts in one step.

    batch: sequences that decode together.
    """

    name: str
    chunk: int = 0
    batch: int = 1


ALONE = Path("alone")
PATHS = (
    ALONE,
    *(Path(f"{batch} in a batch", batch=batch) for batch in (2, 8, 16, 64)),
    Path("all but 24 tokens cached", -24),
    Path("all but 3 tokens cached", -3),
    Path("all but 1 token cached", -1),
    *(Path(f"chunks of {chunk}", chunk) for chunk in (100, 48, 6)),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.cpu_accuracy", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--prompt", type=int, default=180, help="tokens before the first one that is compared")
    parser.add_argument("--output", type=int, default=30, help="tokens compared in each of the sequences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    accuracy = Accuracy(options.prompt, options.output)
    for path in PATHS:
        figures = accuracy.measure(path)
        line = f"{path.name:28} " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        report({"path": path.name, **figures}, options.json, line)
    return 0


class Accuracy:
    """The default model as it is served, and its reference.

    Each sequence is the text beginning at another word, so that those in a batch differ. The first one is compared in
    all paths, so that paths can be compared with each other.
    """

    def __init__(self, num_prompt: int, num_output: int) -> None:
        files = resolve_model("")
        text = load_tokenizer(files).encode(TEXT, add_special_tokens=True)
        self._text = (text * 2)[: num_prompt + num_output]
        self._num_prompt = num_prompt
        self._config = EngineConfig(device="cpu")
        self._loaded = load_model(files, self._config)
        self._wanted, self._expected = self._read_reference()
        self._alone = self._logprobs(ALONE)

    def measure(self, path: Path) -> dict[str, float]:
        """Compare one path with the reference, and with the first sequence alone."""
        logprobs = self._alone if path == ALONE else self._logprobs(path)
        found = logprobs.gather(1, self._wanted)
        counted = self._expected > MIN_LOGPROB
        errors = (found - self._expected).abs()[counted]
        to_alone = (found - self._alone.gather(1, self._wanted)).abs()[counted]
        return {
            "mean": round(float(errors.mean()), 5),
            "max": round(float(errors.max()), 5),
            "to_alone_max": round(float(to_alone.max()), 5),
        }

    def _read_reference(self) -> tuple[Tensor, Tensor]:
        """Return the compared tokens after each position (num_output, NUM_LIKELY + 1), and their log-probabilities.

        In float32 the size of a step does not matter, so the text is read in one step.
        """
        text = Answer(self._text[: self._num_prompt], self._text[self._num_prompt :])
        config = replace(
            self._config,
            max_num_seqs=1,
            max_num_batched_tokens=len(self._text),
            num_gpu_blocks=num_blocks([len(self._text)], 1),
        )
        engine, _ = open_plain(float32_model(), config)
        [entries] = read(engine, [text], NUM_LIKELY)
        followed = entries[self._num_prompt - 1 :]
        wanted = [[*each.top_token_ids, each.token_id] for each in followed]
        expected = [[*each.top_logprobs, each.logprob] for each in followed]
        return torch.tensor(wanted), torch.tensor(expected)

    def _logprobs(self, path: Path) -> Tensor:
        """Return the first sequence's log-probabilities (num_output, vocab) before each of its last tokens."""
        texts = [self._text[index:] + self._text[:index] for index in range(path.batch)]
        answers = [Answer(text[: self._num_prompt], text[self._num_prompt :]) for text in texts]
        step_tokens = path.chunk if path.chunk > 0 else path.batch * self._num_prompt + path.chunk
        config = replace(
            self._config,
            max_num_seqs=path.batch,
            max_num_batched_tokens=step_tokens,
            num_gpu_blocks=num_blocks([self._num_prompt] * path.batch, len(answers[0].token_ids)),
        )
        return follow(*open_plain(self._loaded, config), answers)[0].log_softmax(-1)


def float32_model() -> LoadedModel:
    """Load the default model in float32, with the values of the engine's 4-bit and bfloat16 weights."""
    config, weights = default_weights()
    weights.kept_bits = (4,)
    model = family_of(config.architecture).build(config, weights)
    model.embedding.copy_(model.embedding.bfloat16())  # also the output projection: they are one tensor
    tokenizer = partial(load_tokenizer, resolve_model(""))
    return LoadedModel(model, config, "float32", torch.float32, "none", torch.device("cpu"), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
