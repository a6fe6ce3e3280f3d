"""Vectors of 16 floats for functions that numba compiles: what C has as intrinsics, portable through LLVM.

numba vectorises simple loops by itself, but keeps no tile of a matrix product in registers. A `Lanes` value is one
LLVM vector, so a handful of them are accumulators that never touch memory. Memory is an address (an int) or a flat
float32 array; `get` and `put` take an index as it is, where numba's own [] would first ask whether it is negative.

`floats(address, shape)` is an array for reading. What a kernel writes goes out by `put` and `store`: numba takes an
array that was made from an address for a local one, and removes what is written to it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


class Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _VECTOR)


Emit = Callable[..., Any]


def _operation(emit: Emit, result: types.Type, *arguments: types.Type) -> tuple[Any, Any]:
    """An intrinsic's signature and code, from code that takes the builder and its arguments."""
    return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)


def _call(builder: Any, name: str, *values: Any, returns: Any = None, flags: tuple[str, ...] = ()) -> Any:
    """Calls one of LLVM's own functions on values of one type."""
    suffix = f"v{LANES}f32" if isinstance(values[-1].type, ir.VectorType) else "f32"
    kind = ir.FunctionType(returns or values[-1].type, [value.type for value in values])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"{name}.{suffix}"), values, fastmath=flags
    )


def _fill(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)


# ------------------------------------------------------------------------------------------------ memory


def _address(context: Any, builder: Any, kind: types.Type, memory: Any, at: Any) -> Any:
    if isinstance(kind, types.Array):
        first = context.make_array(kind)(context, builder, memory).data
    else:
        first = builder.inttoptr(memory, _FLOAT.as_pointer())
    return builder.gep(first, [at])


def _load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.load(_address(context, builder, signature.args[0], *arguments))


def _store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    builder.store(arguments[2], _address(context, builder, signature.args[0], *arguments[:2]))
    return context.get_dummy_value()


