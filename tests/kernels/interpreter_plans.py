"""Operations of Triton's interpreter as one call of numpy each, if the types of their operands allow it.

For each operation, the interpreter checks types, converts and broadcasts operands by operations of their own and
looks its function up: 20 to 100 us of Python around 1 us of numpy. All of that depends on the operands' types, shapes
included, and on the values of Python's numbers. Here, the first operation on some types runs in the
interpreter, with all its checks, and leaves a plan: numpy's function and the result's type. Later ones follow the
plan. bfloat16, 8-bit floats and other types that numpy lacks have no plan and always run in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

tl = interpreter.tl
_language = interpreter.interpreter_semantic
_tensor = tl.core.tensor
_handle = interpreter.TensorHandle
_constexpr = tl.core.constexpr
_new = object.__new__
_convert = TritonSemantic.cast
_constant = TritonSemantic.scalar_constant
_NUMBERS = (int, float, bool)
_NUMPY_TYPES = {
    "int1": bool, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32,
    "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64, "fp16": np.float16, "fp32": np.float32,
    "fp64": np.float64,
}  # fmt: skip
_Long = Callable[..., Any]


def _divided(lhs: Any, rhs: Any) -> Any:
    return (lhs - np.fmod(lhs, rhs)) // rhs  # rounds to zero, as the interpreter does


_ARITHMETIC: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": _divided, "mod": np.fmod,
    "lshift": np.left_shift, "rshift": np.right_shift, "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
_COMPARISONS: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITWISE: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_FUNCTIONS = {**_ARITHMETIC, **_COMPARISONS, **_BITWISE}
_MAKE_TENSORS_FIRST = {*_COMPARISONS, "maximum", "minimum"}  # from numbers, so that the numbers' types count


def _make(data: Any, element: Any, type_: Any) -> Any:
    """Make a tensor of `type_` with these numbers, unchecked. element: the type of one of them."""
    handle = _new(_handle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    return _tensor(handle, type_)


def _key(operand: Any) -> Any:
    """Return the properties of an operand that a plan depends on."""
    return operand.type.name if type(operand) is _tensor else (type(operand), operand)


def _is_plannable(operand: Any) -> bool:
    return type(operand) is _tensor or (type(operand) in _NUMBERS and operand == operand)


def _loaded(operand: Any, computed: Any, is_number: bool) -> Callable[[Any], Any] | None:
    """Return the conversion of an operand's data to type `computed`; None if they have this type."""
    if type(operand) is _tensor:
        if operand.type.scalar == computed:
            return None
        dtype = np.dtype(_NUMPY_TYPES[computed.name])
        return lambda data: data.astype(dtype)
    if is_number:
        constant = _language.scalar_constant(operand, computed)
    else:
        constant = _language.cast(_language.to_tensor(operand), computed)
    return lambda _, data=constant.handle.data: data  # type: ignore[misc]


def _on_data(function: Any, one: Any, two: Any) -> Any:
    if one is None and two is None:
        return function
    if one is None:
        return lambda lhs, rhs: function(lhs, two(rhs))
    if two is None:
        return lambda lhs, rhs: function(one(lhs), rhs)
    return lambda lhs, rhs: function(one(lhs), two(rhs))


