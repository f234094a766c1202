"""The config of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The shape and form of latent attention, see `engine.mla.latent_attention`.

    q_lora_rank: None: queries are not compressed. mscale: scores are multiplied by its square. rope_interleave: the
    checkpoint's rotary dimensions are pairs. form: what the pool keeps, and when it is expanded.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    mscale: float = 1.0
    rope_interleave: bool = True
    form: str = "absorbed"

    def as_cached(self) -> LatentConfig:
        """Return the config that KV depends on: two forms cache the same values."""
        return self if self.form == "naive" else replace(self, form="latent")

    def check_kernels(self) -> None:
        """Raise UnsupportedModelError for a form that GPUs have no kernels for."""
        if self.form != "absorbed":
            raise UnsupportedModelError(f"--mla {self.form} has no GPU kernels: use absorbed, or --device cpu")
