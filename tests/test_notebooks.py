"""Every notebook runs from the first cell to the last at a small scale; the outputs that are kept are clean."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install '.[notebook]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install '.[notebook]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install '.[notebook]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[notebook]'")

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(file.stem for file in FOLDER.glob("*.ipynb"))
LIMIT_SECONDS = 300  # of a cell, on a busy machine; a quiet one takes less than 60 for a whole notebook


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(name: str) -> list[Any]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def test_the_four_are_there() -> None:
    assert NOTEBOOKS == ["choosing_hardware", "criteo_end_to_end", "inside_the_cache", "quickstart"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CDLRM_NOTEBOOKS", "small")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    notebook = read(name)
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    started = time.monotonic()
    client.execute()  # raises CellExecutionError for the first cell that fails
    with capsys.disabled():
        print(f"  {name}: {time.monotonic() - started:.0f} s", end="")
    figures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert figures, "no figure was drawn"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_kept_and_clean(name: str) -> None:
    """Executed in order, no error, no warning, no path of a machine, no file larger than a reader wants."""
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    words = [o.get("text", "") + str(o.get("data", {}).get("text/plain", "")) for o in outputs]
    for text in [*words, *(cell.source for cell in cells)]:
        assert not re.search(r"/(home|root|tmp|work|usr|mnt)/", text)
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000
