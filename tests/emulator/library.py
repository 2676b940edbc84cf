"""Calls of the compiled kernels, made quick: files are compiled when first used, arguments packed by one format."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cdlrm.driver.signatures import KERNELS, Kernel

from .arguments import CELL, LAYOUTS
from .compile import FLAGS, cache_folder, compile_file, symbol
from .memory import EmulatorError

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p)


class MisalignedError(EmulatorError):
    """A vector load or store at an address that a device refuses."""


@functools.cache
def _library(file: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_file(file, FLAGS, cache_folder())))
    library.take_fault.restype = ctypes.c_void_p
    return library


class Calls:
    """`calls(kernel, variant, grid, args)` runs all blocks in order; args of the table's types; one call at a time."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, tuple[Any, ...]], tuple[Any, Any]] = {}
        self._arguments: dict[str, tuple[Any, Any]] = {}

    def _load(self, kernel: Kernel, variant: tuple[Any, ...]) -> tuple[Any, Any]:
        library = _library(kernel.file)
        function = _FUNCTION((symbol(kernel.name, variant), library))
        return self._functions.setdefault((kernel.name, variant), (function, library.take_fault))

    def _cells(self, kernel: Kernel) -> tuple[Any, Any]:
        size = LAYOUTS[kernel.name].size
        buffer = ctypes.create_string_buffer(size)
        first = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(kernel.parameters))(*range(first, first + size, CELL))
        return self._arguments.setdefault(kernel.name, (buffer, pointers))

    def __call__(self, name: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> None:
        function, take_fault = self._functions.get((name, variant)) or self._load(KERNELS[name], variant)
        buffer, pointers = self._arguments.get(name) or self._cells(KERNELS[name])
        LAYOUTS[name].pack_into(buffer, 0, *args)
        function(0, grid, grid, ctypes.addressof(pointers))
        fault = take_fault()
        if fault is not None:
            raise MisalignedError(f"kernel {name!r} {variant!r}: a vector access at {fault:#x}, which is not aligned")
