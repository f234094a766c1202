"""GGUF files of models with experts, of real widths but few layers, with random blocks: for `compare_cpu`.

    python -m benchmarks.comparisons.random_gguf --kind qwen3moe --tokenizer FILE.gguf --out moe.gguf

qwen3moe: 8 layers of Qwen3-30B-A3B with 64 experts, in Q4_K, some of it in Q6_K (2.0 GB). gpt-oss: 4 layers
of gpt-oss-20b, experts in MXFP4, others in Q8_0 (2.7 GB). The tokenizer is another file's.
"""

from __future__ import annotations

import argparse

import numpy as np
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

Kind = GGMLQuantizationType
CONTEXT = 8192


class RandomFile:
    """A file being written. hidden: columns of most weights."""

    def __init__(
        self, path: str, architecture: str, tokenizer: str, hidden: int, num_layers: int, inner: int
    ) -> None:
        self.writer = GGUFWriter(path, architecture)
        self.hidden, self.num_layers, self._random = hidden, num_layers, np.random.default_rng(0)
        fields = GGUFReader(tokenizer).fields
        for name, field in fields.items():
            if name.startswith("tokenizer."):
                is_array = field.types[0] == GGUFValueType.ARRAY
                kind = field.types[-1] if is_array else None
                self.writer.add_key_value(name, field.contents(), field.types[0], kind)
        self.num_tokens = len(fields["tokenizer.ggml.tokens"].data)
        self.writer.add_context_length(CONTEXT)
        self.writer.add_embedding_length(hidden)
        self.writer.add_block_count(num_layers)
        self.writer.add_feed_forward_length(inner)
        self.writer.add_expert_feed_forward_length(inner)

    def heads(self, count: int, num_kv: int, size: int, rope_base: float, eps: float) -> None:
        self.writer.add_head_count(count)
        self.writer.add_head_count_kv(num_kv)
        self.writer.add_key_length(size)
        self.writer.add_value_length(size)
        self.writer.add_rope_freq_base(rope_base)
        self.writer.add_layer_norm_rms_eps(eps)

    def experts(self, count: int, used: int) -> None:
        self.writer.add_expert_count(count)
        self.writer.add_expert_used_count(used)

    def blocks(self, name: str, kind: GGMLQuantizationType, *shape: int) -> None:
        """Add random bits with scales that keep activations in range."""
        columns, size = GGML_QUANT_SIZES[kind]
        raw = self._random.integers(0, 256, (*shape[:-1], shape[-1] // columns, size), dtype=np.uint8)
        scale = np.array([0.02 / {Kind.Q4_K: 160, Kind.Q6_K: 400, Kind.Q8_0: 100}.get(kind, 1)], np.float16)
        if kind == Kind.MXFP4:
            raw[..., 0] = self._random.integers(118, 121, raw.shape[:-1])
        elif kind == Kind.Q6_K:
            raw[..., 192:208] = self._random.integers(1, 40, (*raw.shape[:-1], 16))
            raw[..., 208:] = scale.view(np.uint8)
        else:
            raw[..., :2] = scale.view(np.uint8)
        if kind == Kind.Q4_K:
            raw[..., 2:4] = (6 * scale).astype(np.float16).view(np.uint8)
        self.writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=kind)

    def numbers(self, name: str, *shape: int) -> None:
        values = np.ones(shape) if "norm" in name else 0.05 * self._random.standard_normal(shape)
        self.writer.add_tensor(name, values.astype(np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_qwen3moe(path: str, tokenizer: str) -> None:
    file, num_experts, inner = RandomFile(path, "qwen3moe", tokenizer, 2048, 8, 768), 64, 768
    file.heads(32, 4, 128, 1e6, 1e-6)
    file.experts(num_experts, 8)
    file.blocks("token_embd.weight", Kind.Q4_K, file.num_tokens, file.hidden)
    file.blocks("output.weight", Kind.Q6_K, file.num_tokens, file.hidden)
    file.numbers("output_norm.weight", file.hidden)
    for layer in (f"blk.{index}." for index in range(file.num_layers)):
        for name, size in (("attn", file.hidden), ("ffn", file.hidden), ("attn_q", 128), ("attn_k", 128)):
            file.numbers(f"{layer}{name}_norm.weight", size)
        for name, rows, columns in (("q", 4096, 2048), ("k", 512, 2048), ("output", 2048, 4096)):
            file.blocks(f"{layer}attn_{name}.weight", Kind.Q4_K, rows, columns)
        file.blocks(f"{layer}attn_v.weight", Kind.Q6_K, 512, file.hidden)
        file.numbers(f"{layer}ffn_gate_inp.weight", num_experts, file.hidden)
        for name in ("gate", "up"):
            file.blocks(f"{layer}ffn_{name}_exps.weight", Kind.Q4_K, num_experts, inner, file.hidden)
        down = Kind.Q6_K if layer.endswith(("1.", "3.", "5.", "7.")) else Kind.Q4_K
        file.blocks(f"{layer}ffn_down_exps.weight", down, num_experts, file.hidden, inner)
    file.close()


def write_gpt_oss(path: str, tokenizer: str) -> None:
    file, num_experts, inner = RandomFile(path, "gpt-oss", tokenizer, 2880, 4, 2880), 32, 2880
    file.heads(64, 8, 64, 150_000.0, 1e-5)
    file.experts(num_experts, 4)
    file.writer.add_sliding_window(128)
    file.writer.add_rope_scaling_type(RopeScalingType.YARN)
    file.writer.add_rope_scaling_factor(32.0)
    file.writer.add_rope_scaling_orig_ctx_len(4096)
    for name in ("token_embd", "output"):
        file.blocks(f"{name}.weight", Kind.Q8_0, file.num_tokens, file.hidden)
    file.numbers("output_norm.weight", file.hidden)
    for layer in (f"blk.{index}." for index in range(file.num_layers)):
        for name in ("attn_norm", "post_attention_norm"):
            file.numbers(f"{layer}{name}.weight", file.hidden)
        for name, rows, columns in (("q", 4096, 2880), ("k", 512, 2880), ("v", 512, 2880), ("output", 2880, 4096)):
            file.blocks(f"{layer}attn_{name}.weight", Kind.Q8_0, rows, columns)
            file.numbers(f"{layer}attn_{name}.bias", rows)
        file.numbers(f"{layer}attn_sinks.weight", 64)
        file.numbers(f"{layer}ffn_gate_inp.weight", num_experts, file.hidden)
        file.numbers(f"{layer}ffn_gate_inp.bias", num_experts)
        for name, rows, columns in (("gate", inner, 2880), ("up", inner, 2880), ("down", 2880, inner)):
            file.blocks(f"{layer}ffn_{name}_exps.weight", Kind.MXFP4, num_experts, rows, columns)
            file.numbers(f"{layer}ffn_{name}_exps.bias", num_experts, rows)
    file.close()


WRITERS = {"qwen3moe": write_qwen3moe, "gpt-oss": write_gpt_oss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(WRITERS), required=True)
    parser.add_argument("--tokenizer", required=True, help="GGUF file whose tokenizer the model gets")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    WRITERS[options.kind](options.out, options.tokenizer)


if __name__ == "__main__":
    main()
