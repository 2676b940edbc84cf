"""The kernels of `cuda/` compiled by the host's C++ compiler, and called from Python.

    kernels = compiled()                                    # a few shared libraries, cached by their text
    kernels.run("lookup", (4, 2, "float"), grid, args)      # args of signatures.pack, pointers to NumPy memory

`unavailable()` says why there is nothing to run (no compiler), for a test's skip.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cdlrm.driver import signatures, sources

HEADERS = Path(__file__).parent
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
LANE_FLAGS = (*FLAGS, "-DONE_CALL_A_LANE")  # one call a thread instead of one a team
EXPORTED = 'extern "C" __attribute__((visibility("default")))'
_LETTERS = {"ptr": "p", "i32": "i", "i64": "l", "f32": "f", "f64": "d"}
_RUNNER = ctypes.CFUNCTYPE(None, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p)


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first of c++, g++, clang++ on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def unavailable() -> str | None:
    """Why the kernels cannot be run here, or None."""
    return None if compiler() else "no C++ compiler (c++, g++, clang++ or $CXX) to run the CUDA kernels' text with"


def symbol(name: str, variant: signatures.Variant = ()) -> str:
    """The C name of a variant's runner."""
    return "_".join(map(str, ("run", name, *variant)))


def team_threads(variant: signatures.Variant, name: str) -> int:
    """Threads of a team; kernels without VEC use teams of 32."""
    if not variant:
        return signatures.TEAM[1]
    return signatures.TEAM[variant[1] if name in ("update_short", "update_long") else variant[0]]


def files() -> list[str]:
    """The kernel files of the table, each once."""
    return list(dict.fromkeys(kernel.file for kernel in signatures.KERNELS.values()))


def translation_unit(file: str) -> str:
    """A kernel file's text between the header and an extern "C" runner for each of its variants:

    `void run_NAME_VARIANT(long long first_block, long long last_block, int grid, const void* const* args)`
    """
    runners = []
    for kernel in signatures.KERNELS.values():
        if kernel.file != file:
            continue
        letters = "".join(_LETTERS[kind] for _, kind in kernel.parameters)
        for variant in kernel.variants:
            function = signatures.expression(kernel.name, variant)
            threads = f"{signatures.BLOCK_THREADS}, {team_threads(variant, kernel.name)}"
            runners.append(
                f'static_assert(takes({function}, "{letters}"), "signatures.py: {function}");\n'
                f"{EXPORTED} void {symbol(kernel.name, variant)}"
                "(long long first, long long last, int grid, const void* const* args) {\n"
                f"    run_blocks({function}, {threads}, first, last, grid, args);\n}}\n"
            )
    return with_header(file, "".join(runners))


def with_header(file: str, more: str) -> str:
    """The header, a file of `cuda/` and `more` text."""
    lanes, host = ((HEADERS / name).read_text(encoding="utf-8") for name in ("lanes.h", "host.h"))
    return "\n".join((host.replace('#include "lanes.h"\n', lanes), sources.source(file), "#line 1", more))


def compile_text(name: str, text: str, flags: Sequence[str], folder: Path) -> Path:
    """The shared library of a text, from `folder` if it is there.  Raises RuntimeError with the compiler's words."""
    command = [compiler() or "c++", *flags]
    key = hashlib.sha256("\0".join([*command, _version(command[0]), text]).encode()).hexdigest()[:20]
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as work:  # renamed when whole: others may be compiling it too
        unit, made = Path(work) / f"{name}.cpp", Path(work) / "made.so"
        unit.write_text(text, encoding="utf-8")
        done = subprocess.run([*command, str(unit), "-o", str(made)], capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"{name} does not compile for the host:\n{done.stderr[-8000:]}")
        made.replace(library)
    return library


def compile_file(file: str, flags: Sequence[str], folder: Path) -> Path:
    """The shared library of a kernel file, with a runner for each variant."""
    return compile_text(Path(file).stem, translation_unit(file), flags, folder)


@functools.cache
def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60).stdout


def cache_folder() -> Path:
    """Where libraries are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cdlrm-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Kernels:
    """All variants of all kernels, ready to call."""

    def __init__(self, libraries: Iterable[Path]) -> None:
        loaded = {library.name.rpartition("-")[0]: ctypes.CDLL(str(library)) for library in libraries}
        self._libraries = list(loaded.values())
        for library in self._libraries:
            library.take_fault.restype = ctypes.c_void_p
        self._runners: dict[tuple[str, signatures.Variant], Any] = {}
        for kernel in signatures.KERNELS.values():
            for variant in kernel.variants:
                address = getattr(loaded[Path(kernel.file).stem], symbol(kernel.name, variant))
                self._runners[kernel.name, variant] = ctypes.cast(address, _RUNNER)

    def run(
        self,
        name: str,
        variant: signatures.Variant,
        grid: int,
        args: Sequence[Any],
        blocks: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Run blocks [first, last) of a grid, range after range (default: all in order); args checked first.

        Raises TypeError for arguments of wrong types and RuntimeError for an address that a vector load
        or store of the device would have refused, and for a shuffle without its partners (LANE_FLAGS).
        """
        signatures.check(name, args)
        runner = self._runners[name, variant]
        cells = [ctypes.create_string_buffer(signatures.TYPES[kind].type(value).tobytes())
                 for (_, kind), value in zip(signatures.KERNELS[name].parameters, args, strict=True)]  # fmt: skip
        packed = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        for first, last in ((0, grid),) if blocks is None else blocks:
            runner(first, last, grid, ctypes.addressof(packed))
        for library in self._libraries:
            fault = library.take_fault()
            if fault is not None:
                lanes = "lanes wait for lanes that do not come"
                what = lanes if fault == 1 else f"a vector access at {fault:#x}, which is not aligned"
                raise RuntimeError(f"kernel {name!r} {variant!r}: {what}.")


@functools.cache
def compiled(flags: tuple[str, ...] = FLAGS) -> Kernels:
    """The kernels, compiled with `flags` where that was not done before (two files at a time)."""
    with ThreadPoolExecutor(2) as pool:
        return Kernels(pool.map(lambda file: compile_file(file, flags, cache_folder()), files()))
