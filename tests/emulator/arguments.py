"""Arguments as bytes: one cell of 8 bytes each, as a launch of CuPy would store them once their types are checked."""

from __future__ import annotations

import struct

from cdlrm.driver.signatures import KERNELS, TYPES

CELL = 8
_FORMATS = {"ptr": "Q", "i32": "i4x", "i64": "q", "f32": "f4x", "f64": "d"}
LAYOUTS = {
    name: struct.Struct("=" + "".join(_FORMATS[kind] for _, kind in kernel.parameters))
    for name, kernel in KERNELS.items()
}
# The types that need no further look; other arguments may be right too (a Python int is an int64).
SCALARS = {name: [TYPES[kind].type for _, kind in kernel.parameters] for name, kernel in KERNELS.items()}