def _offset_plan(pointers: Any, offsets: Any, result: Any) -> Any:
    width = np.uint64(max(1, pointers.type.scalar.element_ty.primitive_bitwidth // 8))

    def add(addresses: Any, data: Any) -> Any:
        return addresses + width * data.astype(np.uint64)

    constant = None if type(offsets) is _tensor else _language.to_tensor(offsets).handle.data
    loads_constant = None if constant is None else lambda _: constant
    return _on_data(add, None, loads_constant), result.handle.dtype, result.type


def _types_of(name: str, lhs: Any, rhs: Any) -> tuple[Any, list[bool]] | None:
    """Return an operation's type, and which operands are numbers that take it; None without a plan."""
    one, other = (_language.to_tensor(operand).type.scalar for operand in (lhs, rhs))
    if one.name not in _NUMPY_TYPES or other.name not in _NUMPY_TYPES:
        return None
    are_numbers = [type(operand) is not _tensor and name not in _MAKE_TENSORS_FIRST for operand in (lhs, rhs)]
    divides = name in ("truediv", "floordiv", "mod")
    computed = _language.computation_type_impl(one, are_numbers[0], other, are_numbers[1], divides)
    if computed.name not in _NUMPY_TYPES or (computed.name == "int1" and name in _ARITHMETIC):
        return None
    return None if name == "truediv" and not computed.is_floating() else (computed, are_numbers)


def _plan(name: str, lhs: Any, rhs: Any, result: Any) -> Any:
    """Return a function that computes the result from the operands' data, and its types; False without one."""
    if not (_is_plannable(lhs) and _is_plannable(rhs)):
        return False
    if type(lhs) is _tensor and lhs.type.scalar.is_ptr():
        is_offset = type(rhs) is int or (type(rhs) is _tensor and rhs.type.scalar.is_int())
        return name == "add" and is_offset and _offset_plan(lhs, rhs, result)
    types = _types_of(name, lhs, rhs)
    if types is None:
        return False
    computed, are_numbers = types
    one, two = (_loaded(*each) for each in zip((lhs, rhs), (computed, computed), are_numbers, strict=True))
    return _on_data(_FUNCTIONS[name], one, two), computed, result.type


def _planned(name: str, long_way: _Long, is_reflected: bool = False) -> _Long:
    """Plan a method or function of two operands, the first of them a tensor."""
    plans: dict[Any, Any] = {}

    @wraps(long_way)
    def operate(self: Any, other: Any, _semantic: Any = None, **options: Any) -> Any:
        given = other
        if type(other) is _constexpr:
            other = other.value
        if type(self) is not _tensor or options or not (type(other) is _tensor or type(other) in _NUMBERS):
            return long_way(self, given, **options)
        key: Any
        if type(other) is _tensor:
            data, key = other.handle.data, (self.type.name, other.type.name)
        else:
            data, key = None, (self.type.name, type(given), type(other), other)  # a constexpr is checked more
        plan = plans.get(key)
        if plan:
            function, element, type_ = plan
            mine = self.handle.data
            return _make(function(data, mine) if is_reflected else function(mine, data), element, type_)
        result = long_way(self, given)
        if plan is None:
            plans[key] = _plan(name, *((other, self) if is_reflected else (self, other)), result)
        return result

    return operate


def _planned_where(long_way: _Long) -> _Long:
    plans: dict[Any, Any] = {}

    @wraps(long_way)
    def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        x, y = (each.value if type(each) is _constexpr else each for each in (x, y))
        if type(condition) is not _tensor or not (_is_plannable(x) and _is_plannable(y)):
            return long_way(condition, x, y)
        key = condition.type.name, _key(x), _key(y)
        plan = plans.get(key)
        if plan:
            one, two, element, type_ = plan
            lhs, rhs = (each.handle.data if type(each) is _tensor else None for each in (x, y))
            lhs, rhs = lhs if one is None else one(lhs), rhs if two is None else two(rhs)
            return _make(np.where(condition.handle.data, lhs, rhs), element, type_)
        result = long_way(condition, x, y)
        if plan is None:
            types = condition.type.scalar == tl.int1 and _types_of("where", x, y)
            if types:
                computed, are_numbers = types
                one, two = (_loaded(*each) for each in zip((x, y), (computed, computed), are_numbers, strict=True))
                plans[key] = one, two, computed, result.type
            else:
                plans[key] = False
        return result

    return where


_casts: dict[Any, Any] = {}


def _cast(self: Any, operand: Any, target: Any, rounding: Any = None) -> Any:
    if rounding is not None:
        return _convert(self, operand, target, rounding)
    key = operand.type.name, target.name
    plan = _casts.get(key)
    if plan:
        dtype, element, type_ = plan
        return _make(operand.handle.data.astype(dtype), element, type_)
    result = _convert(self, operand, target)
    if plan is None:
        source, element = operand.type.scalar, target.scalar
        names = source.name, element.name
        is_direct = "fp16" not in names or "fp32" in names  # otherwise by way of float32
        if names[0] != names[1] and names[1] != "int1" and is_direct and _NUMPY_TYPES.keys() >= set(names):
            _casts[key] = np.dtype(_NUMPY_TYPES[element.name]), element, result.type
        else:
            _casts[key] = False
    return result


def _to(long_way: _Long) -> _Long:
    @wraps(long_way)
    def to(self: Any, dtype: Any, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
        if rest or options:
            return long_way(self, dtype, *rest, **options)
        return _cast(_language, self, dtype.value if type(dtype) is _constexpr else dtype)

    return to


_constants: dict[Any, Any] = {}


def _scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    if type(value) not in _NUMBERS:
        return _constant(self, value, dtype)
    key = type(value), value, dtype.name
    made = _constants.get(key)
    if made is None:
        result = _constant(self, value, dtype)
        if value == value:
            _constants[key] = result.handle.data, result.handle.dtype, result.type
        return result
    return _make(*made)


def _indexed(long_way: _Long) -> _Long:
    """Plan `x[:, None]`, which is a view."""
    types: dict[Any, Any] = {}
    whole = slice(None)

    @wraps(long_way)
    def index(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if type(slices) is not tuple or not self.type.is_block():
            return long_way(self, slices)
        for each in slices:
            if each is not None and each != whole:
                return long_way(self, slices)
        key = self.type.name, tuple([each is None for each in slices])
        if key not in types:
            result = long_way(self, slices)
            types[key] = result.type
            return result
        handle = self.handle
        return _make(handle.data[slices], handle.dtype.scalar, types[key])

    return index


def _arange(long_way: _Long) -> _Long:
    made: dict[Any, Any] = {}

    @wraps(long_way)
    def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
        key = tuple(each.value if type(each) is _constexpr else each for each in (start, end))
        if key not in made:
            result = long_way(start, end)
            made[key] = result.handle.data, result.handle.dtype, result.type
        return _make(*made[key])

    return arange


def _loads(long_way: _Long) -> _Long:
    plans: dict[Any, Any] = {}
    everything: dict[Any, Any] = {}

    @wraps(long_way)
    def load(pointer: Any, mask: Any = None, other: Any = None, *, _semantic: Any = None, **options: Any) -> Any:
        other = other.value if type(other) is _constexpr else other
        takes_plan = type(pointer) is _tensor and (mask is None or type(mask) is _tensor)
        if not takes_plan or not (other is None or type(other) in _NUMBERS):
            return long_way(pointer, mask, other, **options)
        key = pointer.type.name, mask is None or mask.type.name, type(other), other
        plan = plans.get(key)
        if plan and not options.keys() & {"boundary_check", "padding_option"}:
            shape, dtype, fill, element, type_ = plan
            addresses = pointer.handle.data
            if addresses.shape != shape:
                addresses = np.broadcast_to(addresses, shape)
            if mask is None:
                mask_data = everything[shape]
            else:
                mask_data = mask.handle.data
                if mask_data.shape != shape:
                    mask_data = np.broadcast_to(mask_data, shape)
            return _make(interpreter._interpreter.load(addresses, mask_data, fill, dtype), element, type_)
        result = long_way(pointer, mask, other, **options)
        if plan is None:
            element = pointer.type.scalar.is_ptr() and pointer.type.scalar.element_ty
            if not element or element == tl.int1 or other != other:
                plans[key] = False
            else:
                shape, dtype = result.handle.data.shape, interpreter._get_np_dtype(element)
                fill = np.zeros(shape, dtype)
                if other is not None:
                    fill[...] = _language.cast(_language.to_tensor(other), element).handle.data
                everything[shape] = np.ones(shape, dtype=bool)
                plans[key] = shape, dtype, fill, element, result.type
        return result

    return load


def _stores(long_way: _Long) -> _Long:
    plans: dict[Any, Any] = {}

    @wraps(long_way)
    def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
        takes_plan = type(pointer) is _tensor is type(value) and (mask is None or type(mask) is _tensor)
        if rest or not takes_plan or "boundary_check" in options:
            return long_way(pointer, value, mask, *rest, **options)
        key = pointer.type.name, value.type.name, mask is None or mask.type.name
        plan = plans.get(key)
        if plan:
            shape, element, everything = plan
            if value.type.scalar is not element:
                value = _cast(_language, value, element)
            parts = [pointer.handle.data, value.handle.data, everything if mask is None else mask.handle.data]
            parts = [part if part.shape == shape else np.broadcast_to(part, shape) for part in parts]
            return interpreter._interpreter.store(*parts)
        result = long_way(pointer, value, mask, **options)
        if plan is None:
            element = pointer.type.scalar.is_ptr() and pointer.type.scalar.element_ty
            if not element or element == tl.int1:
                plans[key] = False
            else:
                shape = pointer.handle.data.shape
                plans[key] = shape, element, np.ones(shape, dtype=bool)
        return result

    return store


def _dots(long_way: _Long) -> _Long:
    plans: dict[Any, Any] = {}

    @wraps(long_way)
    def dot(one: Any, other: Any, total: Any = None, *rest: Any, _semantic: Any = None, **options: Any) -> Any:
        if rest or not type(one) is type(other) is type(total) is _tensor:
            return long_way(one, other, total, *rest, **options)
        key = one.type.name, other.type.name, total.type.name, *options.items()
        plan = plans.get(key)
        if plan:
            data = total.handle.data
            return _make(np.matmul(one.handle.data, other.handle.data, dtype=data.dtype) + data, *plan)
        result = long_way(one, other, total, **options)
        if plan is None:
            is_direct = _NUMPY_TYPES.keys() >= {each.type.scalar.name for each in (one, other, total)}
            plans[key] = is_direct and (result.handle.dtype, result.type)
        return result

    return dot


def _reductions(long_way: _Long) -> _Long:
    plans: dict[Any, Any] = {}
    functions = {
        tl.standard._sum_combine: (np.sum, np.sum), tl.standard._elementwise_max: (np.nanmax, np.max),
        tl.standard._elementwise_min: (np.nanmin, np.min),
    }  # fmt: skip

    @wraps(long_way)
    def reduce(x: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any) -> Any:
        if type(x) is not _tensor or type(axis) is not int or type(keep_dims) is not bool:
            return long_way(x, axis, combine_fn, keep_dims, **options)
        key = x.type.name, axis, combine_fn, keep_dims
        plan = plans.get(key)
        if plan:
            function, dtype, element, type_ = plan
            data = function(x.handle.data, axis=axis, keepdims=keep_dims)
            return _make(data.astype(dtype) if data.shape else np.array([data], dtype), element, type_)
        result = long_way(x, axis, combine_fn, keep_dims, **options)
        if plan is None:
            plans[key] = False
            if combine_fn in functions and x.type.scalar.name in _NUMPY_TYPES:
                function = functions[combine_fn][not x.type.scalar.is_floating()]
                plans[key] = function, result.handle.data.dtype, result.handle.dtype, result.type
        return result

    return reduce


def bind_semantic(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Bind the interpreter's semantic to a function, as `interpreter._patch_attr` does, with one call fewer."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = _language
        return inner(*args, **options)

    scope.set_attr(obj, name, call)


def plan_operations() -> None:
    """Replace the functions that the interpreter has put into tl, tl.core and their tensors."""
    for name in _FUNCTIONS:
        for method, is_reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            if (is_reflected and name in _MAKE_TENSORS_FIRST) or not hasattr(_tensor, method):
                continue
            setattr(_tensor, method, _planned(name, getattr(_tensor, method), is_reflected))
    _tensor.to = _to(_tensor.to)
    _tensor.__getitem__ = _indexed(_tensor.__getitem__)
    for name, plan in {
        "maximum": lambda way: _planned("maximum", way), "minimum": lambda way: _planned("minimum", way),
        "where": _planned_where, "arange": _arange, "load": _loads, "store": _stores,
        "dot": _dots, "reduce": _reductions,
    }.items():  # fmt: skip
        for module in (tl, tl.core):
            setattr(module, name, plan(getattr(module, name)))
    TritonSemantic.cast = _cast
    TritonSemantic.scalar_constant = _scalar_constant
