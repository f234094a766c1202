"""A GGUF model's metadata and tensors, from one file or from the parts that llama.cpp's `gguf-split` makes.

Parts are called `m-00001-of-00003.gguf` and so on, and lie in one folder. Each has its number (`split.no`, from 0),
the number of parts (`split.count`), and the number of all parts' tensors (`split.tensors.count`); the first has the
metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.gguf.header import GgufHeader, GgufTensor, read_gguf_header

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufContents:
    """files: in order. file_of: the file of each tensor, to which its offset refers."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: list[Path]
    file_of: dict[str, Path]


def read_gguf(path: Path) -> GgufContents:
    """Read the header of a file, or the headers of all parts if it is one of them.

    Raises ConfigError, which names a part that is missing or does not match its name.
    """
    header = read_gguf_header(path)
    count = _number(header, "split.count")
    if count <= 1:
        return GgufContents(header.metadata, header.tensors, [path], dict.fromkeys(header.tensors, path))
    files = _parts(path, count)
    headers = [_read_part(file, index, count) for index, file in enumerate(files)]
    file_of = {name: file for file, part in zip(files, headers, strict=True) for name in part.tensors}
    tensors = {name: tensor for part in headers for name, tensor in part.tensors.items()}
    _check_tensors(headers, files)
    return GgufContents(headers[0].metadata, tensors, files, file_of)


def _parts(path: Path, count: int) -> list[Path]:
    found = _PART_NAME.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ConfigError(
            f"{path.name} is a part of a model of {count} (split.count), so its name must end in -of-{count:05}.gguf"
        )
    return [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _read_part(path: Path, index: int, count: int) -> GgufHeader:
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing: all {count} parts of the model must lie in one folder")
    header = read_gguf_header(path)
    number, of = _number(header, "split.no") + 1, _number(header, "split.count")
    if (number, of) != (index + 1, count):
        raise ConfigError(
            f"{path.name} holds part {number} of {of} (split.no, split.count): it has another part's name, or is no "
            "part of this model"
        )
    return header


def _check_tensors(headers: list[GgufHeader], files: list[Path]) -> None:
    counts = Counter(name for header in headers for name in header.tensors)
    name, most = counts.most_common(1)[0] if counts else ("", 0)
    if most > 1:
        first, second, *_ = (file.name for file, header in zip(files, headers, strict=True) if name in header.tensors)
        raise ConfigError(f"{first} and {second} both hold the tensor {name}: they are no parts of one model")
    for file, header in zip(files, headers, strict=True):
        told = _number(header, "split.tensors.count")
        if told != len(counts):
            raise ConfigError(
                f"{file.name} is a part of a model of {told} tensors (split.tensors.count); the {len(files)} parts "
                f"here hold {len(counts)}"
            )


def _number(header: GgufHeader, key: str) -> int:
    """Return a number of the metadata; 0 if the key is missing or not a number."""
    value = header.metadata.get(key, 0)
    return value if isinstance(value, int) else 0
