"""The real default model, SmolLM2-135M-Instruct, in float32 against transformers."""

from __future__ import annotations

import gguf
import pytest
import torch
import transformers

from common.model_files import resolve_model
from tests.engine.driving import open_model, read_prompt
from tests.engine.gguf.gguf_files import gguf_name, interleave
from tests.engine.tiny_models import reference_logits

pytestmark = [pytest.mark.slow, pytest.mark.wing("common.gguf")]

# What transformers 5.23 generates after loading the file by itself (`from_pretrained(gguf_file=...)`, float32).
PROMPT = [1, 2683, 198, 504, 3575, 282, 4649, 314, 2]
CONTINUATION = [198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314, 7042, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1]
CONTINUATION += [4093, 198, 57, 5248, 3946, 288]


def test_logprobs_equal_those_of_transformers() -> None:
    """Against transformers' model class, its weights read from the file by the gguf package.

    Tokens of the same through two workers: tests/worker/test_real_model.py.
    """
    loaded, config = open_model(resolve_model(""), dtype="float32", block_size=16, num_threads=1)
    assert loaded.config.eos_token_ids == (2,)
    tokens = PROMPT + CONTINUATION
    entries = read_prompt(loaded, config, tokens, chunk=20, num_likely=2)
    expected = reference_logits(_transformers_model(), tokens).log_softmax(-1)
    assert [entry.token_id for entry in entries] == tokens[1:]
    assert [entry.top_token_ids[0] for entry in entries[-len(CONTINUATION) :]] == CONTINUATION
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
        assert list(entry.top_logprobs) == pytest.approx(expected[position].topk(2).values.tolist(), abs=1e-4)


def _transformers_model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=9.999999747378752e-06,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(resolve_model("").path).tensors}
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = stored[gguf_name(name, "llama")]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        num_heads = 9 if ".q_proj." in name else 3 if ".k_proj." in name else 0
        if num_heads:
            restored = torch.empty_like(values)
            restored[interleave(torch.arange(values.shape[0]), num_heads)] = values
            values = restored
        weights[name] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model
