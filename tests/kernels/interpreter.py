"""Triton's interpreter without its detours, which took two thirds of these tests' time.

It replaces the functions of its language anew for every launch and every call of a device function; looks a type of
numpy up in a table that it builds for each look-up; makes types of blocks and lists of their shapes anew for each
value; and computes sums, differences and products of integers a second time in int64, for a `device_assert` that
checks nothing outside of debug mode. For each launch, it reads the kernel's signature three times, finds the types of
its arguments by their names, and copies tensors to the CPU, where they are, and back. Here a process replaces
functions once, for good, as nothing is compiled in it, makes types once, and keeps signatures;
`interpreter_plans.py` shortens single operations. What is computed and refused stays the same. Written for the Triton
of constraints.txt.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType, SimpleNamespace
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
_type_of_name = tl.str_to_ty
_open_launch = interpreter.GridExecutor.__init__
_NOTHING_TO_RESTORE = interpreter._LangPatchScope()
_rewritten: dict[Any, Any] = {}  # device functions
_numpy_types: dict[str, Any] = {}  # by name of Triton's
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}  # by name of the elements' type, and shape
_computation_types: dict[tuple[Any, ...], Any] = {}
_constants: dict[Any, list[str]] = {}  # names of a kernel's constants


@cache
def _replace_all() -> None:
    """Replace the language's functions in `tl` and `tl.core`."""
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
        shape_of_tensors = tl.tuple([tl.constexpr(size) for size in made.shape])
        made.of_tensors = made.scalar, shape_of_tensors, tl.constexpr(made.numel)
        _block_types[key] = made
    return _block_types[key]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    self.dtype, self.shape, self.numel = type.of_tensors or (type, *_OF_SCALARS)


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


@cache
def _type_of(name: Any) -> Any:
    return _type_of_name(name, None)


@cache
def _signature(kernel: Any) -> inspect.FullArgSpec:
    return inspect.getfullargspec(kernel)


def _bind(kernel: Any, /, *args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    names = _signature(kernel).args
    bound = {**dict(zip(names, args, strict=False)), **options}
    if len(names) == len(bound) == len(args) + len(options):
        return bound
    return inspect.getcallargs(kernel, *args, **options)


def _init_launch(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
    if fn not in _constants:
        _open_launch(self, fn, arg_names, grid, pre_run_hooks)
        _constants[fn] = self.constexprs
    self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
    self.constexprs = _constants[fn]


def take_short_cuts() -> None:
    functions = {**vars(inspect), "getfullargspec": _signature, "getcallargs": _bind}
    interpreter.inspect = SimpleNamespace(**functions)
    interpreter.GridExecutor.__init__ = _init_launch
    interpreter.GridExecutor._init_args_hst = lambda self, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    tl.str_to_ty = lambda name, constant: _type_of(name) if constant is None else _type_of_name(name, constant)
    interpreter._patch_lang = _replace_once
    interpreter._patch_attr = bind_semantic
    interpreter.InterpretedFunction.__call__ = _call_device_function
    TritonSemantic.to_tensor = _to_tensor
    interpreter._get_np_dtype = _look_up_once
    tl.core._unwrap_if_constexpr = _unwrap_fast
    tl.block_type.__new__ = _block_type
    tl.block_type.__init__ = lambda self, element, shape: None  # it may have been made before
    tl.dtype.of_tensors = None
    tl.core.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _is_same_type
    TritonSemantic.computation_type_impl = _computation_type
    TritonSemantic.broadcast_impl_value = _broadcast_if_needed
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None
