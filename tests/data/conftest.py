"""The real sample, where it is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def criteo_sample() -> str:
    """Directory of the real ORC sample; skips where it is absent."""
    root = Path(os.environ.get("CDLRM_DATA", Path(__file__).parents[3] / "shared" / "data"))
    found = root / "criteo_tb_orc"
    if not found.is_dir():
        pytest.skip(f"the real sample is not at {found}; set CDLRM_DATA to the directory that holds criteo_tb_orc")
    return str(found)
