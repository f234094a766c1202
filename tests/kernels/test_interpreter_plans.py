"""Planned operations of the interpreter give the results of the interpreter itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU", allow_module_level=True)

from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

from tests.kernels.interpreter_plans import _planned

tl = interpreter.tl
TYPES = tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.float32
SHAPES = (), (4,), (2, 1), (2, 4)
METHODS = "add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor", "lt", "ge", "eq"


@pytest.fixture(autouse=True, scope="module")
def _replaced_language() -> None:
    interpreter._patch_lang(None)


def tensor(dtype: Any, shape: tuple[int, ...]) -> Any:
    values = np.resize(np.array([3, 1, 2, 5, 4]), shape or (1,))
    if dtype.is_int_signed() and dtype != tl.int1:
        values = values * np.resize(np.array([1, -1]), values.shape)
    handle = interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(dtype)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(operation: Any, *operands: Any) -> Any:
    """Return the type and numbers of the result, or the type of the exception."""
    try:
        result = operation(*operands)
    except (
        AssertionError, TypeError, ValueError, AttributeError, IndexError, Warning, IncompatibleTypeErrorImpl
    ) as error:  # fmt: skip
        return type(error)
    return result.type.name, result.dtype.name, result.handle.data.shape, result.handle.data.tolist()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("one", TYPES, ids=str)
def test_planned_operations_equal_the_long_way(name: str, one: Any) -> None:
    others = [tensor(other, shape) for other in TYPES for shape in SHAPES]
    for method, is_reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
        long_way = getattr(getattr(tl.tensor, method), "__wrapped__", None)
        if long_way is None:
            continue
        planned = _planned(name, long_way, is_reflected)
        for shape in SHAPES:
            x = tensor(one, shape)
            for other in (*others, 2, -3, 0, True, 0.5, 300, tl.constexpr(2), None):
                expected = outcome(long_way, x, other)
                assert [outcome(planned, x, other) for _ in range(2)] == [expected] * 2, (shape, other)


def test_offsets_of_pointers_of_one_type_count_its_bytes() -> None:
    pointer = tl.tensor(
        interpreter.TensorHandle(np.array([1 << 40], np.uint64), tl.pointer_type(tl.int16)), tl.pointer_type(tl.int16)
    )
    for offset in (tensor(tl.int32, (2, 4)), tensor(tl.uint8, (4,)), tensor(tl.int64, ()), -3):
        for _ in range(2):
            moved = pointer + offset
            values = offset.handle.data.astype(np.int64) if isinstance(offset, tl.tensor) else np.array([offset])
            assert (moved.handle.data.astype(np.int64) == (1 << 40) + 2 * values).all()
            assert moved.dtype == tl.pointer_type(tl.int16)


@pytest.mark.parametrize("target", [*TYPES, tl.bfloat16], ids=str)
def test_conversions_equal_the_long_way(target: Any) -> None:
    for source in TYPES:
        for shape in SHAPES:
            x = tensor(source, shape)
            assert [outcome(x.to, target) for _ in range(2)] == [outcome(tl.tensor.to.__wrapped__, x, target)] * 2


def test_reductions_equal_the_long_way() -> None:
    combinations = tl.standard._sum_combine, tl.standard._elementwise_max, tl.standard._elementwise_min
    for dtype, shape, combine, axis in product(TYPES[1:], SHAPES[1:], combinations, (0, 1, -1, None)):
        for keeps in False, True:
            given = tensor(dtype, shape), axis, combine, keeps
            expected = outcome(tl.reduce.__wrapped__, *given)
            assert [outcome(tl.reduce, *given) for _ in range(2)] == [expected] * 2, (dtype, shape, combine, axis)


@pytest.mark.parametrize("dtype", [tl.int8, tl.float16, tl.float32, tl.bfloat16, tl.int32], ids=str)
def test_dots_equal_the_long_way(dtype: Any) -> None:
    one, other = tensor(dtype, (16, 32)), tensor(dtype, (32, 16))
    for total in (tensor(tl.int32, (16, 16)), tensor(tl.float32, (16, 16)), tensor(tl.float32, (16, 8)), None):
        expected = outcome(tl.dot.__wrapped__, one, other, total)
        assert [outcome(tl.dot, one, other, total) for _ in range(2)] == [expected] * 2
        assert outcome(tl.dot, one, one, total) is AssertionError  # these shapes cannot be multiplied


@pytest.mark.parametrize("element", [tl.int1, tl.uint8, tl.int32, tl.float16, tl.bfloat16, tl.float32], ids=str)
def test_stores_equal_the_long_way(element: Any) -> None:
    width, written = max(1, element.primitive_bitwidth // 8), np.zeros(64, np.uint8)
    type_ = tl.pointer_type(element)

    def stored(store: Any, shape: tuple[int, ...], *given: Any) -> Any:
        written[:] = 99
        places = written.ctypes.data + width * np.arange(np.prod(shape, dtype=int)).astype(np.uint64)
        handle = interpreter.TensorHandle(places.reshape(shape or (1,)), type_)
        pointers = tl.tensor(handle, tl.block_type(type_, list(shape)) if shape else type_)
        try:
            store(pointers, *given)
        except (TypeError, ValueError) as error:
            return type(error)
        return written.tolist()

    for shape, dtype, size in product(SHAPES, (*TYPES, tl.bfloat16), SHAPES):
        for mask in (None, tensor(tl.int1, shape), tensor(tl.int1, (2, 1)), tensor(tl.int32, shape)):
            given = shape, tensor(dtype, size), mask
            expected = stored(tl.store.__wrapped__, *given)
            assert [stored(tl.store, *given) for _ in range(2)] == [expected] * 2, given
