"""Speed of vLLM's `LLM` in the shapes of `benchmarks.engine`, as the same JSON lines. Needs nothing but vLLM.

    python benchmarks/comparisons/vllm_engine.py --model benchmarks/configs/qwen2.5-7b --batch 1,8,64 --prefill 8192
    python benchmarks/comparisons/vllm_engine.py --model benchmarks/configs/qwen2.5-7b --batch 64 --adapters 32
    python benchmarks/comparisons/vllm_engine.py --model benchmarks/configs/qwen2.5-7b --batch 1,8,64 --drafts 3
        --accuracy 0.7,0.9

Run by `benchmarks.comparisons.compare_vllm`. Weights are random; with those, a router of experts sends nearly all
tokens to a few of them, so here tokens go to random experts (VLLM_MOE_ROUTING_SIMULATION_STRATEGY). Speeds are those
of decoding: from a batch's time that of the same prompts with one output token is taken off. The best of a few, each
with new prompts. With --adapters, each batch runs without and with LoRA adapters of all linear layers; with
--accuracy, n-gram speculation drafts, every token is followed by itself, and vLLM's synthetic rejection accepts a
draft with that probability, as in `benchmarks.speculation`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

HEADROOM = 8  # tokens of a sequence in addition to prompt and answer


class Bench:
    """One loaded engine of vLLM, and what its requests look like."""

    def __init__(self, options: argparse.Namespace, folder: Path, **settings: Any) -> None:
        self.vllm: Any = importlib.import_module("vllm")  # imported late, because it reads the environment
        self.config = json.loads(Path(options.model, "config.json").read_text(encoding="utf-8"))
        self.rounds = options.rounds
        if options.quant_mode == "none":
            self.config.pop("quantization_config", None)
        elif options.quant_mode != "auto":
            settings["quantization"] = options.quant_mode
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        longest = max([options.input + options.output if options.batch else 0, *options.prefill])
        self.llm = self.vllm.LLM(
            model=str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, seed=0,
            max_model_len=longest + HEADROOM, max_num_seqs=max([*options.batch, 1]), enable_prefix_caching=False,
            tensor_parallel_size=options.tp, **settings,
        )  # fmt: skip

    def seconds(self, num_rows: int, num_input: int, num_output: int, **more: Any) -> float:
        """Return the best time of a few runs for `num_rows` prompts at once."""
        vocab_size = self.config.get("vocab_size") or self.config["text_config"]["vocab_size"]
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        times = []
        for _ in range(1 + self.rounds):  # the first one warms up
            prompts = [
                {"prompt_token_ids": [random.randrange(vocab_size) for _ in range(num_input)]}
                for _ in range(num_rows)
            ]
            began = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False, **more)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def decode(self, batch: int, options: argparse.Namespace, **more: Any) -> dict[str, float]:
        """Return the speed of a batch's decode steps, and the time of its prompts."""
        first = self.seconds(batch, options.input, 1, **more)
        decoding = self.seconds(batch, options.input, options.output, **more) - first
        return {
            "batch": batch,
            "tok_s": round(batch * (options.output - 1) / decoding, 1),
            "prefill_s": round(first, 4),
        }


def main() -> None:
    options = parse()
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with tempfile.TemporaryDirectory() as folder:
        if options.adapters:
            with_adapters(options, Path(folder))
        elif options.accuracy:
            with_drafts(options, Path(folder))
        else:
            bench = Bench(options, Path(folder))
            for batch in options.batch:
                report(**bench.decode(batch, options))
            for num_tokens in options.prefill:
                report(prefill=num_tokens, prefill_s=round(bench.seconds(1, num_tokens, 1), 4))


def with_adapters(options: argparse.Namespace, folder: Path) -> None:
    """Measure each batch without adapters, and with one that its rows name in turn."""
    count, rank = options.adapters, options.rank
    bench = Bench(options, folder, enable_lora=True, max_loras=count, max_lora_rank=rank, max_cpu_loras=count)
    request = importlib.import_module("vllm.lora.request").LoRARequest
    adapters = [
        request(str(index), 1 + index, str(write_adapter(folder / str(index), bench.config, rank)))
        for index in range(count)
    ]
    times = []
    for adapter in adapters:
        began = time.perf_counter()
        bench.llm.llm_engine.add_lora(adapter)
        times.append(time.perf_counter() - began)
    report(load_ms=round(1e3 * sorted(times)[count // 2], 1), most_ms=round(1e3 * max(times), 1))
    for batch in options.batch:
        plain = bench.decode(batch, options)["tok_s"]
        rows = [adapters[row % count] for row in range(batch)]
        speed = bench.decode(batch, options, lora_request=rows)["tok_s"]
        report(batch=batch, adapters=min(count, batch), plain_tok_s=plain, tok_s=speed, ratio=round(speed / plain, 3))


def write_adapter(folder: Path, config: dict[str, Any], rank: int) -> Path:
    """Write a PEFT adapter of all linear layers of a dense model."""
    torch, save_file = importlib.import_module("torch"), importlib.import_module("safetensors.torch").save_file
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }  # fmt: skip
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.01
    names = sorted({name.split(".")[1] for name in shapes})
    folder.mkdir()
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def with_drafts(options: argparse.Namespace, folder: Path) -> None:
    """Measure each batch with n-gram speculation whose drafts are accepted with a probability."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the worker
    drafts = {
        "method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 4,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.0,
    }  # fmt: skip
    bench = Bench(options, folder, speculative_config=drafts)
    bench.llm.apply_model(repeat_tokens)
    for accuracy in options.accuracy:
        bench.llm.collective_rpc(accept, args=(accuracy,))
        for batch in options.batch:
            report(accuracy=accuracy, drafts=options.drafts, **bench.decode(batch, options))


def repeat_tokens(model: Any) -> None:
    """Change the weights so that every token is followed by itself: blocks add little to the embedding."""
    embedding = model.model.embed_tokens.weight.data
    embedding.copy_(embedding.float().sign() * 30)
    model.lm_head.weight.data.copy_(embedding)
    model.model.norm.weight.data.fill_(1.0)


def accept(worker: Any, accuracy: float) -> None:
    """Let the rejection sampler accept each draft with this probability, if those before it are accepted."""
    worker.model_runner.rejection_sampler.synthetic_conditional_rates.fill_(accuracy)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of vLLM with random weights.")
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument(
        "--quant-mode", default="none", help="none, auto (the checkpoint's), or vLLM's `quantization`"
    )
    parser.add_argument("--batch", type=int_list, default=[])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", type=int_list, default=[], help="single prompts of these lengths")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="the best counts, after one more")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that rows name in turn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--drafts", type=int, default=3, help="tokens drafted per step, with --accuracy")
    parser.add_argument("--accuracy", type=float_list, default=[], help="probability that a draft is accepted")
    return parser.parse_args()


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def float_list(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def report(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
