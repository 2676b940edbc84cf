"""Row operations as explicit vector code, and prefetch: what numba does not promise to emit.

numba counts references around every call of a helper with array arguments (an atomic each) and guards every
inner loop against overlapping arrays: together that costs more than adding a row of 64 floats.  These
intrinsics emit the loop over a row directly: 16 floats at a time, then the rest one by one.  Elements are
independent and each operation is a plain `fadd`, `fmul`, ... without flags, so nothing is reassociated or fused.

All arrays are C-contiguous float32 [rows, dim] with the dim of `dst`; row numbers are integers in range (not
checked).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_INT64 = ir.IntType(64)
_WIDTH = 16
_VECTOR = ir.VectorType(_FLOAT, _WIDTH)


def _prefetch(context: Any, builder: Any, signature: Any, args: Any, write: int) -> Any:
    array, index = args
    data = context.make_array(signature.args[0])(context, builder, array).data
    address = builder.gep(data, [index])
    pointer = ir.PointerType(ir.IntType(8))
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(address, pointer), word(write), word(3 if write else 2), word(1)])
    return context.get_dummy_value()


def _read(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _prefetch(context, builder, signature, args, 0)

    return types.none(array, types.intp), codegen


def _write(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _prefetch(context, builder, signature, args, 1)

    return types.none(array, types.intp), codegen


# prefetch_read(array, index) asks for the cache line of element `index` (C order) of a C-contiguous array,
# prefetch_write the same for a line about to be written.  Hints: they never fault and change no result.
prefetch_read: Any = intrinsic(_read)
prefetch_write: Any = intrinsic(_write)


Body = Callable[[Any, Any, Any, Any], Any]  # (builder, dst value, src value, scale) -> new dst value


def _emit(context: Any, builder: Any, signature: Any, args: Any, body: Body) -> Any:
    """for c in range(dim): dst[dst_row, c] = body(dst[dst_row, c], src[src_row, c], scale)."""
    dst, dst_row, src, src_row, scale = args
    target = context.make_array(signature.args[0])(context, builder, dst)
    source = context.make_array(signature.args[2])(context, builder, src)
    dim = builder.extract_value(target.shape, 1)
    to = builder.gep(target.data, [builder.mul(dst_row, dim)])
    of = builder.gep(source.data, [builder.mul(src_row, dim)])
    full = builder.and_(dim, _INT64(-_WIDTH))

    splat = ir.Constant(_VECTOR, ir.Undefined)
    for lane in range(_WIDTH):
        splat = builder.insert_element(splat, scale, ir.IntType(32)(lane))

    def step(kind: Any, factor: Any, index: Any) -> None:
        here = builder.bitcast(builder.gep(to, [index]), ir.PointerType(kind))
        there = builder.bitcast(builder.gep(of, [index]), ir.PointerType(kind))
        old = builder.load(here, align=4, typ=kind)
        new = builder.load(there, align=4, typ=kind)
        builder.store(body(builder, old, new, factor), here, align=4)

    with cgutils.for_range_slice(builder, _INT64(0), full, _INT64(_WIDTH), inc=True) as (index, _):
        step(_VECTOR, splat, index)
    with cgutils.for_range_slice(builder, full, dim, _INT64(1), inc=True) as (index, _):
        step(_FLOAT, scale, index)
    return context.get_dummy_value()


def _row_operation(body: Body) -> Any:
    """An intrinsic `(dst, dst_row, src, src_row, scale)` whose every element is `body`."""

    def typing(typingctx: Any, dst: Any, dst_row: Any, src: Any, src_row: Any, scale: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _emit(context, builder, signature, args, body)

        return types.none(dst, types.intp, src, types.intp, types.float32), codegen

    return intrinsic(typing)


def _zero(like: Any) -> Any:
    return ir.Constant(like.type, [ir.Constant(_FLOAT, 0.0)] * _WIDTH if like.type == _VECTOR else 0.0)


# Each takes (dst, dst_row, src, src_row, scale); those named without scale ignore it (pass float32 0).
copy_row = _row_operation(lambda b, old, new, scale: new)
start_row = _row_operation(lambda b, old, new, scale: b.fadd(_zero(new), new))  # 0 + src
start_scaled_row = _row_operation(lambda b, old, new, scale: b.fadd(_zero(new), b.fmul(scale, new)))
add_row = _row_operation(lambda b, old, new, scale: b.fadd(old, new))
add_scaled_row = _row_operation(lambda b, old, new, scale: b.fadd(old, b.fmul(scale, new)))
subtract_scaled_row = _row_operation(lambda b, old, new, scale: b.fsub(old, b.fmul(scale, new)))
divide_row = _row_operation(lambda b, old, new, scale: b.fdiv(new, scale))  # src / scale

_LANES = 32
_LANE_VECTOR = ir.VectorType(_FLOAT, _LANES)


def _lane_sum(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    a, row_a, b, row_b = args
    first = context.make_array(signature.args[0])(context, builder, a)
    second = context.make_array(signature.args[2])(context, builder, b)
    dim = builder.extract_value(first.shape, 1)
    left = builder.gep(first.data, [builder.mul(row_a, dim)])
    right = builder.gep(second.data, [builder.mul(row_b, dim)])
    full = builder.and_(dim, _INT64(-_LANES))
    lanes = cgutils.alloca_once(builder, _LANE_VECTOR)
    builder.store(ir.Constant(_LANE_VECTOR, [ir.Constant(_FLOAT, 0.0)] * _LANES), lanes)

    def step(kind: Any, index: Any, sums: Any) -> None:
        x = builder.load(builder.bitcast(builder.gep(left, [index]), ir.PointerType(kind)), align=4, typ=kind)
        y = builder.load(builder.bitcast(builder.gep(right, [index]), ir.PointerType(kind)), align=4, typ=kind)
        builder.store(builder.fadd(builder.load(sums, typ=kind), builder.fmul(x, y)), sums)

    with cgutils.for_range_slice(builder, _INT64(0), full, _INT64(_LANES), inc=True) as (index, _):
        step(_LANE_VECTOR, index, lanes)
    each = builder.bitcast(lanes, ir.PointerType(_FLOAT))
    with cgutils.for_range_slice(builder, full, dim, _INT64(1), inc=True) as (index, _):
        step(_FLOAT, index, builder.gep(each, [builder.sub(index, full)]))
    value = builder.load(lanes, typ=_LANE_VECTOR)
    half = _LANES // 2
    while half > 0:  # lane[i] + lane[i + half] for i < half
        undefined = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                value, undefined, ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(start, start + half)))
            )
            for start in (0, half)
        )
        value = builder.fadd(low, high)
        half //= 2
    return builder.extract_element(value, ir.IntType(32)(0))


def _lane_sum_typing(typingctx: Any, a: Any, row_a: Any, b: Any, row_b: Any) -> Any:
    return types.float32(a, types.intp, b, types.intp), _lane_sum


# lane_sum_product(a, row_a, b, row_b): sum of the products of two rows in 32 lanes (lane i takes elements i,
# i + 32, ... in order), then folded by halves 16, 8, 4, 2, 1: the same order on every device.
lane_sum_product: Any = intrinsic(_lane_sum_typing)
