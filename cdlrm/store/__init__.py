"""Where all records live while they are not cached."""

from .ram import RamStore

__all__ = ["RamStore"]
