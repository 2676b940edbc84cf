"""What a file says about itself: which columns have which role, and whether ids and numbers are ready for use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cdlrm.errors import DataError

__all__ = ["KEY", "Prepared"]

KEY = b"cdlrm"
"""Key of the Parquet metadata under which `cdlrm convert` leaves a `Prepared` as JSON."""
_VERSION = 1


@dataclass(frozen=True)
class Prepared:
    """numbered: ids are row numbers. counts: categorical column -> rows that its table needs, empty where unknown.
    dense_ready: dense values are used as they are, without log(1 + x). vocabulary: short name of the numbering, ""
    for none; files of different numberings do not fit together. label, dense, sparse: names of the columns."""

    label: str = "label"
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    numbered: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    dense_ready: bool = False
    vocabulary: str = ""

    def to_metadata(self) -> dict[bytes, bytes]:
        return {KEY: json.dumps({"version": _VERSION, **asdict(self)}).encode()}

    @staticmethod
    def from_metadata(file: str, metadata: Mapping[bytes, bytes] | None) -> Prepared | None:
        """None for a file that `cdlrm convert` did not write."""
        text = (metadata or {}).get(KEY)
        if text is None:
            return None
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop("version") == _VERSION:
                return Prepared(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{file}: what `cdlrm convert` noted in it is damaged ({error}); convert again") from error
        raise DataError(f"{file}: was written by another version of `cdlrm convert`; convert again")
