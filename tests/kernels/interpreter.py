"""Triton's interpreter without two of its detours, which took two fifths of these tests' time.

It replaces the functions of its language anew for every launch and every call of a device function, and looks a type
of numpy up in a table that it builds for each look-up. Here a process replaces them once, for good: nothing is
compiled in it. What is computed stays the same. Written for the Triton that constraints.txt names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl
_replace = interpreter._patch_lang
_look_up = interpreter._get_np_dtype
_replaced: set[int] = set()  # ids of modules
_numpy_types: dict[str, Any] = {}  # by name of Triton's


def _replace_once(fn: Any) -> Any:
    modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
    if not modules <= _replaced:
        _replace(fn)
        _replaced.update(modules)
    return interpreter._LangPatchScope()  # with nothing to restore


def _look_up_once(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    if element.name not in _numpy_types:
        _numpy_types[element.name] = _look_up(element)
    return _numpy_types[element.name]


def take_short_cuts() -> None:
    interpreter._patch_lang = _replace_once
    interpreter._get_np_dtype = _look_up_once
