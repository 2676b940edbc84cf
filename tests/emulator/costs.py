"""How long work would take: bytes by bandwidth, so that measurements by events have something to measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .access import Access
from .memory import Memory


@dataclass
class Costs:
    """`gigabytes_per_s` of copies by kind, of kernels' device memory, and of host memory that they read or write."""

    launch_ms: float = 0.005
    gigabytes_per_s: dict[str, float] = field(
        default_factory=lambda: {
            "h2d": 25.0, "d2h": 25.0, "d2d": 700.0, "device": 1500.0, "host_read": 20.0, "host_write": 18.0
        }
    )  # fmt: skip

    def _ms(self, what: str, nbytes: int) -> float:
        return nbytes / (self.gigabytes_per_s[what] * 1e6)

    def copy_ms(self, kind: str, nbytes: int) -> float:
        return self.launch_ms + self._ms(kind, nbytes)

    def clear_ms(self, nbytes: int) -> float:
        return self.launch_ms + self._ms("device", nbytes)

    def kernel_ms(self, accesses: Iterable[Access], memory: Memory) -> float:
        """The link and the device's own memory work at once; an update reads what it writes, which is not counted."""
        moved = {"device": 0, "host_read": 0, "host_write": 0}
        for access in accesses:
            region = memory.at(access.address)
            host = region is not None and region.kind in ("pinned", "registered")
            moved[("host_write" if access.writes else "host_read") if host else "device"] += access.total
        return self.launch_ms + max(self._ms(what, nbytes) for what, nbytes in moved.items())
