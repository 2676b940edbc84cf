"""How the threads of a `Team` share the work inside a kernel: `claim`, `finish`, `wait`.

`claims int64 [1 + phases, 1 + members]`: row 0 begins with a flag, set when a thread has failed; in row 1 + p are how
many members of phase p are finished, then which of them somebody has begun.
"""

from __future__ import annotations

import sys
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

POLLS = 64  # then let another thread of this core have a turn: perhaps it is the one that is waited for
YIELDS = 64  # then sleep in between: the one that is waited for has to wait for a core itself
NAP = 50  # microseconds


def new_claims(*members: int) -> np.ndarray:
    """For phases of so many members each."""
    return np.zeros((1 + len(members), 1 + max(members)), np.int64)


def give_up(claims: np.ndarray) -> None:
    """A thread has failed: the others shall neither wait for it nor begin anything more."""
    claims[0, 0] = 1


def _atomic(operation: str) -> Any:
    """An intrinsic `(array, index, value) -> old value` of an int64 array (C order), acquire and release."""

    def typing(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.atomic_rmw(operation, builder.gep(data, [args[1]]), args[2], "acq_rel")

        return types.int64(array, types.intp, types.int64), codegen

    return intrinsic(typing)


def _read(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(array, types.intp), codegen


def _call(name: str, *arguments: int) -> Any:
    """An intrinsic that calls a function of the C library (where there is none, on Windows: nothing)."""

    def typing(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if sys.platform != "win32":
                word = ir.IntType(32)
                kind = ir.FunctionType(word, [word for _ in arguments])
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                builder.call(function, [word(argument) for argument in arguments])
            return context.get_dummy_value()

        return types.none(), codegen

    return intrinsic(typing)


jit: Any = nb.njit(nogil=True, cache=True, error_model="numpy")
_exchange, _add = _atomic("xchg"), _atomic("add")
_load: Any = intrinsic(_read)
_yield: Any = _call("sched_yield")
_nap: Any = _call("usleep", NAP)


@jit
def claim(claims, phase, worker, workers, turn, members):
    """The member of `phase` that `worker` (of `workers`) tries at its `turn`, or -1: somebody has begun it, or a thread
    has failed.

    Each begins with its own ones, which are the same ones in each phase: what it has just written is in its caches.
    """
    if _load(claims, 0):
        return -1
    member = (worker * members // workers + turn) % members
    return -1 if _exchange(claims, (1 + phase) * claims.shape[1] + 1 + member, 1) else member


@jit
def finish(claims, phase):
    """A member that was claimed is done; whoever comes back from `wait` sees what it has written."""
    _add(claims, (1 + phase) * claims.shape[1], 1)


@jit
def wait(claims, phase, members):
    """Until all members are finished (True) or a thread has failed (False).

    They are all begun by then, by threads that run: one that was not awake yet holds nobody up.
    """
    polls = 0
    while _load(claims, (1 + phase) * claims.shape[1]) < members:
        if _load(claims, 0):
            return False
        polls += 1
        if polls % POLLS == 0:
            if polls < POLLS * YIELDS:
                _yield()
            else:
                _nap()
    return True
