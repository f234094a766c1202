"""What a model on a GPU writes, and what its layers made of that: the samples of `train_eagle_head.py --device cuda`.

The engine writes all texts first, many at once, in CUDA graphs, which show no states. Then each text passes through
the model once more, as a whole.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.layers.attention import AttentionBlock
from engine.layers.block import Step
from engine.layers.forward import plain
from engine.layers.rotary import Rotation
from engine.loader.load import LoadedModel, load_model
from engine.request import SamplingParams
from engine.speculation.heads.watching import watched

TOKENS_AT_ONCE = 32_768  # of a pass over whole texts


def written_on_gpu(
    model: str, prompts: Iterable[list[int]], num_tokens: int, temperature: float, ignore_eos: bool
) -> list[tuple[list[int], int]]:
    """Tokens of each text, and how many of them are its prompt."""
    config = EngineConfig(model, device="cuda", quant_mode="none", prefix_cache=False, kv_cache_gb=8.0)
    engine = assemble(config, is_offline=True).engine
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=ignore_eos)
    requests = [
        engine.add_request(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts) if prompt
    ]
    num_done = 0
    while engine.has_work():
        for output in engine.step().outputs:
            num_done += output.finish_reason is not None
            if output.finish_reason is not None and num_done % max(len(requests) // 10, 1) == 0:
                print(f"{num_done} of {len(requests)} sequences", flush=True)
    return [
        (request.prompt_token_ids + request.output_token_ids, len(request.prompt_token_ids)) for request in requests
    ]


def states_of(
    loaded: LoadedModel, texts: Sequence[list[int]], layers: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the index of each text, its states (n, 3 * hidden) and what the final norm reads (n, hidden).

    Both in bfloat16, of all tokens. For models whose layers look back to the start.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    while order:
        length = len(texts[order[-1]])
        count = max(TOKENS_AT_ONCE // length, 1)
        batch, order = order[-count:], order[:-count]
        tokens = torch.zeros(len(batch), length, dtype=torch.int64)
        for row, index in enumerate(batch):
            tokens[row, : len(texts[index])] = torch.tensor(texts[index])
        states, finals = _pass(loaded, tokens.to(loaded.device), layers)
        for row, index in enumerate(batch):
            own = slice(0, len(texts[index]))
            yield index, states[row, own].clone(), finals[row, own].clone()


@torch.inference_mode()
def _pass(loaded: LoadedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States (batch, n, 3 * hidden) and what the final norm reads (batch, n, hidden) of token ids (batch, n)."""
    model, (rows, length) = loaded.model, tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(rows)
    rotation = Rotation.of(model.rotary, positions)

    def attend(block: AttentionBlock, qkv: Tensor) -> Tensor:
        q, kv = block.heads(qkv, rotation)
        q = q.view(rows, length, -1, q.shape[-1]).transpose(1, 2)
        k, v = kv.view(rows, length, 2, -1, q.shape[-1]).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return block.outputs(attended.transpose(1, 2).flatten(0, 1))

    seen: dict[int, Tensor] = {}
    read = *layers, model.config.num_layers

    def see(number: int, residual: Tensor) -> None:
        seen[read[number]] = residual.bfloat16()

    watched(plain(model), model, read, see).hidden(Step(tokens.flatten(), positions, attend))
    states = torch.cat([seen[layer] for layer in layers], -1)
    return states.view(rows, length, -1), seen[model.config.num_layers].view(rows, length, -1)


def load_on_gpu(model: str) -> LoadedModel:
    """Load the model without quantization, once the engine has left its memory."""
    gc.collect()
    torch.cuda.empty_cache()
    return load_model(resolve_model(model), EngineConfig(model, device="cuda", quant_mode="none"))
