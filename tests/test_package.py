"""The package as installed: metadata, what `import cdlrm` brings in, and files that must or must not exist."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent

NOT_IMPORTED = ("cupy", "yaml", "torchmetrics", "tqdm", "pyarrow", "matplotlib", "safetensors")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_in_neither_gpu_nor_command_line_libraries() -> None:
    code = (
        "import json, sys, torch, numba\n"
        "before = set(sys.modules)\n"
        "import cdlrm\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = {name.partition(".")[0] for name in json.loads(python(code))}
    assert new.isdisjoint(NOT_IMPORTED)
    assert "cdlrm" in new


def test_public_names_resolve() -> None:
    import cdlrm

    names = ("Table", "EmbeddingBagCollection", "SGD", "RowWiseAdagrad", "lookahead", "Batch", "Jagged", "CdlrmError")
    for name in names:
        assert name in dir(cdlrm)
        assert getattr(cdlrm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        cdlrm.no_such_name  # noqa: B018


def test_every_folder_of_modules_is_a_package_that_setup_finds() -> None:
    found = set(find_packages(str(ROOT), include=["cdlrm", "cdlrm.*"]))
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "cdlrm").rglob("*.py")}
    assert folders == found


def test_metadata() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for word in ('python_requires=">=3.11"', '"cdlrm = cdlrm.cli:main"', 'license="Apache-2.0"', "aarch64", "x86_64"):
        assert word in setup
    for extra in ("cuda12", "cuda13", "test", "plot", "notebook", "tensorboard", "torchrec"):
        assert f'"{extra}": [' in setup
    assert (ROOT / "cdlrm" / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_version_is_written_once_or_the_same() -> None:
    import cdlrm

    assert f'version="{cdlrm.__version__}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_no_cuda_package_shadows_nvidias() -> None:
    """`cuda/__init__.py` would shadow NVIDIA's namespace package `cuda` and break CuPy."""
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_library_does_not_print() -> None:
    for file in (ROOT / "cdlrm").rglob("*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            assert not line.lstrip().startswith("print("), f"{file.name}:{number}"


def test_a_wheel_brings_the_kernels(tmp_path: Path) -> None:
    """`cdlrm/cuda/*.cu` and `*.cuh`, no `cuda` package, and `sources` finds them there, too."""
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    for name in ("cdlrm", "cuda"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=tree, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    kernels = {file.name for file in (ROOT / "cuda").iterdir()}
    assert {file.name for file in (installed / "cdlrm" / "cuda").iterdir()} == kernels
    assert {Path(name).suffix for name in kernels} == {".cu", ".cuh"}
    assert not (installed / "cuda").exists()
    code = (
        f"import sys; sys.path[0] = {str(installed)!r}\n"
        "from cdlrm.driver import signatures, sources\n"
        "assert all(sources.source(kernel.file) for kernel in signatures.KERNELS.values())\n"
        "print(sources.folder())"
    )
    assert Path(python(code).strip()) == installed.resolve() / "cdlrm" / "cuda"
