"""Settings of speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from common.config import require, setting
from common.errors import ConfigError
from engine.request import MAX_SPECULATIVE_TOKENS
from engine.wings import EngineWing

DRAFT_PREFIX, EAGLE_PREFIX = "draft:", "eagle:"
# Names of vLLM's --speculative-config, and our settings.
JSON_NAMES = {
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
}
# vLLM's draft_sample_method: the likeliest tokens, or sampled ones.
JSON_SAMPLING = {"greedy": "coupled", "probabilistic": "rejection"}
JSON_METHODS = {
    "ngram": "ngram",
    "suffix": "suffix",
    "draft_model": DRAFT_PREFIX,
    "eagle3": EAGLE_PREFIX,
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
}


class Method(Enum):
    """The method that proposes drafts."""

    NONE = "none"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT = "draft"
    EAGLE = "eagle"
    MTP = "mtp"

    @property
    def has_weights(self) -> bool:
        """Whether drafts come from a model, which gives their distributions."""
        return self in (Method.DRAFT, Method.EAGLE, Method.MTP)


REJECTION_IN_ONE_PROCESS = (
    "--speculative-sampling rejection runs in one process on a CPU: leave it, --tp, --pp or --device cuda out"
)
# Most drafts of a row by default.
DEFAULT_TOKENS = {Method.NONE: 0, Method.NGRAM: 8, Method.SUFFIX: 16, Method.DRAFT: 4, Method.EAGLE: 4, Method.MTP: 3}


@dataclass(frozen=True)
class SpeculationSettings(EngineWing):
    speculative: str = setting(
        "",
        "what proposes draft tokens, accepted when equal to the sampled ones: ngram, suffix, draft:MODEL, "
        "eagle:DIR (an EAGLE-3 head), mtp (the model's own module for multi-token prediction)",
    )
    num_speculative_tokens: int = setting(
        0, "most draft tokens per sequence and step; 0: as --speculative has them, none without it"
    )
    adaptive_drafts: bool = setting(True, "compute only drafts that are expected to make the step faster")
    ngram_max: int = setting(4, "longest n-gram of a sequence's last tokens whose earlier occurrence proposes drafts")
    ngram_min: int = setting(2, "shortest such n-gram")
    suffix_tokens: int = setting(100_000, "tokens of earlier answers that --speculative suffix keeps")
    speculative_sampling: str = setting(
        "coupled",
        "how drafts of a model, head or module are verified at a temperature above 0: coupled (equal to what would "
        "be sampled without drafts) or rejection (more are accepted; only the distribution stays the same)",
        choices=("coupled", "rejection"),
        excludes={("tp", "pp", "device"): REJECTION_IN_ONE_PROCESS},
    )
    speculative_config: str = setting("", "these settings as vLLM's JSON, in place of the others")

    def __post_init__(self) -> None:
        require(
            0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            f"--num-speculative-tokens {self.num_speculative_tokens}: choose 1 to {MAX_SPECULATIVE_TOKENS}, "
            "or 0 for none",
        )
        require(
            1 <= self.ngram_min <= self.ngram_max,
            f"--ngram-min {self.ngram_min} --ngram-max {self.ngram_max}: choose 1 or more, the smaller one for min",
        )
        require(self.suffix_tokens >= 0, f"--suffix-tokens {self.suffix_tokens}: choose 0 or more")
        require(
            self.speculative in ("", "ngram", "suffix", "mtp") or bool(self.draft_model or self.eagle_head),
            f"--speculative {self.speculative}: choose ngram, suffix, draft:MODEL, eagle:DIR or mtp",
        )
        if self.speculative_config:
            self.resolved()
        else:
            require(
                self.speculative_sampling == "coupled" or self.method.has_weights,
                f"--speculative-sampling {self.speculative_sampling} needs drafts drawn from a distribution: choose "
                "--speculative draft:MODEL, eagle:DIR or mtp",
            )

    @property
    def draft_model(self) -> str:
        """Folder, GGUF file or hub id of the draft model; empty: none."""
        return self.speculative.removeprefix(DRAFT_PREFIX) if self.speculative.startswith(DRAFT_PREFIX) else ""

    @property
    def eagle_head(self) -> str:
        """Folder or hub id of the EAGLE-3 head; empty: none."""
        return self.speculative.removeprefix(EAGLE_PREFIX) if self.speculative.startswith(EAGLE_PREFIX) else ""

    @property
    def method(self) -> Method:
        if not self.speculative:
            return Method.NGRAM if self.num_speculative_tokens else Method.NONE
        return Method(self.speculative.partition(":")[0])

    @property
    def has_drafts(self) -> bool:
        """See EngineWing."""
        return self.resolved().num_speculative_tokens > 0

    @property
    def num_graph_sets(self) -> int:
        """See EngineWing: one of steps with drafts, one of steps that are planned while the previous one runs."""
        return 2 if self.has_drafts else 1

    def resolved(self) -> SpeculationSettings:
        """Return the settings with vLLM's JSON read and the number of drafts chosen. Raises ConfigError."""
        settings = self
        if self.speculative_config:
            settings = replace(self, speculative_config="", **_from_json(self.speculative_config))
        num_tokens = settings.num_speculative_tokens or DEFAULT_TOKENS[settings.method]
        return replace(settings, num_speculative_tokens=num_tokens)


def _from_json(text: str) -> Mapping[str, Any]:
    """Read vLLM's --speculative-config. Raises ConfigError for settings that are not supported."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    require(isinstance(given, dict), "--speculative-config: give a JSON object")
    model = given.pop("model", "")
    method = given.pop("method", "draft_model" if model else "ngram")
    if given.get("draft_tensor_parallel_size") == 1:  # our only choice, which vLLM's examples write
        del given["draft_tensor_parallel_size"]
    require(method in JSON_METHODS, f'--speculative-config: method "{method}" is none of {", ".join(JSON_METHODS)}')
    sampling = given.pop("draft_sample_method", "greedy")
    require(
        sampling in JSON_SAMPLING,
        f'--speculative-config: draft_sample_method "{sampling}" is none of {", ".join(JSON_SAMPLING)}',
    )
    verified_by = given.pop("rejection_sample_method", "standard")
    require(verified_by == "standard", f'--speculative-config: rejection_sample_method "{verified_by}" is not served')
    unknown = given.keys() - JSON_NAMES.keys()
    require(not unknown, f"--speculative-config: {', '.join(sorted(unknown))} is not served")
    require(all(isinstance(value, int) for value in given.values()), "--speculative-config: numbers must be integers")
    speculative = JSON_METHODS[method]
    if speculative in (DRAFT_PREFIX, EAGLE_PREFIX):
        kind = "a draft model" if speculative == DRAFT_PREFIX else "an EAGLE-3 head"
        require(bool(model), f"--speculative-config: {kind} needs its `model`")
        speculative += str(model)
    require(
        speculative != "mtp" or not model,
        "--speculative-config: mtp drafts by the served model's own module: leave `model` out",
    )
    return {
        "speculative": speculative,
        "speculative_sampling": JSON_SAMPLING[sampling],
        **{JSON_NAMES[name]: value for name, value in given.items()},
    }
