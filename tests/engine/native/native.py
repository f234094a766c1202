"""Tests of C code run in every variant that this CPU has instructions for."""

from __future__ import annotations

import shutil

import pytest

from kernels.native import decode_attention, rows
from kernels.native.compile import ANY_CPU, VARIANTS, Variant
from kernels.native.library import FOLDER, declared, loaded, variants_of_this_cpu

needs_library = pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")


@pytest.fixture(params=[*VARIANTS, ANY_CPU], ids=["avx512", "avx2", "any"])
def native_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test compute with this variant."""
    variant: Variant = request.param
    if variant not in (*variants_of_this_cpu(), ANY_CPU):
        pytest.skip("this CPU lacks its instructions")
    for module in (decode_attention, rows):
        monkeypatch.setattr(module, "library", lambda: declared(loaded(FOLDER, variant)))
