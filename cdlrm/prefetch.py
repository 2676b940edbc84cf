"""`prefetch(array, i)`: ask the processor for element `i` of a contiguous array, from numba code.

Table rows and per-row metadata are touched at random, so a kernel's speed is the number of cache
misses it has in flight.  A hint some tens of elements ahead is worth a factor of two (design.md,
section 4).  The hint never faults and never changes a result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Hint that the cache line of flat element `index` of `array` (C-contiguous) is read soon."""
    if not (isinstance(array, types.Array) and isinstance(index, types.Integer)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ary = make_array(signature.args[0])(context, builder, args[0])
        i64, i32, i8p = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        flat = context.cast(builder, args[1], signature.args[1], types.int64)
        base = builder.ptrtoint(ary.data, i64)
        address = builder.add(base, builder.mul(flat, ary.itemsize))
        module = builder.module
        function = cgutils.get_or_insert_function(
            module, ir.FunctionType(ir.VoidType(), [i8p, i32, i32, i32]), "llvm.prefetch.p0"
        )
        read, keep, data = ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)
        builder.call(function, [builder.inttoptr(address, i8p), read, keep, data])
        return context.get_dummy_value()

    return types.void(array, index), codegen
