"""Lines of a compressed text, in blocks that are known without unpacking it.

Block k holds the lines that end in what is unpacked while the reader is in the k-th stretch of `piece_bytes`
compressed bytes, so the number of blocks follows from the file's size. A block can be reached only through those
before it: going on in the middle unpacks from the beginning (about 300 MB/s of text for gzip, 1 GB/s for zstd),
and a shuffle takes the files in any order but the blocks of a file one after the other.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdlrm.errors import DataError

__all__ = ["LONGEST_LINE_BYTES", "PackedText", "codec_of"]

LONGEST_LINE_BYTES = 2**20
_READ_BYTES = 2**18  # unpacked; the same in every pass, because it decides where blocks end
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def codec_of(head: bytes) -> str | None:
    """ "gzip", "zstd" or None, by the first bytes of a file."""
    return next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)


class PackedText:
    """name: path; codec: as `codec_of` says; size: bytes of the file. Not for several threads at once."""

    def __init__(self, name: str, codec: str, size: int, piece_bytes: int) -> None:
        self.name, self._codec, self._size, self._piece_bytes = name, codec, size, piece_bytes
        self._raw: Any = None
        self._stream: Any = None
        self._next = 0
        self._rest = b""  # the beginning of a line whose end is in a later block

    def lines(self, piece: int) -> bytes:
        """The lines of a block, each with its newline except perhaps the file's last. Raises OSError for a file that
        is truncated or damaged, DataError for a line without end."""
        if self._stream is None or piece < self._next:
            self.close()
            self._raw = open(self.name, "rb", buffering=0)  # noqa: SIM115 (stays open from block to block)
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), self._codec)
        while self._next < piece:
            self._following()
        return self._following()

    def _following(self) -> bytes:
        limit = (self._next + 1) * self._piece_bytes
        to_the_end = limit >= self._size
        parts, ended = [self._rest], False
        while not ended and (to_the_end or self._raw.tell() < limit):
            parts.append(self._stream.read(_READ_BYTES))
            ended = not parts[-1]
        data = b"".join(parts)
        end = len(data) if ended else data.rfind(b"\n") + 1
        self._rest = data[end:]
        self._next += 1
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise DataError(
                f"{self.name}: a line has more than {LONGEST_LINE_BYTES} bytes; give "
                "TAB-separated text with one sample a line"
            )
        return data[:end]

    def close(self) -> None:
        if self._raw is not None:
            self._stream.close()
            self._raw.close()
        self._raw, self._stream, self._next, self._rest = None, None, 0, b""
