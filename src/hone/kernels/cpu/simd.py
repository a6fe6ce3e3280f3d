"""Vectors of floats for functions that numba compiles: portable intrinsics through LLVM.

numba vectorizes simple loops by itself, but does not keep a tile of a matrix product in registers.
A `Lanes` value is one LLVM vector as wide as the processor's: 16 floats with AVX-512, 8 with AVX2,
4 with NEON. `tile_of` builds the inner loop of a matrix product from such vectors. Memory is an
address (an int) or a flat float32 array; `get` and `put` use an index unchanged, without numba's
check for negative ones.

`floats(address, shape)` returns an array for reading only. Kernels write with `put` and `store`,
because numba treats an array made from an address as local and removes writes to it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from hone.kernels.cpu import isa

LANES = isa().lanes
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


class Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Lanes{LANES}")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _VECTOR)


Emit = Callable[..., Any]


def _operation(emit: Emit, result: types.Type, *arguments: types.Type) -> tuple[Any, Any]:
    """Return an intrinsic's signature and code generator, from `emit(builder, *values)`."""
    return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)


def _call(
    builder: Any, name: str, *values: Any, returns: Any = None, flags: tuple[str, ...] = ()
) -> Any:
    """Call one of LLVM's functions on values of one type."""
    suffix = f"v{LANES}f32" if isinstance(values[-1].type, ir.VectorType) else "f32"
    kind = ir.FunctionType(returns or values[-1].type, [value.type for value in values])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"{name}.{suffix}"),
        values,
        fastmath=flags,
    )


def _fill(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)


# ------------------------------------------------------------------------------------------------ memory


def _address(
    context: Any, builder: Any, kind: types.Type, memory: Any, at: Any, of: Any = _FLOAT
) -> Any:
    if isinstance(kind, types.Array):
        first = context.make_array(kind)(context, builder, memory).data
    else:
        first = builder.inttoptr(memory, of.as_pointer())
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
    """Return memory[at]."""
    return types.float32(memory, types.intp), _load


