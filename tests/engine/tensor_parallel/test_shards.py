"""What tensor parallelism stands on: ranks built of slices add up to the whole model, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.attention import AttentionBlock
from engine.layers.block import Block, Step
from engine.layers.rotary import Rotation
from engine.layers.weights import Partition
from engine.loader.model_weights import ModelWeights
from engine.loader.random_weights import RandomWeights
from engine.mla.config import LatentConfig
from engine.mla.deepseek import with_latent
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.model import Model
from engine.models.rope import RopeConfig
from engine.moe.config import MoeConfig
from engine.moe.moe import Moe
from engine.tensor_parallel.rank_config import divided
from kernels.paged_attention import attend_causally
from kvstore.layout import Shard

NUM_TOKENS = 5
BASE: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 32, "num_layers": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "dense": ModelConfig(
        architecture="Qwen3ForCausalLM", qk_norm=True, attention_bias=True, attention_output_bias=True, **BASE
    ),
    "experts": ModelConfig(architecture="Qwen3MoeForCausalLM", moe=MoeConfig(4, 2, 16), **BASE),
    **{
        form: with_latent(
            ModelConfig(
                architecture="DeepseekV3ForCausalLM", attention_bias=True, attention_output_bias=True,
                moe=MoeConfig(4, 2, 16, num_shared_experts=3, score="sigmoid", has_choice_bias=True), **BASE,
            ),
            LatentConfig(q_rank, 16, 6, 4, 8, mscale=1.3, form=form),
        )
        for form, q_rank in (("absorbed", 12), ("latent", None), ("naive", 12))
    },
}  # fmt: skip


class Drawn:
    """Weights that are drawn once, biases too."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        random = RandomWeights(torch.float32, torch.device("cpu"), std=0.3)
        self.weights = {name: random.take(name, shape) for name, shape in shapes.items()}
        for name, weight in self.weights.items():
            if name.endswith(".bias"):
                weight.copy_(torch.arange(weight.shape[0]) / 10)

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        return self.weights[name].clone()


def slices(config: ModelConfig, rank: int, size: int) -> ModelWeights:
    """What one rank holds."""
    _, shapes = family_of(config.architecture).skeleton(config)
    return ModelWeights(Drawn(shapes), shapes, shapes, shard=Shard(rank, size))


def build(config: ModelConfig, rank: int, size: int, has_whole_experts: bool = False) -> Model:
    held = config if size == 1 else divided(config, size, rank if has_whole_experts else None)
    return family_of(config.architecture).build(held, slices(config, rank, size))


def output(block: Block, model: Model) -> Tensor:
    """Of random inputs, which are one sequence."""
    positions = torch.arange(NUM_TOKENS)

    def attend(block: AttentionBlock, qkv: Tensor) -> Tensor:
        q, kv = block.heads(qkv, Rotation.of(model.rotary, positions))
        return block.outputs(attend_causally(q, *block.context(kv.permute(1, 2, 0, 3))))

    x = torch.randn(NUM_TOKENS, 32, generator=torch.Generator().manual_seed(1))
    return block(x, Step(positions, positions, attend))


@pytest.mark.parametrize("size", [2, 4])  # 4: two ranks have the same KV head
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_outputs_of_ranks_add_up(name: str, size: int) -> None:
    whole = build(CONFIGS[name], 0, 1)
    ranks = [build(CONFIGS[name], rank, size) for rank in range(size)]
    for index, block in enumerate(whole.blocks):
        parts = [output(rank.blocks[index], rank) for rank in ranks]
        torch.testing.assert_close(sum(parts), output(block, whole), atol=1e-4, rtol=1e-4)
    padded = torch.cat([rank.embedding for rank in ranks])
    assert torch.equal(padded[:37], whole.embedding)
    x = torch.randn(NUM_TOKENS, 32)
    logits = torch.cat([rank.head(x) for rank in ranks], dim=1)[:, :37]
    torch.testing.assert_close(logits, whole.head(x))


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.moe is not None])
@torch.inference_mode()
def test_outputs_of_whole_experts_add_up(name: str) -> None:
    whole = build(CONFIGS[name], 0, 1)
    ranks = [build(CONFIGS[name], rank, 2, has_whole_experts=True) for rank in range(2)]
    for index, block in enumerate(whole.blocks):
        parts = [output(rank.blocks[index], rank) for rank in ranks]
        torch.testing.assert_close(sum(parts), output(block, whole), atol=1e-4, rtol=1e-4)
        if isinstance(block, Moe):
            held = [set(part.experts) for part in (rank.blocks[index] for rank in ranks) if isinstance(part, Moe)]
            assert held[0] | held[1] == set(block.experts)
            assert not held[0] & held[1]


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks cannot divide no experts"):
        divided(CONFIGS["dense"], 2, 0)
    with pytest.raises(ConfigError, match="8 query heads"):
        divided(CONFIGS["dense"], 6)
    with pytest.raises(ConfigError, match="3 ranks cannot divide 8 query heads"):
        divided(CONFIGS["dense"], 3)
