"""Compile every kernel in every variant with CUDA's compilers, for every architecture; no GPU needed.

NVRTC, which the CUDA driver calls through CuPy, comes from the packages of our cuda extras: `nvidia-cuda-nvrtc`
(CUDA 13, sm_75 to sm_120) and `nvidia-cuda-nvrtc-cu12` (CUDA 12, sm_70, which CUDA 13 dropped).  A compile gives the
machine code, the PTX and ptxas' report; from these come registers, stack and spills of each kernel, and what PTX must
not contain: a fused multiply-add, or an approximate or flushing instruction (rule 9: every operation is rounded once).

    python bench/compile_proof.py [--jobs 2] [--out bench/results/compile_proof.jsonl]

Exits with 1 where a kernel spills, uses local memory, or contains such an instruction.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.metadata
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cdlrm.driver import signatures  # noqa: E402
from cdlrm.driver.sources import OPTIONS, source  # noqa: E402

COMPILERS = {  # name -> package, its library
    "cuda13": ("nvidia-cuda-nvrtc", "libnvrtc.so.13"),
    "cuda12": ("nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12"),
}
TARGETS = [("cuda12", 70), *(("cuda13", arch) for arch in (75, 80, 86, 89, 90, 100, 120))]
REPORT = ("--ptxas-options=-v", "--no-cache")  # a result out of NVRTC's cache has no report
INEXACT = re.compile(r"\b(?:fma|mad)\.\S*f(?:16|32|64)\S*|\b\w+\.\S*(?:ftz|approx)\S*|\bdiv\.full\S*")


class Usage(NamedTuple):
    """What one kernel of one variant needs on one architecture."""

    compiler: str
    arch: int
    kernel: str
    variant: str  # as C++ names it: lookup<4,2,float>
    registers: int
    stack_bytes: int
    spill_bytes: int  # stores and loads
    inexact: tuple[str, ...]  # instructions in its PTX that rule 9 forbids


class CompileError(Exception):
    """NVRTC refused; the message is its log."""


class Output(NamedTuple):
    log: str
    ptx: str
    cubin: bytes
    symbols: dict[str, str]  # expression -> symbol


def library(compiler: str) -> Path | None:
    """Where the compiler's shared library is, or None where its package is not installed."""
    package, name = COMPILERS[compiler]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((path for file in files if file.name == name and (path := Path(str(file.locate()))).exists()), None)


@functools.cache
def _nvrtc(compiler: str) -> ctypes.CDLL:
    path = library(compiler)
    if path is None:
        raise FileNotFoundError(f"{compiler}: install {COMPILERS[compiler][0]} (pip), which holds its compiler NVRTC.")
    return ctypes.CDLL(str(path))


