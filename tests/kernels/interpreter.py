"""Triton's interpreter without its detours, which took two thirds of these tests' time.

It replaces the functions of its language anew for every launch and every call of a device function; looks a type of
numpy up in a table that it builds for each look-up; makes types of blocks and lists of their shapes anew for each
value; and computes sums, differences and products of integers a second time in int64, for a `device_assert` that
checks nothing outside of debug mode. Here a process replaces functions once, for good, as nothing is compiled in
it, and makes types once; `interpreter_plans.py` shortens single operations. What is computed and refused stays the
same. Written for the Triton of constraints.txt.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.kernels.interpreter_plans import bind_semantic, plan_operations

tl = interpreter.tl
_replace = interpreter._patch_lang
_look_up = interpreter._get_np_dtype
_unwrap = tl.core._unwrap_if_constexpr
_make_block_type = tl.block_type.__init__
_computed_in = TritonSemantic.computation_type_impl
_broadcast = TritonSemantic.broadcast_impl_value
_make_tensor_of = TritonSemantic.to_tensor
_NOTHING_TO_RESTORE = interpreter._LangPatchScope()
_rewritten: dict[Any, Any] = {}  # device functions
_numpy_types: dict[str, Any] = {}  # by name of Triton's
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}  # by name of the elements' type, and shape
_computation_types: dict[tuple[Any, ...], Any] = {}


@cache
def _replace_all() -> None:
    """Replace the language's functions in both of its modules that functions may see."""
    _replace(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    plan_operations()


def _replace_once(fn: Any) -> Any:
    _replace_all()
    return _NOTHING_TO_RESTORE


def _call_device_function(self: Any, *args: Any, **options: Any) -> Any:
    if self not in _rewritten:
        _replace_once(self.fn)
        _rewritten[self] = self.rewrite()
    try:
        return _rewritten[self](*args, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
    return value if type(value) is tl.tensor else _make_tensor_of(self, value, check_type)


def _look_up_once(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    if element.name not in _numpy_types:
        _numpy_types[element.name] = _look_up(element)
    return _numpy_types[element.name]


def _unwrap_fast(value: Any) -> Any:
    return value if type(value) in (int, tl.tensor) else _unwrap(value)


def _block_type(cls: Any, element: Any, shape: Any) -> Any:
    key = element.name, tuple(_unwrap_fast(size) for size in shape)
    if key not in _block_types:
        made = object.__new__(cls)
        _make_block_type(made, element, shape)
        made.tensor_shape = tl.tuple([tl.constexpr(size) for size in made.shape])
        made.tensor_numel = tl.constexpr(made.numel)
        _block_types[key] = made
    return _block_types[key]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if type.is_block() else _OF_SCALARS


_OF_SCALARS = tl.tuple([]), tl.constexpr(1)


def _is_same_type(self: Any, other: Any) -> bool:
    return self is other or (isinstance(other, tl.dtype) and self.name == other.name)


def _computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
    key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
    if key not in _computation_types:
        _computation_types[key] = _computed_in(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return _computation_types[key]


def _broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    one, other = lhs.type, rhs.type
    if one.is_block() == other.is_block() and (not one.is_block() or one.shape.values == other.shape.values):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def take_short_cuts() -> None:
    interpreter._patch_lang = _replace_once
    interpreter._patch_attr = bind_semantic
    interpreter.InterpretedFunction.__call__ = _call_device_function
    TritonSemantic.to_tensor = _to_tensor
    interpreter._get_np_dtype = _look_up_once
    tl.core._unwrap_if_constexpr = _unwrap_fast
    tl.block_type.__new__ = _block_type
    tl.block_type.__init__ = lambda self, element, shape: None  # it may have been made before
    tl.core.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _is_same_type
    TritonSemantic.computation_type_impl = _computation_type
    TritonSemantic.broadcast_impl_value = _broadcast_if_needed
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None
