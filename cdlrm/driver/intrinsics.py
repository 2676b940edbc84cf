"""The one machine instruction that Python cannot say: prefetch."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _prefetch(context: Any, builder: Any, signature: Any, args: Any, write: int) -> Any:
    array, index = args
    data = context.make_array(signature.args[0])(context, builder, array).data
    address = builder.gep(data, [index])
    pointer = ir.PointerType(ir.IntType(8))
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(address, pointer), word(write), word(3), word(1)])
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
