"""Kernels that are compiled behind the warm-up are named. Triton's hooks are called as its `jit` calls them."""

import logging

import triton

from engine.gpu.late_compiles import log_late_compiles


def test_a_kernel_that_is_compiled_late_is_named(caplog):
    hooks = triton.knobs.runtime
    before = hooks.jit_cache_hook, hooks.jit_post_compile_hook
    try:
        log_late_compiles()
        asked = {
            "key": "k",
            "repr": "_rope[num_warps=4](x: *bf16)",
            "fn": None,
            "compile": {},
            "is_manual_warmup": False,
        }
        assert not hooks.jit_cache_hook(**asked, already_compiled=False)  # true would stop the compiler
        with caplog.at_level(logging.WARNING):
            hooks.jit_post_compile_hook(**asked, already_compiled=False)
    finally:
        hooks.jit_cache_hook, hooks.jit_post_compile_hook = before
    assert "_rope[num_warps=4]" in caplog.text