@intrinsic
def put(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """Set memory[at] = x."""
    return types.void(memory, types.intp, types.float32), _store


@intrinsic
def put_integer(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """Set memory[at] = x, where `memory` is the address of int64s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, types.intp, *arguments[:2], of=ir.IntType(64))
        builder.store(arguments[2], address)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@intrinsic
def get_integer(typing: Any, memory: Any, at: Any) -> Any:
    """Return memory[at], where `memory` is the address of int64s."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, types.intp, *arguments, of=ir.IntType(64)))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def load(typing: Any, memory: Any, at: Any) -> Any:
    """Return memory[at : at + LANES]."""
    return lanes(memory, types.intp), _load_lanes


@intrinsic
def store(typing: Any, memory: Any, at: Any, x: Any) -> Any:
    """Set memory[at : at + LANES] = x."""
    return types.void(memory, types.intp, lanes), _store_lanes


@intrinsic
def prefetch(typing: Any, memory: Any, at: Any) -> Any:
    """Prefetch the cache line of memory[at], where `memory` holds floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.Constant
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(_address(context, builder, signature.args[0], *arguments), byte)
        # To read, near, data
        builder.call(function, [address, number(_INT, 0), number(_INT, 3), number(_INT, 1)])
        return context.get_dummy_value()

    return types.void(memory, types.intp), generate


def _pointer_to(kind: types.Type) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.intp), generate

    return pointer


_floats, _integers, _words = (
    _pointer_to(kind) for kind in (types.float32, types.int64, types.int32)
)


@njit
def floats(address: Any, shape: Any) -> Any:
    """Return the float32 array at an address, for reading."""
    return carray(_floats(address), shape)


@njit
def integers(address: Any, shape: Any) -> Any:
    """Return the int64 array at an address, for reading."""
    return carray(_integers(address), shape)


@njit
def words(address: Any, shape: Any) -> Any:
    """Return the int32 array at an address, for reading."""
    return carray(_words(address), shape)


# -------------------------------------------------------------------------------------------- arithmetic


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """Return a vector with all lanes equal."""
    return _operation(_fill, lanes, types.float32)


def _of_two(emit: Emit) -> Any:
    @intrinsic
    def operation(typing: Any, x: Any, y: Any) -> Any:
        return _operation(emit, lanes, lanes, lanes)

    return operation


add = _of_two(lambda builder, a, b: builder.fadd(a, b))
multiply = _of_two(lambda builder, a, b: builder.fmul(a, b))
divide = _of_two(lambda builder, a, b: builder.fdiv(a, b))
maximum = _of_two(lambda builder, a, b: _call(builder, "llvm.maxnum", a, b))


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once; x may be a scalar."""

    def emit(builder: Any, a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "llvm.fma", a if x is lanes else _fill(builder, a), b, c)

    return _operation(emit, lanes, lanes if x is lanes else types.float32, lanes, lanes)


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """Return the sum of the lanes."""

    def emit(builder: Any, a: Any) -> Any:
        zero = ir.Constant(_FLOAT, 0.0)
        return _call(
            builder, "llvm.vector.reduce.fadd", zero, a, returns=_FLOAT, flags=("reassoc",)
        )

    return _operation(emit, types.float32, lanes)


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """Return the largest lane."""

    def emit(builder: Any, a: Any) -> Any:
        return _call(builder, "llvm.vector.reduce.fmax", a, returns=_FLOAT, flags=("nnan",))

    return _operation(emit, types.float32, lanes)


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """Return e^x of a scalar or of lanes, in fp32, without a branch, at most 2 ulp off.

    x = n ln 2 + r, with e^r by the polynomial of Cephes' expf. Below -87 the result is 0, above 88
    it is e^88. The 0 saves time: otherwise a masked score would give 1e-38 and its products would
    be denormals, which cost Intel's processors a hundred cycles each.
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

        is_zero = builder.fcmp_ordered("<", a, constant(-87.0))
        a = _call(
            builder,
            "llvm.minnum",
            _call(builder, "llvm.maxnum", a, constant(-87.0)),
            constant(88.0),
        )
        n = _call(builder, "llvm.rint", builder.fmul(a, constant(1.44269502162933349609375)))
        r = fma(n, constant(-0.693359375), a)
        r = fma(n, constant(2.12194440054690465331e-4), r)
        y = constant(1.98756915167905390263e-4)
        for coefficient in (
            1.39819993637502193451e-3,
            8.33345204591751098633e-3,
            4.16657961905002593994e-2,
            0.166666656732559204102,
            0.5,
        ):
            y = fma(y, r, constant(coefficient))
        y = builder.fadd(fma(y, builder.fmul(r, r), r), constant(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, integer), whole(127)), whole(23))
        return builder.select(
            is_zero, constant(0.0), builder.fmul(y, builder.bitcast(power, a.type))
        )

    kind = lanes if x is lanes else types.float32
    return _operation(emit, kind, kind)


# ---------------------------------------------------------------------------------------------- products


def tile_of(rows: int, vectors: int, together: int = 8) -> Any:
    """Return an intrinsic for matrix products, with rows x (vectors * LANES) sums in registers.

    The loop over k is unrolled by `together`: the processor predicts the end of short loops, not of
    long ones. a_column occupies a register unless it is known at compile time.

    tile(a, a_at, a_row, a_column, b, b_at, b_row, c, c_at, c_row, K, adds) sets C = A B, or adds A
    B to C if `adds`. A[m, k] is a[a_at + m * a_row + k * a_column]. Row k of B begins at b[b_at + k
    * b_row], row m of C at c[c_at + m * c_row]. Each number of C is summed in order of k, so its
    bits do not depend on the other rows.
    """

    @intrinsic
    def tile(
        typing: Any,
        a: Any,
        a_at: Any,
        a_row: Any,
        a_column: Any,
        b: Any,
        b_at: Any,
        b_row: Any,
        c: Any,
        c_at: Any,
        c_row: Any,
        K: Any,
        adds: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, _, a_row, a_column, _, _, b_row, _, _, c_row, K, adds = arguments
            kinds, number = signature.args, ir.Constant
            first = {
                i: _address(context, builder, kinds[i], arguments[i], arguments[i + 1])
                for i in (0, 4, 7)
            }
            width = range(vectors)

            def vector_at(address: Any, v: int) -> Any:
                return builder.bitcast(
                    builder.gep(address, [number(a_row.type, v * LANES)]), _VECTOR.as_pointer()
                )

            rows_of_C = [
                builder.gep(first[7], [builder.mul(c_row, number(c_row.type, m))])
                for m in range(rows)
            ]
            places = [vector_at(row, v) for row in rows_of_C for v in width]
            starts_of_A = [
                _as_it_is(
                    builder, builder.gep(first[0], [builder.mul(a_row, number(a_row.type, m))])
                )
                for m in range(rows)
            ]
            before = builder.block
            with builder.if_then(adds):
                there = [builder.load(place, align=4) for place in places]
                loaded = builder.block
            zero = number(_VECTOR, [0.0] * LANES)
            sums = [_phi(builder, _VECTOR, (zero, before), (x, loaded)) for x in there]
            k = number(K.type, 0)
            for steps in dict.fromkeys((together, 1)):
                start, (head, body, end) = (
                    builder.block,
                    (builder.append_basic_block(x) for x in ("head", "body", "end")),
                )
                builder.branch(head)
                builder.position_at_end(head)
                k = _phi(builder, K.type, (k, start))
                sums = [_phi(builder, _VECTOR, (x, start)) for x in sums]
                following = builder.add(k, number(K.type, steps))
                builder.cbranch(builder.icmp_signed("<=", following, K), body, end)
                builder.position_at_end(body)
                added = list(sums)
                row, column = builder.mul(k, b_row), builder.mul(k, a_column)
                for i in range(steps):
                    if i:  # no load of the next k before those of this one, for which there is no register
                        builder.asm(
                            ir.FunctionType(ir.VoidType(), []),
                            "",
                            "~{memory}",
                            [],
                            side_effect=True,
                        )
                        row, column = builder.add(row, b_row), builder.add(column, a_column)
                    right = [
                        builder.load(vector_at(builder.gep(first[4], [row]), v), align=4)
                        for v in width
                    ]
                    for m, start_of_A in enumerate(starts_of_A):
                        left = _fill(builder, builder.load(builder.gep(start_of_A, [column])))
                        for v in width:
                            n = m * vectors + v
                            added[n] = _call(builder, "llvm.fma", left, right[v], added[n])
                for x, y in zip((k, *sums), (following, *added), strict=True):
                    x.add_incoming(y, body)
                builder.branch(head)
                builder.position_at_end(end)
            for place, x in zip(places, sums, strict=True):
                builder.store(x, place, align=4)
            return context.get_dummy_value()

        at = types.intp
        return types.void(a, at, at, at, b, at, at, c, at, at, at, types.boolean), generate

    return tile


@intrinsic
def transpose(typing: Any, x: Any, x_at: Any, x_row: Any, out: Any, at: Any, row: Any) -> Any:
    """Set out[at + j * row + i] = x[x_at + i * x_row + j] for LANES rows i and LANES columns j."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, x_row, _, _, row = arguments
        kinds, number = signature.args, ir.Constant
        first, there = (
            _address(context, builder, kinds[i], arguments[i], arguments[i + 1]) for i in (0, 3)
        )

        def place(start: Any, step: Any, i: int) -> Any:
            return builder.bitcast(
                builder.gep(start, [builder.mul(step, number(step.type, i))]), _VECTOR.as_pointer()
            )

        rows = [builder.load(place(first, x_row, i), align=4) for i in range(LANES)]
        half = LANES // 2
        while half:  # blocks of `half` x `half` beside the diagonal change places
            for i in (i for i in range(LANES) if not i & half):
                a, b = rows[i], rows[i + half]
                low = [LANES + j - half if j & half else j for j in range(LANES)]
                high = [LANES + j if j & half else j + half for j in range(LANES)]
                masks = [number(ir.VectorType(_INT, LANES), which) for which in (low, high)]
                rows[i], rows[i + half] = (builder.shuffle_vector(a, b, mask) for mask in masks)
            half //= 2
        for i, x in enumerate(rows):
            builder.store(x, place(there, row, i), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, at, out, at, at), generate


@intrinsic
def dots(typing: Any, x: Any, x_at: Any, rows: Any, at: Any, step: Any, E: Any) -> Any:
    """Return the dot products of x[x_at : x_at + E] with LANES rows of E numbers, as lanes.

    Rows start at `at` and are `step` apart.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *_, step, E = arguments
        kinds, number = signature.args, ir.Constant
        first, row = (
            _address(context, builder, kinds[i], arguments[i], arguments[i + 1]) for i in (0, 2)
        )
        starts = [builder.gep(row, [builder.mul(step, number(step.type, i))]) for i in range(LANES)]
        before, head, body, end = (
            builder.block,
            *(builder.append_basic_block(name) for name in ("head", "body", "end")),
        )
        builder.branch(head)
        builder.position_at_end(head)
        e = _phi(builder, E.type, (number(E.type, 0), before))
        sums = [_phi(builder, _VECTOR, (number(_VECTOR, [0.0] * LANES), before)) for _ in starts]
        builder.cbranch(builder.icmp_signed("<", e, E), body, end)
        builder.position_at_end(body)

        def vector(start: Any) -> Any:
            return builder.load(
                builder.bitcast(builder.gep(start, [e]), _VECTOR.as_pointer()), align=4
            )

        left = vector(first)
        for start, x in zip(starts, sums, strict=True):
            x.add_incoming(_call(builder, "llvm.fma", left, vector(start), x), body)
        e.add_incoming(builder.add(e, number(E.type, LANES)), body)
        builder.branch(head)
        builder.position_at_end(end)
        # Both halves of all are added, then both halves of those, …
        pieces, width = sums, LANES // 2
        while len(pieces) > 1:
            low = [start + x for start in range(0, 2 * LANES, 2 * width) for x in range(width)]
            indices = [
                number(ir.VectorType(_INT, LANES), [x + half for x in low]) for half in (0, width)
            ]
            pairs = zip(pieces[::2], pieces[1::2], strict=True)
            pieces = [
                builder.fadd(*(builder.shuffle_vector(x, y, z) for z in indices)) for x, y in pairs
            ]
            width //= 2
        return pieces[0]

    return lanes(x, types.intp, rows, types.intp, types.intp, types.intp), generate


def _as_it_is(builder: Any, address: Any) -> Any:
    """Return the address in a form that the compiler cannot analyze.

    Otherwise the compiler computes the addresses of a matrix's rows by a chain of additions, which
    with AVX2 takes as long as the arithmetic of `tile_of`.
    """
    whole = builder.ptrtoint(address, ir.IntType(64))
    hidden = builder.asm(
        ir.FunctionType(whole.type, [whole.type]), "", "=r,0", [whole], side_effect=False
    )
    return builder.inttoptr(hidden, address.type)


def _phi(builder: Any, kind: Any, *incoming: tuple[Any, Any]) -> Any:
    phi = builder.phi(kind)
    for value, block in incoming:
        phi.add_incoming(value, block)
    return phi
