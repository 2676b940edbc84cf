"""Kernels compiled by NVRTC and kept on disk: NVRTC faked, and CuPy's where it is installed (no GPU needed)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda, pretend_cuda

from cdlrm.driver import cubin, signatures
from cdlrm.errors import CompileError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    return pretend_cuda(monkeypatch, tmp_path)


def test_kernels_are_kept_and_compiled_anew_when_anything_changes(cuda: FakeCuda) -> None:
    nvrtc = cuda.nvrtc
    first = cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90)
    assert first == ("_Zk<1>", b"\0cubin\nk<1>")
    assert cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90) == first and len(nvrtc.compiled) == 1
    assert len(list(cubin.cache_dir().iterdir())) == 1
    cubin.load_code(nvrtc, "other text", "x.cu", "k<1>", 90)
    cubin.load_code(nvrtc, "text", "x.cu", "k<2>", 90)
    cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 75)
    nvrtc.version = (13, 1)
    cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90)
    assert len(nvrtc.compiled) == 5 and len(list(cubin.cache_dir().iterdir())) == 5


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:70] + b"?" + data[71:]]
)
def test_a_damaged_file_is_compiled_anew(cuda: FakeCuda, damage: Any) -> None:
    first = cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90)
    (file,) = cubin.cache_dir().iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90) == first
    assert len(cuda.nvrtc.compiled) == 2 and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_time_only(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CDLRM_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with caplog.at_level(logging.WARNING, "cdlrm"):
        assert cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90).symbol == "_Zk<1>"
    assert "CDLRM_CACHE_DIR" in caplog.text


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDLRM_CACHE_DIR", "/a")
    assert cubin.cache_dir() == Path("/a")
    monkeypatch.delenv("CDLRM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cubin.cache_dir() == Path("/b/cdlrm/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cubin.cache_dir() == Path.home() / ".cache/cdlrm/kernels"


def test_architectures(cuda: FakeCuda) -> None:
    nvrtc = cuda.nvrtc
    assert cubin.architecture(nvrtc, 90) == ("--gpu-architecture=sm_90", True)
    assert cubin.architecture(nvrtc, 103) == ("--gpu-architecture=compute_90", False)
    assert cubin.compile_code(nvrtc, "text", "x.cu", "k<1>", 121).image == b"ptx k<1>"
    with pytest.raises(CompileError) as caught:
        cubin.architecture(nvrtc, 70)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    assert "NVRTC 13.0" in text and "7.5 and higher" in text and "has 7.0" in text and "cuda12" in text


def real_nvrtc() -> Any:
    """CuPy's binding, which needs no GPU."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    return cupy.cuda.nvrtc


def test_cupys_nvrtc_compiles_every_kernel_without_a_gpu() -> None:
    from cdlrm.driver.sources import source

    nvrtc = real_nvrtc()
    for name, kernel in signatures.KERNELS.items():
        expression = signatures.expression(name, kernel.variants[0])
        code = cubin.compile_code(nvrtc, source(kernel.file), kernel.file, expression, 90)
        assert kernel.function in code.symbol and code.image.startswith(b"\x7fELF")


def test_options_keep_subnormal_numbers_and_contract_nothing() -> None:
    nvrtc = real_nvrtc()
    text = "__global__ void k(float* a, float b, float c) { a[0] = a[0] * b + c; a[1] = a[1] / b; a[2] = sqrtf(a[2]); }"
    newest = max(int(arch) for arch in nvrtc.getSupportedArchs())
    ptx = cubin.compile_code(nvrtc, text, "k.cu", "k", newest + 1).image.decode()
    assert ".ftz" not in ptx and "fma" not in ptx and ".approx" not in ptx
    for instruction in ("mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"):
        assert instruction in ptx
    with pytest.raises(CompileError, match="oops"):
        cubin.compile_code(nvrtc, "__global__ void k() { oops; }", "k.cu", "k", 90)