def _load_lanes(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    address = _address(context, builder, signature.args[0], *arguments)
    return builder.load(builder.bitcast(address, _VECTOR.as_pointer()), align=4)


def _store_lanes(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    address = _address(context, builder, signature.args[0], *arguments[:2])
    builder.store(arguments[2], builder.bitcast(address, _VECTOR.as_pointer()), align=4)
    return context.get_dummy_value()


@intrinsic
def get(typing: Any, memory: Any, at: Any) -> Any:
    """memory[at]"""
    return types.float32(memory, types.intp), _load


@intrinsic
def put(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """memory[at] = x"""
    return types.void(memory, types.intp, types.float32), _store


@intrinsic
def put_integer(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """memory[at] = x, memory the address of int64s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(arguments[2], builder.gep(first, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@intrinsic
def get_integer(typing: Any, memory: Any, at: Any) -> Any:
    """memory[at], memory the address of int64s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(first, [arguments[1]]))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def load(typing: Any, memory: Any, at: Any) -> Any:
    """memory[at : at + 16]"""
    return lanes(memory, types.intp), _load_lanes


@intrinsic
def store(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """memory[at : at + 16] = x"""
    return types.void(memory, types.intp, lanes), _store_lanes


@intrinsic
def prefetch(typing: Any, memory: Any, at: Any) -> Any:
    """Asks for the cache line of memory[at], memory the address of floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.Constant
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(_address(context, builder, signature.args[0], *arguments), byte)
        builder.call(function, [address, number(_INT, 0), number(_INT, 3), number(_INT, 1)])  # to read, near, data
        return context.get_dummy_value()

    return types.void(memory, types.intp), generate


def _pointer_to(kind: types.Type) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.intp), generate

    return pointer


_floats, _integers = (_pointer_to(kind) for kind in (types.float32, types.int64))


@njit
def floats(address: Any, shape: Any) -> Any:
    """The float32 array at an address, to read."""
    return carray(_floats(address), shape)


@njit
def integers(address: Any, shape: Any) -> Any:
    """The int64 array at an address, to read."""
    return carray(_integers(address), shape)


# -------------------------------------------------------------------------------------------- arithmetic


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """All 16 lanes the same."""
    return _operation(_fill, lanes, types.float32)


@intrinsic
def add(typing: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return _operation(lambda builder, a, b: builder.fadd(a, b), lanes, lanes, lanes)


@intrinsic
def multiply(typing: Any, x: Any, y: Any) -> Any:
    """x * y"""
    return _operation(lambda builder, a, b: builder.fmul(a, b), lanes, lanes, lanes)


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once; x may be a scalar."""

    def emit(builder: Any, a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "llvm.fma", a if x is lanes else _fill(builder, a), b, c)

    return _operation(emit, lanes, lanes if x is lanes else types.float32, lanes, lanes)


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> Any:
    """The larger of each lane."""
    return _operation(lambda builder, a, b: _call(builder, "llvm.maxnum", a, b), lanes, lanes, lanes)


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """Sum of the 16 lanes."""

    def emit(builder: Any, a: Any) -> Any:
        zero = ir.Constant(_FLOAT, 0.0)
        return _call(builder, "llvm.vector.reduce.fadd", zero, a, returns=_FLOAT, flags=("reassoc",))

    return _operation(emit, types.float32, lanes)


@intrinsic
def totals(
    typing: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    e: Any,
    f: Any,
    g: Any,
    h: Any,
    i: Any,
    j: Any,
    k: Any,
    l: Any,
    m: Any,
    n: Any,
    o: Any,
    p: Any,
) -> Any:
    """`total` of each of 16, as lanes: both halves of all are added, then both halves of those, …"""

    def emit(builder: Any, *rows: Any) -> Any:
        pieces, width = list(rows), LANES // 2
        while len(pieces) > 1:
            low = [start + x for start in range(0, 2 * LANES, 2 * width) for x in range(width)]
            indices = [ir.Constant(ir.VectorType(_INT, LANES), [x + half for x in low]) for half in (0, width)]
            pairs = zip(pieces[::2], pieces[1::2], strict=True)
            pieces = [builder.fadd(*(builder.shuffle_vector(x, y, z) for z in indices)) for x, y in pairs]
            width //= 2
        return pieces[0]

    return _operation(emit, lanes, *[lanes] * LANES)


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """Largest of the 16 lanes."""
    return _operation(
        lambda builder, a: _call(builder, "llvm.vector.reduce.fmax", a, returns=_FLOAT, flags=("nnan",)),
        types.float32,
        lanes,
    )


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x of a scalar or of lanes, in fp32, without a branch: at most 2 units off in the last place.

    x = n ln 2 + r, e^r by the polynomial of Cephes' expf. Below -87 it is e^-87 (1e-38), above 88 it is e^88.
    """

    def emit(builder: Any, a: Any) -> Any:
        is_vector = isinstance(a.type, ir.VectorType)
        integer = ir.VectorType(_INT, LANES) if is_vector else _INT

        def constant(value: float) -> Any:
            return ir.Constant(a.type, [value] * LANES if is_vector else value)

        def whole(value: int) -> Any:
            return ir.Constant(integer, [value] * LANES if is_vector else value)

        def fma(p: Any, q: Any, r: Any) -> Any:
            return _call(builder, "llvm.fma", p, q, r)

        a = _call(builder, "llvm.minnum", _call(builder, "llvm.maxnum", a, constant(-87.0)), constant(88.0))
        n = _call(builder, "llvm.rint", builder.fmul(a, constant(1.44269502162933349609375)))
        r = fma(n, constant(-0.693359375), a)
        r = fma(n, constant(2.12194440054690465331e-4), r)
        y = constant(1.98756915167905390263e-4)
        for coefficient in (1.39819993637502193451e-3, 8.33345204591751098633e-3, 4.16657961905002593994e-2,
                            0.166666656732559204102, 0.5):  # fmt: skip
            y = fma(y, r, constant(coefficient))
        y = builder.fadd(fma(y, builder.fmul(r, r), r), constant(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, integer), whole(127)), whole(23))
        return builder.fmul(y, builder.bitcast(power, a.type))

    kind = lanes if x is lanes else types.float32
    return _operation(emit, kind, kind)
