"""How often quantized weights choose the token that bfloat16 chooses: greedy, on real weights, on a CPU.

    python -m benchmarks.quant_agreement --json

The model answers fixed questions greedily in bfloat16. Each mode then reads the same answers in one pass, with the
references in `kernels/` as its products, and names its most likely token at every place:

    teacher_forced   share of places where it is that of bfloat16, the text before being the same
    free_running     share of tokens before the first difference: what a generation of its own would have in common

Each mode runs with its own kind of output projection, with int8 there and with a plain one. float32 shows how much
bfloat16 itself changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from common.model_files import resolve_model
from common.text.tokenizer import load_tokenizer
from engine.config import EngineConfig
from engine.layers.block import Step
from engine.layers.forward import plain
from engine.layers.linear import Linear, LinearLayer
from engine.loader.gguf_int4 import quantize_int4
from engine.loader.load import load_model
from engine.models.model import Model
from kernels.fp8_gemm import fp8_linear, quantize_rows_fp8
from kernels.w4a16_gemm import pack_w4, w4a16_linear
from kernels.w8a8_gemm import quantize_rows_int8, w8a8_linear, w8a16_linear

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a short poem about the sea in winter.",
    "Give me a recipe for a simple tomato soup.",
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name five animals that live in Africa and describe one of them.",
    "What should I pack for a week of hiking in the mountains?",
    "Summarize the story of Romeo and Juliet.",
    "How does a refrigerator work?",
)
Rounded = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CausalAttention:
    """Attention of one whole sequence over itself."""

    num_heads: int
    num_kv_heads: int

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        heads, middle = qkv.transpose(0, 1), self.num_heads + self.num_kv_heads
        q, k, v = heads[: self.num_heads], heads[self.num_heads : middle], heads[middle:]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def fp8(linear: Linear) -> LinearLayer:
    return partial(_product, fp8_linear, *quantize_rows_fp8(linear.weight), linear.bias)


def w8a8(linear: Linear) -> LinearLayer:
    return partial(_product, w8a8_linear, *quantize_rows_int8(linear.weight), linear.bias)


def int8_weight(linear: Linear) -> LinearLayer:
    return partial(_product, w8a16_linear, *quantize_rows_int8(linear.weight), linear.bias)


def int4_weight(linear: Linear) -> LinearLayer:
    """What a file without calibration would hold."""
    rows = quantize_int4(linear.weight)
    packed = pack_w4(rows.values, rows.scales, rows.zeros)
    return lambda x: w4a16_linear(x, packed, linear.bias)


def _product(
    product: Callable[..., Tensor], weight: Tensor, scales: Tensor, bias: Tensor | None, x: Tensor
) -> Tensor:
    return product(x, weight, scales, bias)


MODES: dict[str, Callable[[Linear], LinearLayer]] = {
    "fp8": fp8, "w8a8": w8a8, "int8-weight": int8_weight, "int4-weight": int4_weight,
}  # fmt: skip


def convert(mode: str, linear: LinearLayer) -> LinearLayer:
    assert isinstance(linear, Linear)
    return MODES[mode](linear)


def load(dtype: str) -> Model:
    config = EngineConfig(device="cpu", dtype=dtype, quant_mode="none")
    return load_model(resolve_model(""), config, torch.device("cpu")).model


def logits_of(model: Model, token_ids: Sequence[int]) -> Tensor:
    """(num_tokens, vocab) of one sequence."""
    attention = CausalAttention(model.config.num_heads, model.config.num_kv_heads)
    forward = plain(model)
    step = Step.of(model.rotary, torch.tensor(token_ids), torch.arange(len(token_ids)), attention.attend)
    return forward.logits(forward.hidden(step))


def answer(model: Model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy, everything computed anew for each token: one function for reading and for writing."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(logits_of(model, token_ids)[-1].argmax()))
        if token_ids[-1] in model.config.eos_token_ids:
            break
    return token_ids[len(prompt) :]


def agreement(model: Model, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    same = before_first = total = 0
    for prompt, tokens in zip(prompts, answers, strict=True):
        chosen = logits_of(model, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1)
        equal = (chosen == torch.tensor(tokens)).tolist()
        same += sum(equal)
        before_first += equal.index(False) if False in equal else len(equal)
        total += len(tokens)
    return {"teacher_forced": round(same / total, 4), "free_running": round(before_first / total, 4), "tokens": total}


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant_agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--modes", nargs="+", default=[*MODES, "float32"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(resolve_model(""))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in QUESTIONS
    ]
    plain = load("bfloat16")
    answers = [answer(plain, prompt, options.tokens) for prompt in prompts]
    for mode in options.modes:
        for head in ("own", "int8", "plain") if mode in MODES else ("plain",):
            if mode in ("w8a8", "int8-weight") and head == "int8":
                continue  # its own
            model = load("float32" if mode == "float32" else "bfloat16")
            plain_head = model.head
            if mode in MODES:
                for ref in model.linears():
                    ref.replace(convert(mode, ref.layer))
            if head == "plain":
                model.head = plain_head
            elif head == "int8":
                model.head = convert("w8a8", plain_head)
            figures = {"mode": mode, "head": head, **agreement(model, prompts, answers)}
            print(json.dumps(figures) if options.json else figures, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
