"""Memory of columns that is used again, block after block."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np

__all__ = ["pooled"]

_spare: dict[int, deque[memoryview]] = {}  # by size
_SPARE = 64  # of a size


def pooled(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """np.empty whose memory is used again when the array and all views of it have gone: fresh pages for every block
    cost as much as the kernels, and Arrow's pool gives blocks of this size back. What is kept is at most what was in
    use at once, of each size."""
    count = math.prod(shape)
    size = count * np.dtype(dtype).itemsize
    step = 1 << max(size.bit_length() - 3, 6)  # four sizes in each power of two, so that nearly equal blocks share
    size = -(-size // step) * step
    spare = _spare.setdefault(size, deque(maxlen=_SPARE))
    try:
        memory = spare.pop()
    except IndexError:
        memory = np.empty(size, np.uint8).data
    whole: np.ndarray = np.frombuffer(memory, dtype, count)
    weakref.finalize(whole, spare.append, memory).atexit = False
    return whole.reshape(shape)
