"""What becomes of a model's linear layers while it is built, where they do not stay plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.cpu_gemms.gemms import give_float32_logits
from engine.layers.block import Block
from engine.layers.weights import Part
from engine.models.model import Model


class Conversion:
    """The choice for one model, made before any weight is read, and its execution.

    quant_mode: the mode, or a checkpoint's label where its weights stay as they are. identity: what else tells models
    apart that are held otherwise: it does not follow from the files.
    """

    def __init__(self, quant_mode: str) -> None:
        self.quant_mode = quant_mode
        self.identity: dict[str, str] = {}

    @property
    def leaves_attention_plain(self) -> bool:
        """Whether `convert` finds the layers of attention plain."""
        return True

    def keep(self, skeleton: Model) -> frozenset[str]:
        """Choose weights that stay as the checkpoint holds them. Returns those that the model gets without storage.

        skeleton: the model without storage. Raises UnsupportedModelError for a choice that no kernel takes.
        """
        return frozenset()

    def start(self, parts: Mapping[str, Part], on_read: Callable[[str], None]) -> None:
        """parts: of weights of which this rank has no more. on_read: called with the name of each that is read."""

    def convert(self, block: Block) -> None:
        """Replace the block's linear layers in place. Raises ConfigError for values that cannot be."""

    def finish(self, model: Model) -> None:
        """Replace the output projection, when all blocks are done."""
        give_float32_logits(model)

    def end(self) -> None:
        """Log what became of the checkpoint. Raises ConfigError for tensors of it that cannot be left out."""
