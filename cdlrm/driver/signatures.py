"""The one table of kernels: where each is, its variants and its parameters' types.

CuPy passes a Python int as 8 bytes and a float as a double, whatever the kernel's parameter is; a wrong
type is not an error but garbage.  So every launch is packed and checked by this table, and the emulator's
compiler asserts that it agrees with the C++ text.

A *team* is the threads that own one record, bag or row: with VEC = 4, 8 threads of four columns each; with
VEC = 1, 32 threads of one column each.  Either covers 32 columns a step, and NV steps are held in registers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK_THREADS = 128
TEAM = {4: 8, 1: 32}  # threads of a team by VEC
LONG_ROW = 256  # rows with more lookups are left out by update_short (rule 9's chunk)

VECS = (4, 1)
STEPS = (1, 2, 4)  # NV: tiles of 32, 64, 128 columns
OUTPUTS = ("float", "bf16", "fp16")
OPTIMIZERS = {"SGD": 0, "RowWiseAdagrad": 1, "Adagrad": 2, "Adam": 3}  # OPT

Variant = tuple[Any, ...]
Parameter = tuple[str, str]  # name, type

TYPES: dict[str, np.dtype] = {
    "ptr": np.dtype(np.uint64),  # a device (or mapped) address, 0 for none
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Kernel:
    """`function` of `file`; `variants` are its template arguments, in the C++ order."""

    name: str
    file: str
    function: str
    parameters: tuple[Parameter, ...]
    variants: tuple[Variant, ...]


def _parameters(text: str) -> tuple[Parameter, ...]:
    """`"ptr a b, i32 c"` as (a, ptr), (b, ptr), (c, i32)."""
    return tuple((name, kind) for kind, *names in (part.split() for part in text.split(",")) for name in names)


def _kernel(
    name: str, file: str, parameters: str, *choices: Sequence[Any], function: str | None = None
) -> tuple[str, Kernel]:
    return name, Kernel(name, file, function or name, _parameters(parameters), tuple(itertools.product(*choices)))


_RECORD = "ptr weight, i32 weight_stride, ptr state, i32 state_stride"
_HOME = "ptr home_weight, i32 home_weight_stride, ptr home_state, i32 home_state_stride, ptr rows slots"
_SOURCE = "ptr lookup_row columns, i32 batch width, ptr divisor per_sample grad, i32 dim"
_SEG = f"ptr seg_lookup, {_SOURCE}"
_FORM = "f32 lr decay eps rate1 rate2, ptr seg_table factors, f64 lr64, ptr steps"
_SUP = "ptr flag, i32 number, ptr sticky"
_OPTS = tuple(OPTIMIZERS.values())

KERNELS: dict[str, Kernel] = dict(
    (
        _kernel(
            "fill", "fill.cu",
            f"{_RECORD}, {_HOME}, i32 copied count staged dim state_width, ptr bases kinds numbers keys scales, "
            "i32 tables, f32 initial_state",
            VECS,
        ),
        _kernel("evict", "evict.cu", f"{_RECORD}, {_HOME}, i32 count staged dim state_width", VECS),
        _kernel(
            "lookup", "lookup.cu",
            "ptr weight, i32 weight_stride, ptr slots starts columns mean per_sample out, i32 dim batch features width",
            VECS, STEPS, OUTPUTS,
        ),
        # CUDA's own library has a function `finite`.
        _kernel("finite", "finite.cu", "ptr grad, i64 count, i32 number, ptr flag sticky host_flag",
                function="check_finite"),
        _kernel(
            "combine", "finite.cu",
            "ptr first, i32 first_number, ptr second, i32 second_number, ptr flag, i32 number",
            function="combine_flags",
        ),
        _kernel(
            "update_short", "update.cu",
            f"{_RECORD}, ptr seg_slot seg_start, i32 distinct, {_SEG}, {_FORM}, "
            f"ptr next_steps used, i32 tables, {_SUP}",
            _OPTS, VECS, STEPS,
        ),
        _kernel("chunk_sums", "update.cu", f"ptr chunk_start chunk_stop, i32 chunks, {_SEG}, ptr sums, {_SUP}",
                VECS, STEPS),
        _kernel(
            "update_long", "update.cu",
            f"{_RECORD}, ptr seg_slot long_rows long_chunks, i32 count, ptr sums, i32 dim, {_FORM}, {_SUP}",
            _OPTS, VECS, STEPS,
        ),
        _kernel("weight_grad", "weight_grad.cu",
                f"ptr weight, i32 weight_stride, ptr slots, i32 lookups, {_SOURCE}, ptr out", VECS),
        _kernel("stream_copy", "stream_copy.cu", "ptr target source, i64 vectors"),
    )
)  # fmt: skip


def expression(name: str, variant: Variant) -> str:
    """The C++ name of a variant, as NVRTC takes it: `lookup<4,2,float>`."""
    kernel = KERNELS[name]
    if variant not in kernel.variants:
        raise TypeError(f"kernel {name!r} has no variant {variant!r}; it has {kernel.variants!r}.")
    return f"{kernel.function}<{','.join(map(str, variant))}>" if variant else kernel.function


def blocks(vec: int, owners: int) -> int:
    """Blocks (the launch's grid) that have a team for each of `owners`."""
    return -(-owners // (BLOCK_THREADS // TEAM[vec]))


def steps_held(dim: int) -> int:
    """NV for rows of `dim` columns: the fewest steps that hold a row, or the most there are."""
    return next((steps for steps in STEPS if dim <= 32 * steps), STEPS[-1])


def pack(name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in order, as NumPy scalars of the parameters' types; a pointer left out (or None) is 0.

    Raises TypeError for an unknown or missing name and for a value that is not of the parameter's kind, and
    OverflowError for an integer that does not fit.
    """
    parameters = KERNELS[name].parameters
    unknown = values.keys() - {parameter for parameter, _ in parameters}
    if unknown:
        raise TypeError(f"kernel {name!r} has no parameter {', '.join(sorted(unknown))}.")
    return tuple(_scalar(name, parameter, kind, values.get(parameter)) for parameter, kind in parameters)


def _scalar(name: str, parameter: str, kind: str, value: Any) -> Any:
    if value is None:
        if kind != "ptr":
            raise TypeError(f"kernel {name!r}: parameter {parameter!r} ({kind}) is missing.")
        value = 0
    if kind in ("f32", "f64"):
        return TYPES[kind].type(value)
    try:
        return TYPES[kind].type(operator.index(value))
    except TypeError:
        raise TypeError(
            f"kernel {name!r}: parameter {parameter!r} ({kind}) was given the {type(value).__name__} {value!r}."
        ) from None


def check(name: str, args: Sequence[Any]) -> None:
    """Raise TypeError unless `args`, passed as CuPy passes them, are what the kernel's parameters read."""
    parameters = KERNELS[name].parameters
    if len(args) != len(parameters):
        raise TypeError(f"kernel {name!r} takes {len(parameters)} arguments but was given {len(args)}.")
    for (parameter, kind), value in zip(parameters, args, strict=True):
        wanted, passed = TYPES[kind], _passed(value)
        kinds = "iu" if kind == "ptr" else wanted.kind
        if passed is None or passed.itemsize != wanted.itemsize or passed.kind not in kinds:
            raise TypeError(
                f"kernel {name!r}: parameter {parameter!r} is {kind} ({wanted}) but was passed "
                f"{type(value).__name__} {value!r} as {passed}."
            )


def _passed(value: Any) -> np.dtype | None:
    """What CuPy makes of an argument; None if it takes no such thing."""
    if isinstance(value, np.generic):
        return value.dtype
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if isinstance(value, kind):
            return np.dtype(dtype)
    return None
