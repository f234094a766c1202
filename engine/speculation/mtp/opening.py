"""Reads the module for multi-token prediction from the model's files, and lets it draft.

The model's family builds the decoder layer: it builds a model with one more layer, whose other weights have no
storage. So quantized checkpoints and `--quant-mode` work as for the model's own layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from engine.config import EngineConfig
from engine.cpu_gemms.gemms import dense_linear
from engine.dummy_weights.weights import is_asked
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.layers.weights import Part, PartSource
from engine.loader.checkpoint import Shape
from engine.loader.load import LoadedModel
from engine.loader.partial_weights import PartialWeights
from engine.loader.random_weights import RandomWeights
from engine.loader.safetensors import read_header, weight_files
from engine.loader.source import Source, open_source
from engine.models.hf_config import read_hf_config
from engine.speculation.draft_length import DraftLengths
from engine.speculation.heads.proposer import FromHead
from engine.speculation.heads.whole import check_ranks, whole_vocabulary
from engine.speculation.mtp.module import ModuleWeights, MtpModule
from kvstore.layout import WHOLE

logger = logging.getLogger(__name__)
FLAG = "--speculative mtp"


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names of the module's own weights, without `.weight`.

    layer: the first module; {}: the number of the model's layers. embedding, head: optional copies. hidden_first:
    `joint` reads the hidden state before the embedding.
    """

    layer: str = "model.layers.{}"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joint: str = "eh_proj"
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"
    embedding: str = "embed_tokens"
    hidden_first: bool = False


MIMO = Names(
    "model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
)  # fmt: skip
FAMILIES = {"DeepseekV3ForCausalLM": Names(), "MiMoForCausalLM": MIMO}


class Renamed(PartSource):
    """The weights of `source`, with those of the layer `stored` under the name of the layer `asked`."""

    def __init__(self, source: PartSource, asked: str, stored: str) -> None:
        self._source, self._asked, self._stored = source, f"{asked}.", f"{stored}."

    def take_part(self, name: str, part: Part) -> Tensor:
        """See PartSource."""
        return self._source.take_part(self.stored_name(name), part)

    def stored_name(self, name: str) -> str:
        return self._stored + name.removeprefix(self._asked) if name.startswith(self._asked) else name


def open_module(num_tokens: int, config: EngineConfig, loaded: LoadedModel, lengths: DraftLengths) -> FromHead:
    """Open the model's module. Raises ConfigError if it has none, or one that is not supported."""
    check_ranks(FLAG, config)
    if config.is_simulated:
        raise ConfigError(f"{FLAG}: --simulated-steps compute nothing that the module could read")
    with torch.inference_mode():
        module = read_module(resolve_model(config.model), config, loaded)
    return FromHead(module, lengths, num_tokens, loaded.config.vocab_size)


def read_module(files: ModelFiles, engine_config: EngineConfig, loaded: LoadedModel) -> MtpModule:
    """Read the model's first module onto its device. Raises ConfigError."""
    names = FAMILIES.get(loaded.config.architecture)
    if names is None:
        raise ConfigError(f"{FLAG} knows modules of {', '.join(FAMILIES)}, not of {loaded.config.architecture}")
    if files.kind != "directory":
        raise ConfigError(f"{FLAG} reads no modules of GGUF files: name a folder with safetensors, or a hub id")
    count = int(read_hf_config(files.path).get("num_nextn_predict_layers") or 0)
    if not count:
        raise ConfigError(f"{FLAG}: {files.name} has no module: config.json has no num_nextn_predict_layers")
    logger.info("drafts by the first of %d MTP modules", count)
    source = open_source(files, engine_config, loaded.dtype, loaded.device)
    if not isinstance(source.weights, PartSource | RandomWeights):
        raise ConfigError(f"{FLAG} needs hidden states, which models by transformers' code do not give")
    config, model = source.config, loaded.model
    layer, hidden = names.layer.format(config.num_layers), config.hidden_size
    own = {
        names.embedding_norm: (hidden,), names.hidden_norm: (hidden,), names.norm: (hidden,),
        names.joint: (hidden, 2 * hidden),
    }  # fmt: skip
    if not is_asked(engine_config):
        stored = {name for path in weight_files(files.path) for name in read_header(path)}
        copies = (name for name in (names.embedding, names.head) if f"{layer}.{name}.weight" in stored)
        own |= dict.fromkeys(copies, (config.vocab_size, hidden))
    blocks, found = _read(source, engine_config, loaded, layer, own)
    embedding, head = found.get(names.embedding), found.get(names.head)
    of_model, model_head = whole_vocabulary(engine_config, loaded)
    if embedding is None or torch.equal(embedding, of_model):
        embedding = of_model
    if head is not None:
        if not config.tie_word_embeddings:
            of_model = source.weights.take("lm_head.weight", (config.vocab_size, hidden))
        head = None if torch.equal(head, of_model) else head
    is_own = head is not None or loaded.shard.size > 1
    hidden_dtype = loaded.dtype if is_own else model.hidden_dtype  # the dtype that the output projection reads
    joint = found[names.joint].roll(hidden, 1) if names.hidden_first else found[names.joint]
    return MtpModule(
        ModuleWeights(
            model.final_norm, model.rotary, embedding, found[names.embedding_norm], found[names.hidden_norm],
            dense_linear(joint, None), blocks, found[names.norm],
            model_head if head is None else Linear(head), hidden_dtype,
        ),
        config.num_layers,
        config.rms_norm_eps,
    )  # fmt: skip


def _read(
    source: Source, engine_config: EngineConfig, loaded: LoadedModel, layer: str, own: Mapping[str, Shape]
) -> tuple[list[Block], dict[str, Tensor]]:
    """Read the blocks of this decoder layer, as the one after the model's last, and the module's own weights."""
    asked = f"model.layers.{source.config.num_layers}"
    source = replace(source, config=replace(source.config, num_layers=source.config.num_layers + 1, expert_slots=()))
    config, weights = source.config, source.weights
    skeleton, shapes = source.family.skeleton(config)
    own = {f"{asked}.{name}.weight": shape for name, shape in own.items()}
    needed = {name: shape for name, shape in shapes.items() if name.startswith(f"{asked}.")} | own
    if isinstance(weights, PartSource):
        weights = Renamed(weights, asked, layer)
        stored = {weights.stored_name(name): shape for name, shape in (shapes | needed).items()}
        assert source.check is not None, "random weights have no parts"
        source.check(stored, tied=config.tie_word_embeddings, unused=config.unused_weights)
    conversion = source.conversion(engine_config, WHOLE, loaded.dtype, loaded.device)
    kept = frozenset[str]() if conversion is None else conversion.keep(skeleton)
    taken = PartialWeights(weights, needed, kept=kept, dtype=loaded.dtype, device=loaded.device)
    if conversion is not None:
        conversion.start(taken.parts, taken.count)

    def finish(block: Block) -> None:
        if conversion is not None and not block.norm.is_meta:
            conversion.convert(block)

    blocks = [block for block in source.family.build(config, taken, finish).blocks if not block.norm.is_meta]
    found = {name.removeprefix(f"{asked}.").removesuffix(".weight"): taken.take(name, own[name]) for name in own}
    if conversion is not None:
        conversion.end()
    return blocks, found
