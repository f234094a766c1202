"""Trains an EAGLE-3 head on what a model writes itself, and saves it for `--speculative eagle:DIR`.

python examples/train_eagle_head.py --text prompts.txt --out head
mini-infer serve --speculative eagle:head

The engine that will serve the head continues each paragraph of the text and shows its hidden states, so the head
learns them as they will be: of any model that a CPU serves, quantized ones and GGUF files too. With `--device cuda`
the model is read in bfloat16 and learns from millions of tokens in minutes. The head is trained as in the paper
(arXiv:2503.01840, "training-time test"): after a pass over the model's states come passes in which its own outputs
stand in their place, as they do when it drafts further than one token.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.cpu.forward import CpuForward
from engine.layers.rotary import rotary_table
from engine.loader.load import LoadedModel, load_model, read_config
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from engine.rope_scaling.scaling import Scaling
from engine.runner import Proposer
from engine.speculation.heads.watching import Residuals
from examples.eagle_states import load_on_gpu, states_of, written_on_gpu
from kernels.elementwise import rms_norm

MAX_LENGTH = 8192  # of a sample
STEP_WEIGHT = 0.8  # of a pass's loss, against that of the pass before
OPENING = "<|im_start|>user\n"  # of samples without a text: a chat model writes a question, and then its answer


@dataclass(frozen=True)
class Sample:
    """A sequence, the inputs of three layers for all its tokens but the last, and what the model's final norm read
    after each token from the last of the prompt on.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    states: Tensor  # (len(token_ids) - 1, 3 * hidden)
    finals: Tensor  # (len(token_ids) - num_prompt_tokens, hidden)


