"""Agreement of quantized weights with bfloat16 on greedy tokens, with real weights, on a CPU.

    python -m benchmarks.accuracy.quant_agreement --json

The model answers fixed questions greedily in bfloat16. Each mode then reads the same answers in one step, with the
references in `kernels/` as its GEMMs, and names its most likely token at every place:

    teacher_forced   share of places where it is that of bfloat16, the text before being the same
    free_running     share of tokens before the first difference: what a generation of its own would have in common

Each mode runs with its own kind of output projection, with int8 there and with a plain one. float32 shows how much
bfloat16 itself changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.accuracy.agreement import Answer, answer, num_blocks, open_plain, read
from benchmarks.harness import report
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.config import EngineConfig
from engine.cpu_gemms.gemms import half
from engine.engine import Engine
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel, load_model
from engine.quantization.int4 import quantize_int4
from kernels.quantization.quantized_gemm import quantize_rows_fp8, quantize_rows_int8, quantized_linear, w8a16_linear
from kernels.quantization.w4a16_gemm import pack_w4, w4a16_linear

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


def fp8(linear: Linear) -> Linear:
    return _with(quantized_linear, *quantize_rows_fp8(linear.weight), linear.bias)


def w8a8(linear: Linear) -> Linear:
    return _with(quantized_linear, *quantize_rows_int8(linear.weight), linear.bias)


def int8_weight(linear: Linear) -> Linear:
    return _with(w8a16_linear, *quantize_rows_int8(linear.weight), linear.bias)


def int4_weight(linear: Linear) -> Linear:
    """Quantize the weight as a file without calibration would."""
    rows = quantize_int4(linear.weight)
    packed = pack_w4(rows.values, rows.scales, rows.offsets_or_zeros())
    return Linear(packed.words, linear.bias, gemm=lambda layer, x: w4a16_linear(x, packed, layer.bias))


def _with(multiply: Callable[..., Tensor], weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
    return Linear(weight, bias, gemm=lambda _, x: multiply(x, weight, scales, bias))


MODES: dict[str, Callable[[Linear], Linear]] = {
    "fp8": fp8, "w8a8": w8a8, "int8-weight": int8_weight, "int4-weight": int4_weight,
}  # fmt: skip


def convert(mode: str, linear: Linear) -> Linear:
    weight = torch.ops.quantized.linear_unpack_fp16(linear.weight)[0] if linear.gemm is half else linear.weight
    return MODES[mode](Linear(weight.bfloat16(), linear.bias))


def load(dtype: str) -> LoadedModel:
    return load_model(resolve_model(""), EngineConfig(device="cpu", dtype=dtype, quant_mode="none"))


def agreement(engine: Engine, answers: Sequence[Answer]) -> dict[str, float]:
    """Read all answers in one step, as prompts with log-probabilities."""
    same = before_first = total = 0
    for each, entries in zip(answers, read(engine, answers), strict=True):
        is_equal = [entry.top_token_ids[0] == entry.token_id for entry in entries[-len(each.token_ids) :]]
        same += sum(is_equal)
        before_first += is_equal.index(False) if False in is_equal else len(is_equal)
        total += len(is_equal)
    return {"teacher_forced": round(same / total, 4), "free_running": round(before_first / total, 4), "tokens": total}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.quant_agreement", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--modes", nargs="+", default=[*MODES, "float32"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(resolve_model(""))
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    config = EngineConfig(
        device="cpu",
        max_num_seqs=len(prompts),
        max_num_batched_tokens=1 << 14,
        num_gpu_blocks=num_blocks([len(prompt) for prompt in prompts], options.tokens),
    )
    answers = answer(open_plain(load("bfloat16"), config)[0], prompts, options.tokens, ignore_eos=False)
    for mode in options.modes:
        for head in ("own", "int8", "plain") if mode in MODES else ("plain",):
            if mode in ("w8a8", "int8-weight") and head == "int8":
                continue  # the same as its own kind
            loaded = load("float32" if mode == "float32" else "bfloat16")
            model, plain_head = loaded.model, loaded.model.head
            if mode in MODES:
                for ref in model.linears():
                    ref.replace(convert(mode, ref.layer))
            if head == "plain":
                model.head = plain_head
            elif head == "int8":
                model.head = convert("w8a8", plain_head)
            figures = {"mode": mode, "head": head, **agreement(open_plain(loaded, config)[0], answers)}
            report(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
