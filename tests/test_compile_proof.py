"""Every kernel compiles for every architecture with CuPy's compilers, without spills and without contraction."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import compile_proof  # noqa: E402
from compile_proof import REPORT, TARGETS, Usage, compile_text, inexact, library, resources  # noqa: E402

from cdlrm.driver import signatures  # noqa: E402
from cdlrm.driver.sources import OPTIONS  # noqa: E402

MISSING = [package for name, (package, _) in compile_proof.COMPILERS.items() if library(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"NVRTC is not installed: pip install {' '.join(MISSING)}"),
    pytest.mark.limit(1800),  # two minutes of one core's work, which others may want too
]

SPILLS = """
extern "C" __global__ void spills(float* values, const int* order) {
    float kept[64];
    for (int i = 0; i < 64; ++i) kept[i] = values[i];
    for (int i = 0; i < 64; ++i) kept[order[i] & 63] += kept[i];
    values[0] = kept[order[64] & 63];
}"""
CONTRACTS = 'extern "C" __global__ void contracts(float* v) { v[0] = v[1] * v[2] + v[3]; v[4] = v[5] / v[6]; }'


@pytest.fixture(scope="module")
def usages() -> list[Usage]:
    return compile_proof.prove(jobs=2)


def test_every_kernel_in_every_variant_compiles_for_every_architecture(usages: list[Usage]) -> None:
    expected = {
        (compiler, arch, signatures.expression(kernel.name, variant))
        for compiler, arch in TARGETS for kernel in signatures.KERNELS.values() for variant in kernel.variants
    }  # fmt: skip
    assert {arch for _, arch in TARGETS} == {70, 75, 80, 86, 89, 90, 100, 120}
    assert {(usage.compiler, usage.arch, usage.variant) for usage in usages} == expected
    assert len(usages) == len(expected)


def test_no_kernel_spills_or_uses_local_memory(usages: list[Usage], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():  # the registers of each kernel belong in CI's log
        print("\n" + "\n".join(compile_proof.summary(usages)))
    assert [usage for usage in usages if usage.stack_bytes or usage.spill_bytes] == []


def test_no_kernel_contracts_or_approximates(usages: list[Usage]) -> None:
    assert [usage for usage in usages if usage.inexact] == []


@pytest.mark.parametrize(("compiler", "arch"), [TARGETS[0], TARGETS[-1]])
def test_local_memory_would_be_seen(compiler: str, arch: int) -> None:
    out = compile_text(compiler, arch, SPILLS, [], (*OPTIONS, *REPORT))
    assert resources(out.log)["spills"][1] >= 256
    contracts = compile_text(compiler, arch, CONTRACTS, [], (*OPTIONS, *REPORT))
    assert resources(contracts.log)["contracts"][1:] == (0, 0)


@pytest.mark.parametrize(("compiler", "arch"), [TARGETS[0], TARGETS[-1]])
def test_a_contraction_would_be_seen(compiler: str, arch: int) -> None:
    """With our options there is none; without them there is; and fast-math is seen in divisions."""
    ours = compile_text(compiler, arch, CONTRACTS, [], OPTIONS)
    assert inexact(ours.ptx) == {"contracts": ()}
    default = compile_text(compiler, arch, CONTRACTS, [], [])
    assert inexact(default.ptx) == {"contracts": ("fma.rn.f32",)}
    fast = compile_text(compiler, arch, CONTRACTS, [], ["--use_fast_math"])
    assert "div.approx.ftz.f32" in inexact(fast.ptx)["contracts"]


def test_a_contraction_in_a_function_that_is_not_inlined_would_be_seen() -> None:
    text = "__noinline__ __device__ float f(float a, float b) { return a * b + a; }" + CONTRACTS.replace(
        "v[1] * v[2] + v[3]", "f(v[1], v[2])"
    )
    assert inexact(compile_text("cuda13", 90, text, [], []).ptx) == {"contracts": ("fma.rn.f32",)}
    assert inexact(compile_text("cuda13", 90, text, [], OPTIONS).ptx) == {"contracts": ()}


def test_a_text_that_does_not_compile_is_told_with_its_log() -> None:
    with pytest.raises(compile_proof.CompileError, match="identifier \"nonsense\" is undefined"):
        compile_text("cuda13", 90, "__global__ void k() { nonsense(); }", [], OPTIONS)