class Collector(Proposer):
    """Keeps the hidden states of every request. Drafts nothing."""

    def __init__(self, layers: Sequence[int], num_layers: int) -> None:
        """num_layers: of the model."""
        self.layers = tuple(sorted({*layers, num_layers}))
        self._residuals = Residuals(self.layers)
        self._order = [self.layers.index(layer) for layer in layers]
        self._states: dict[RequestId, list[Tensor]] = {}
        self._finals: dict[RequestId, list[Tensor]] = {}

    def watch(self, model: Model, forward: CpuForward) -> CpuForward:
        """See Proposer."""
        return self._residuals.watch(model, forward)

    def observe(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> None:
        """See Proposer."""
        residuals = self._residuals.take()
        counts = [row.num_tokens for row in rows]
        states = torch.split(torch.cat([residuals[index] for index in self._order], -1).bfloat16(), counts)
        finals = torch.split(residuals[-1], counts)
        for row, request, of_layers, final in zip(rows, requests, states, finals, strict=True):
            self._states.setdefault(request.request_id, []).append(of_layers)
            if row.samples:
                self._finals.setdefault(request.request_id, []).append(final[-1].to(torch.bfloat16, copy=True))

    def sample(self, request_id: RequestId, token_ids: list[int], num_prompt_tokens: int) -> Sample:
        states, finals = torch.cat(self._states.pop(request_id)), torch.stack(self._finals.pop(request_id))
        return Sample(token_ids, num_prompt_tokens, states, finals)


def collect(
    model: str, prompts: Iterable[list[int]], num_tokens: int, layers: Sequence[int], temperature: float,
    ignore_eos: bool = False, **settings: object,
) -> list[Sample]:  # fmt: skip
    """What the model makes of each prompt, `num_tokens` at most, with its hidden states."""
    base = {"device": "cpu", "prefix_cache": False, "num_gpu_blocks": 4096, "max_num_seqs": 64}
    parts = assemble(EngineConfig(model, **{**base, **settings}), is_offline=True)  # type: ignore[arg-type]
    collector, engine = Collector(layers, parts.loaded.config.num_layers), parts.engine
    parts.runner.propose_with(collector)
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=ignore_eos)
    requests = [
        engine.add_request(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts) if prompt
    ]
    samples: list[Sample] = []
    while engine.has_work():
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                request = output.request
                token_ids = [*request.prompt_token_ids, *request.output_token_ids]
                samples.append(collector.sample(request.request_id, token_ids, len(request.prompt_token_ids)))
                if len(samples) % max(len(requests) // 10, 1) == 0:
                    print(f"{len(samples)} of {len(requests)} sequences", flush=True)
    assert len(samples) == len(requests)
    return samples


def collect_on_gpu(
    model: str, prompts: Iterable[list[int]], num_tokens: int, layers: Sequence[int], temperature: float,
    ignore_eos: bool,
) -> tuple[LoadedModel, list[Sample]]:  # fmt: skip
    """The model, and samples as `collect` gives them."""
    written = written_on_gpu(model, prompts, num_tokens, temperature, ignore_eos)
    loaded = load_on_gpu(model)
    samples = []
    for index, states, finals in states_of(loaded, [token_ids for token_ids, _ in written], layers):
        token_ids, num_prompt_tokens = written[index]
        samples.append(Sample(token_ids, num_prompt_tokens, states[:-1], finals[num_prompt_tokens - 1 : -1]))
    return loaded, samples


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.size, self.repeats = config.head_dim, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(2 * hidden, config.q_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.kv_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of a pass over x (batch, n, 2 * hidden), whose K and V join those of earlier passes.

        In pass s a position t reads the first pass's K up to t - s; then pass j stands for t - s + j.
        """
        batch, length, _ = x.shape
        q, k, v = (proj(x).view(batch, length, -1, self.size) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, rotary), rotated(k, rotary)
        keys.append(k.repeat_interleave(self.repeats, 2))
        values.append(v.repeat_interleave(self.repeats, 2))
        index = len(keys) - 1
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-index)
        allowed[:index, 0] = True  # positions that mean nothing: something finite
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0]).masked_fill(~allowed, float("-inf"))
        later = [(keys[j].roll(index - j, dims=1), values[j].roll(index - j, dims=1)) for j in range(1, index + 1)]
        own = [(q * k).sum(-1).transpose(1, 2).unsqueeze(-1) for k, _ in later]
        shares = (torch.cat([scores, *own], -1) / self.size**0.5).softmax(-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", shares[..., :length], values[0])
        for j, (_, v) in enumerate(later):
            attended = attended + shares[..., length + j].transpose(1, 2).unsqueeze(-1) * v
        return self.o_proj(attended.flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = SelfAttention(config)
        self.mlp = Mlp(hidden, config.intermediate_size)


class Head(nn.Module):
    """The head, whose norm and rows of the output are the model's at first. Its names are those of the files."""

    token_ids: Tensor
    embedding: Tensor
    target_norm: Tensor
    target_rows: Tensor
    rotary: Tensor

    def __init__(self, loaded: LoadedModel, token_ids: Tensor) -> None:
        """token_ids: of the head's vocabulary, in rising order."""
        super().__init__()
        model, config = loaded.model, loaded.config
        self.config, hidden = config, config.hidden_size
        device = model.embedding.device
        token_ids = token_ids.to(device)
        rows = model.head(torch.eye(hidden, dtype=model.hidden_dtype, device=device)).T[token_ids].float()
        table = rotary_table(config.rope, config.head_dim, MAX_LENGTH, torch.float32, rows.device)
        fixed = {
            "token_ids": token_ids, "embedding": model.embedding.float(), "target_norm": model.final_norm.float(),
            "target_rows": rows, "rotary": table,
        }  # fmt: skip
        for name, value in fixed.items():
            self.register_buffer(name, value.clone(), persistent=False)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(token_ids), bias=False)
        with torch.no_grad():
            self.norm.weight.copy_(model.final_norm)
            self.lm_head.weight.copy_(rows)
        self.to(device)

    def forward(self, next_ids: Tensor, states: Tensor, num_passes: int) -> list[Tensor]:
        """Logits (batch, n, draft vocab) of each pass. next_ids: (batch, n), of the tokens after those of `states`
        (batch, n, 3 * hidden). Of pass s the first s positions mean nothing.
        """
        layer, hidden = self.midlayer, self.fc(states)
        embedded = layer.input_layernorm(functional.embedding(next_ids, self.embedding))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for _ in range(num_passes):
            x = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
            hidden = hidden + layer.self_attn(x, self.rotary[: x.shape[1]], keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
            hidden = hidden.roll(1, dims=1)  # the next pass reads at each position what this one made of that before
        return found

    def save(self, path: Path, layers: Sequence[int]) -> None:
        """Write the published layout."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.bfloat16().cpu() for name, value in self.state_dict().items()}
        ids, is_drafted = self.token_ids.cpu(), torch.zeros(self.config.vocab_size, dtype=torch.bool)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = is_drafted.index_fill_(0, ids, True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(head_config(self.config, len(ids), layers), indent=2) + "\n")


def rotated(heads: Tensor, rotary: Tensor) -> Tensor:
    """heads: (batch, n, heads, head_dim). rotary: see `rotary_table`."""
    cos, sin = rotary[:, None].unbind(2)
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def head_config(config: ModelConfig, draft_vocab: int, layers: Sequence[int]) -> dict[str, object]:
    rope, scaling = config.rope, config.rope.scaling
    written = None
    if isinstance(scaling, Scaling):
        if scaling.kind != "llama3":
            raise SystemExit(f"rotary embedding of kind {scaling.kind} is not written")
        written = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "rope_theta": rope.theta,
        "rope_scaling": written, "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size, "draft_vocab_size": draft_vocab, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eagle_aux_hidden_state_layer_ids": list(layers),
    }  # fmt: skip


def train(
    head: Head, samples: Sequence[Sample], num_steps: int, batch: int, rate: float, num_passes: int, seed: int = 0
) -> float:
    """AdamW with a warm-up and a cosine decay. Returns the loss of the last steps' first passes."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=num_steps, pct_start=0.1)
    rng, began, losses = random.Random(seed), time.monotonic(), list[float]()
    for step in range(1, num_steps + 1):
        next_ids, states, finals, weights = batch_of(rng.sample(samples, min(batch, len(samples))))
        with torch.no_grad():
            targets = (rms_norm(finals, head.target_norm, head.config.rms_norm_eps) @ head.target_rows.T).softmax(-1)
        total = targets.new_zeros(())
        for index, logits in enumerate(head(next_ids, states, num_passes)):
            loss = -(targets * logits.log_softmax(-1)).sum(-1)[:, index:]
            counted = weights[:, index:]
            loss = (loss * counted).sum() / counted.sum()
            total = total + STEP_WEIGHT**index * loss
            if index == 0:
                losses.append(float(loss.detach()))
        optimizer.zero_grad()
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(num_steps // 20, 1) == 0:
            recent = losses[-max(num_steps // 20, 1) :]
            print(f"step {step}: loss {sum(recent) / len(recent):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return sum(losses[-20:]) / len(losses[-20:])


def batch_of(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens after each position (batch, n), states there, what the final norm reads after those tokens
    (batch, n, hidden), and which of the positions count: in float32.
    """
    length = max(len(sample.token_ids) for sample in samples) - 2
    rows, device = len(samples), samples[0].states.device
    next_ids = torch.zeros(rows, length, dtype=torch.long)
    states = torch.zeros(rows, length, samples[0].states.shape[1], device=device)
    finals = torch.zeros(rows, length, samples[0].finals.shape[1], device=device)
    weights = torch.zeros(rows, length, device=device)
    for row, sample in enumerate(samples):
        count = len(sample.token_ids) - 2
        first = max(sample.num_prompt_tokens - 2, 0)  # its next token is the prompt's last one
        next_ids[row, :count] = torch.tensor(sample.token_ids[1:-1])
        states[row, :count] = sample.states[:count].float()
        finals[row, first:count] = sample.finals[first + 2 - sample.num_prompt_tokens :][: count - first].float()
        weights[row, first:count] = 1
    return next_ids.to(device), states, finals, weights


def most_common(samples: Iterable[Sample], count: int) -> Tensor:
    """The tokens that the samples have most often, in rising order."""
    counts = Counter(token for sample in samples for token in sample.token_ids)
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def prompts_of(model: str, text: str, is_chat: bool, num_samples: int, num_tokens: int) -> list[list[int]]:
    """The paragraphs of a text: beginnings that the model continues, or questions that it answers. Without a text
    what lets a chat model write a question itself.
    """
    tokenizer = load_tokenizer(resolve_model(model))
    if not text:
        return [tokenizer.encode(OPENING, allow_special=True)] * num_samples
    paragraphs = [part.strip() for part in Path(text).read_text(encoding="utf-8").split("\n\n") if part.strip()]
    if is_chat:
        encoded = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in paragraphs]
    else:
        encoded = [tokenizer.encode(paragraph)[:num_tokens] for paragraph in paragraphs]
    return [encoded[index % len(encoded)] for index in range(num_samples)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a directory, a .gguf file or a hub id; the default model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--text", default="", help="a file whose paragraphs the model continues")
    parser.add_argument("--chat", action="store_true", help="paragraphs are questions to a chat model")
    parser.add_argument("--samples", type=int, default=256, help="sequences")
    parser.add_argument("--length", type=int, default=192, help="most tokens that the model writes of each")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="most tokens of a paragraph")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens that the head knows")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=6, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=5e-4, help="largest learning rate")
    parser.add_argument("--passes", type=int, default=3, help="of training: tokens that the head learns to draft")
    args = parser.parse_args(argv)

    count = read_config(resolve_model(args.model), EngineConfig(args.model, device="cpu")).num_layers
    layers = sorted(min(max(layer, 0), count - 1) for layer in (2, count // 2, count - 3))  # the paper's
    prompts = prompts_of(args.model, args.text, args.chat, args.samples, args.prompt_tokens)
    began = time.monotonic()
    # A chat model ends after its own question: the answer comes after that.
    asked = args.model, prompts, args.length, layers, args.temperature, not args.text
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
        loaded, samples = collect_on_gpu(*asked)
    else:
        samples = collect(*asked)
        loaded = load_model(resolve_model(args.model), EngineConfig(args.model, device="cpu"))
    samples = [sample for sample in samples if len(sample.finals) > 2]
    print(f"{sum(len(sample.finals) for sample in samples)} tokens in {time.monotonic() - began:.0f} s")
    head = Head(loaded, most_common(samples, args.draft_vocab))
    train(head, samples, args.steps, args.batch, args.rate, args.passes)
    head.save(args.out, layers)


if __name__ == "__main__":
    main()
