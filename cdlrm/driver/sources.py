"""The text of the GPU kernels, found in a wheel (`cdlrm/cuda`) and in a checkout (`cuda` beside `cdlrm`)."""

from __future__ import annotations

import functools
import re
from pathlib import Path

# Of every compile with NVRTC, in the product and in bench/compile_proof.py.  Rule 9: no contraction, subnormal numbers
# kept, division and square root correctly rounded.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@functools.cache
def folder() -> Path:
    """Where the `.cu` and `.cuh` files are.  Raises FileNotFoundError where they were not installed."""
    for place in (_PACKAGE / "cuda", _PACKAGE.parent / "cuda"):
        if (place / "common.cuh").is_file():
            return place
    raise FileNotFoundError(
        f"the GPU kernels (common.cuh) are neither in {_PACKAGE / 'cuda'} nor in {_PACKAGE.parent / 'cuda'}; "
        "install cdlrm again."
    )


def source(file: str) -> str:
    """The text of a kernel file with our own headers put in, each once.

    One text needs no include path, and a compiled kernel that is cached by its text is compiled anew when a
    header changes.  `#line` lets the compiler's messages name the real file.
    """
    return _expand(file, set())


def _expand(file: str, seen: set[str]) -> str:
    seen.add(file)
    text = (folder() / file).read_text(encoding="utf-8")
    parts, end = [f'#line 1 "{file}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[end : match.start()])
        if match[1] not in seen:
            next_line = text.count("\n", 0, match.end()) + 2
            parts.append(_expand(match[1], seen) + f'#line {next_line} "{file}"')
        end = match.end()
    return "".join([*parts, text[end:]])
