"""Real GGUF files compared with transformers on the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from common.model_files import ModelFiles
from common.text.load import load_tokenizer
from mini_infer import LLM, SamplingParams
from tests.engine.driving import Driver, make_runner, open_model
from tests.engine.gguf.gguf_files import gguf_name
from tests.engine.tiny_models import reference_logits
from tests.models.real_files import GEMMA3, QWEN_CODER, RealFile

pytestmark = [pytest.mark.models, pytest.mark.wing("engine.gguf")]
DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
TEXT = "The capital of France is Paris, and the capital of Italy is"


def reference(path: Path) -> transformers.PreTrainedModel:
    """Return transformers' model with the dequantized weights."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reader = gguf.GGUFReader(path)
    held = {tensor.name: tensor for tensor in reader.tensors}
    arch = str(reader.fields["general.architecture"].contents())
    weights = {}
    for name in model.state_dict():
        tensor = held.get(gguf_name(name, arch)) or held["token_embd.weight"]  # a tied head
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        weights[name] = values - 1 if arch == "gemma3" and name.endswith("norm.weight") else values
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize(
    "real", [pytest.param(GEMMA3, marks=pytest.mark.wing("engine.windows"))], ids=lambda real: real.name
)
def test_log_probabilities(real: RealFile) -> None:
    path = real.path()
    files = ModelFiles(path.stem, "gguf", path)
    model = reference(path)
    prompt = load_tokenizer(files).encode(TEXT)
    loaded, config = open_model(files, dtype="float32")
    driver = Driver(make_runner(loaded, config), config)
    request = driver.add(prompt, record_logits=True)
    driver.finish([request], 8, chunk=64)
    expected = reference_logits(model, [*prompt, *request.output_token_ids])[len(prompt) - 1 : -1]
    found = torch.stack(list(driver.logits[request.request_id]))
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-3, rtol=0)
    assert request.output_token_ids == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("real", "most_error", "least_agreement"),
    [
        (QWEN_CODER, 0.08, 0.95),
        pytest.param(GEMMA3, 0.13, 0.93, marks=pytest.mark.wing("engine.windows")),
    ],
    ids=lambda each: each.name if isinstance(each, RealFile) else None,
)
def test_2000_tokens_as_they_are_served(real: RealFile, most_error: float, least_agreement: float) -> None:
    """In the default --quant-mode, with the text given: log-probabilities, and the most likely tokens."""
    path = real.path()
    llm = LLM(str(path))
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(DECISIONS.glob("*.md")))
    prompt = llm.tokenizer.encode(text)[:2000]
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    expected = reference_logits(reference(path), prompt)[:-1].log_softmax(-1)
    found = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
    errors = (found - expected[torch.arange(len(found)), torch.tensor(prompt[1:])]).abs()
    likely = torch.tensor([entry.top_token_ids[0] for entry in output.prompt_logprobs])
    agreement = (likely == expected.argmax(-1)).float().mean()
    print(f"{path.name}: mean error {errors.mean():.4f} nats, the same most likely token {agreement:.1%}")
    assert errors.mean() < most_error
    assert agreement > least_agreement