def compile_text(compiler: str, arch: int, text: str, expressions: Sequence[str], options: Iterable[str]) -> Output:
    """Compile for a real architecture, as the product does.  Raises CompileError, FileNotFoundError."""
    nvrtc, program = _nvrtc(compiler), ctypes.c_void_p()

    def data(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw[: size.value]

    def symbol(expression: str) -> str:
        name = ctypes.c_char_p()
        if nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name)) or name.value is None:
            raise CompileError(f"{expression}: NVRTC has no symbol for it.")
        return name.value.decode()

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    try:
        for expression in expressions:
            nvrtc.nvrtcAddNameExpression(program, expression.encode())
        words = [word.encode() for word in (*options, f"-arch=sm_{arch}")]
        failed = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        log = data("ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise CompileError(f"{compiler}, sm_{arch}: {log}")
        ptx, cubin = data("PTX").rstrip(b"\0").decode(), data("CUBIN")
        return Output(log, ptx, cubin, {expression: symbol(expression) for expression in expressions})
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log: str) -> dict[str, tuple[int, int, int]]:
    """From ptxas' report: symbol -> registers, bytes of stack, bytes of spills."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if registers and frame:
            stack, stores, loads = map(int, frame.groups())
            found[part.split("'", 1)[0]] = (int(registers[1]), stack, stores + loads)
    return found


def inexact(ptx: str) -> dict[str, tuple[str, ...]]:
    """Symbol of each entry of the PTX -> its instructions that round otherwise than once, each kind once.

    Functions that were not inlined come before the entries and count for all of them."""
    functions, *parts = re.split(r"\.entry\s+(\w+)", ptx)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: tuple(sorted(set(INEXACT.findall(functions + body)))) for name, body in bodies.items()}


def compile_file(task: tuple[str, int, str]) -> list[Usage]:
    """All variants of all kernels of one file.  Raises CompileError if NVRTC refuses or reports nothing."""
    compiler, arch, file = task
    names = {
        signatures.expression(kernel.name, variant): kernel.name
        for kernel in signatures.KERNELS.values() if kernel.file == file for variant in kernel.variants
    }  # fmt: skip
    out = compile_text(compiler, arch, source(file), list(names), (*OPTIONS, *REPORT))
    if not out.cubin.startswith(b"\x7fELF"):
        raise CompileError(f"{compiler}, sm_{arch}, {file}: no machine code came back.")
    used, forbidden = resources(out.log), inexact(out.ptx)
    missing = [name for name, symbol in out.symbols.items() if symbol not in used or symbol not in forbidden]
    if missing:
        raise CompileError(f"{compiler}, sm_{arch}, {file}: no report of {missing[0]}: {out.log}")
    return [
        Usage(compiler, arch, names[name], name, *used[symbol], forbidden[symbol])
        for name, symbol in out.symbols.items()
    ]


def prove(jobs: int = 2, targets: Sequence[tuple[str, int]] = tuple(TARGETS)) -> list[Usage]:
    """Every kernel, variant and target, in `jobs` processes.  Raises CompileError, FileNotFoundError."""
    files = sorted({kernel.file for kernel in signatures.KERNELS.values()}, key=lambda file: -_weight(file))
    tasks = [(compiler, arch, file) for file in files for compiler, arch in targets]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [usage for usages in pool.map(compile_file, tasks) for usage in usages]


def _weight(file: str) -> int:
    """How many variants a file has: the longest compiles go first."""
    return sum(len(kernel.variants) for kernel in signatures.KERNELS.values() if kernel.file == file)


def summary(usages: Sequence[Usage]) -> list[str]:
    """A line a kernel: the range of registers over its variants for each architecture, and its spills."""
    lines = []
    for kernel in dict.fromkeys(usage.kernel for usage in usages):
        own = [usage for usage in usages if usage.kernel == kernel]
        parts = []
        for arch in dict.fromkeys(sorted(usage.arch for usage in own)):
            registers = [usage.registers for usage in own if usage.arch == arch]
            low, high = min(registers), max(registers)
            parts.append(f"sm_{arch} {low}" + ("" if low == high else f"-{high}"))
        variants, spills = len({usage.variant for usage in own}), sum(usage.spill_bytes for usage in own)
        stack = max(usage.stack_bytes for usage in own)
        lines.append(f"{kernel}: {variants} variants, spills {spills} B, stack {stack} B, registers {', '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="write a JSON line for each kernel, variant and architecture")
    options = parser.parse_args()
    started = time.perf_counter()
    usages = prove(options.jobs)
    for usage in usages:
        bad = f"  FORBIDDEN {', '.join(usage.inexact)}" if usage.inexact else ""
        print(f"sm_{usage.arch:<4}{usage.variant:<28}{usage.registers:>4} registers {usage.stack_bytes} B stack "
              f"{usage.spill_bytes} B spills{bad}")  # fmt: skip
    print("\n".join(summary(usages)))
    print(f"{len(usages)} compiles in {time.perf_counter() - started:.0f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(usage._asdict()) + "\n" for usage in usages), encoding="utf-8")
    if any(usage.stack_bytes or usage.spill_bytes or usage.inexact for usage in usages):
        sys.exit(1)


if __name__ == "__main__":
    main()
