"""docs/checkpoints.md: which published checkpoints are read, each cell by a test.

python -m tests.checkpoints > docs/checkpoints.md

Rows are the layouts of tests/engine/quantization/published.py, columns the families that it writes them of.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.engine.quantization.published import FAMILIES, PUBLISHED, REFUSED

TEST = "tests/engine/quantization/test_published.py"
REFUSAL = "test_what_is_refused_says_what_is_read"
CELL = "test_a_checkpoint_computes_what_its_weights_say"
INTRODUCTION = f"""# Checkpoints as published

Which tools' checkpoints are read, as they lie on a hub. `python -m tests.checkpoints` writes this page. Every ✓ is a
test: a tiny model of that family, with tensors, packing, config and files as the tool writes them, gives the logits
of the weights that they stand for, in float32 and as they are held in bfloat16. In `{TEST}` that is
`{CELL}[NAME-FAMILY]`; of families
whose weights lie alike `make test` runs one for each layout, in turn, and `pytest -m soak` the others.
✗: refused at start, with a message that lists what is read (`{REFUSAL}`).
–: no such checkpoints are published, as far as known.
"""
END = """
bitsandbytes' and Unsloth's blocks cross rows, so no GEMM reads them as they are: they are dequantized when they are
read, and on a CPU held as int8. On a GPU they take the memory of bfloat16; GPTQ, AWQ and W4A16 stay packed there. The
tests behind this page run on CPUs; the column of GPUs says what the loader makes there (`tests/gpu` runs the forms).

**MLX** (`mlx-community`, `mlx-lm`: `quantization` in config.json, words of uint32 with `.scales` and `.biases`) is
refused, since nothing here computes in its packing: take the model that it was made of, or its GGUF
(`test_mlx_is_refused`).

**Experts of gpt-oss** lie in one tensor a layer. Tools that quantize linear layers (GPTQModel, llm-compressor,
Unsloth) cut them apart, under names of their own; such experts are dequantized when they are read, and on a CPU held
as int8, on a GPU in bfloat16. bitsandbytes leaves experts plain. **DeepSeek-V3 as DeepSeek publishes it**, with its
module for multi-token prediction and blocks that end within a weight: `test_deepseek_v3_as_it_is_published`.

Unquantized models that Unsloth publishes are the originals' files and are read as such. GGUF files are a format of
their own ([install](install.md#checkpoints)).
"""


def table(header: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def rows() -> Iterator[list[str]]:
    for name, entry in PUBLISHED.items():
        cells = ("✓" if family in entry.families else "–" for family in FAMILIES)
        yield [entry.tool, entry.what, f"`{name}`", *cells, entry.cpu, entry.gpu, entry.source]
    for tool, what, source, _ in REFUSED.values():
        yield [tool, what, "", *("✗" for _ in FAMILIES), "", "", source]


def page() -> str:
    header = ["made by", "format", "test", *FAMILIES, "in memory, CPU", "GPU", "layout, from the source of"]
    return "\n".join((INTRODUCTION, *table(header, rows()))) + "\n" + END


if __name__ == "__main__":
    print(page(), end="")
