"""The choice of the device, its reason in one sentence, and what `cdlrm info` says about GPUs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cdlrm import machine
from cdlrm.driver.choose import choose, cupy_obstacle, extra
from cdlrm.errors import ConfigError


class Machine:
    """A pretended machine: torch's CUDA build, its GPUs by compute capability, and CuPy or what importing it raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.imported = 0
        monkeypatch.setattr(importlib, "import_module", self._import)
        self.set()

    def set(
        self, cuda: str | None = "13.0", gpus: tuple[tuple[int, int], ...] = ((9, 0), (8, 6)), cupy: Any = None,
        current: int = 0, driver: RuntimeError | None = None, nvrtc: Exception | None = None, hip: str | None = None,
    ) -> None:  # fmt: skip
        def give(value: Any, error: Exception | None) -> Any:
            if error is not None:
                raise error
            return value

        working = SimpleNamespace(
            __version__="14.2.0",
            cuda=SimpleNamespace(
                runtime=SimpleNamespace(getDeviceCount=lambda: give(len(gpus), driver)),
                nvrtc=SimpleNamespace(getVersion=lambda: give((13, 0), nvrtc)),
            ),
        )
        self.cupy = working if cupy is None else cupy
        self.patch.setattr(torch.version, "cuda", cuda)
        self.patch.setattr(torch.version, "hip", hip, raising=False)
        for name, value in {
            "is_available": lambda: bool(cuda and gpus),
            "device_count": lambda: len(gpus),
            "current_device": lambda: current,
            "get_device_capability": lambda index: gpus[index],
            "get_device_name": lambda index: f"GPU number {index}",
            "get_device_properties": lambda index: SimpleNamespace(
                name=f"GPU number {index}", total_memory=80 << 30, major=gpus[index][0], minor=gpus[index][1]
            ),
        }.items():
            self.patch.setattr(torch.cuda, name, value)

    def _import(self, name: str, package: str | None = None) -> Any:
        assert name == "cupy"
        self.imported += 1
        if isinstance(self.cupy, Exception):
            raise self.cupy
        return self.cupy


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_gpu_that_works_is_chosen(pretended: Machine) -> None:
    assert choose("auto") == ("cuda", 0, "device: cuda:0 (GPU number 0), because torch and CuPy can use it.")
    assert choose("cuda") == ("cuda", 0, "device: cuda:0 (GPU number 0), asked for.")
    assert choose("cuda:1")[:2] == choose(torch.device("cuda", 1))[:2] == ("cuda", 1)
    pretended.set(current=1)
    assert choose("auto")[:2] == choose("cuda")[:2] == ("cuda", 1)


def test_the_cpu_needs_no_cupy(pretended: Machine) -> None:
    assert choose("cpu") == choose(torch.device("cpu")) == ("cpu", None, "device: cpu, asked for.")
    assert choose(None) == ("cpu", None, "device: cpu, torch's default device.")
    pretended.set(gpus=())
    choose("auto")
    pretended.set(cuda=None)
    choose("auto")
    assert pretended.imported == 0


def test_none_is_torchs_default_device(pretended: Machine) -> None:
    with torch.device("cuda:1"):
        assert choose(None) == ("cuda", 1, "device: cuda:1 (GPU number 1), torch's default device.")


NO_CUPY = ModuleNotFoundError("No module named 'cupy'", name="cupy")
OBSTACLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a CPU build": ({"cuda": None}, ("built without CUDA", torch.__version__, "install a CUDA build")),
    "ROCm": ({"cuda": None, "hip": "6.4"}, ("ROCm", "NVIDIA")),
    "no GPU": ({"gpus": ()}, ("CUDA 13.0", "no GPU", "nvidia-smi", "CUDA_VISIBLE_DEVICES")),
    "an old GPU": ({"gpus": ((6, 1),)}, ("GPU number 0", "compute capability 6.1", "7.0")),
    "no CuPy, CUDA 13": ({"cupy": NO_CUPY}, ("CuPy is not installed", "'cdlrm[cuda13]'")),
    "no CuPy, CUDA 12": ({"cuda": "12.8", "cupy": NO_CUPY}, ("CuPy is not installed", "'cdlrm[cuda12]'")),
    "a broken CuPy": (
        {"cupy": ImportError("libcublas.so.12: cannot open\nsee the manual")},
        ("cannot be imported", "libcublas.so.12", "'cdlrm[cuda13]'"),
    ),
    "a module that CuPy lacks": (
        {"cupy": ModuleNotFoundError("No module named 'numpy.core'", name="numpy.core")},
        ("cannot be imported", "numpy.core"),
    ),
    "an old driver": (
        {"driver": RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient.")},
        ("CuPy 14.2.0 does not work with this driver", "cudaErrorInsufficientDriver"),
    ),
    "no NVRTC": ({"nvrtc": RuntimeError('Failure finding "libnvrtc.so.13"')}, ("NVRTC", "libnvrtc", "'cdlrm[cuda13]'")),
    "no NVRTC, silent": ({"nvrtc": OSError()}, ("NVRTC", "OSError")),
}


@pytest.mark.parametrize("name", list(OBSTACLES))
def test_every_obstacle_is_one_sentence_with_a_remedy(pretended: Machine, name: str) -> None:
    settings, words = OBSTACLES[name]
    pretended.set(**settings)
    found = choose("auto")
    assert found.kind == "cpu" and found.gpu is None
    with pytest.raises(ConfigError) as caught:
        choose("cuda")
    assert 'or use "cpu" or "auto"' in str(caught.value) and "device='cuda'" in str(caught.value)
    for text in (found.reason, str(caught.value)):
        assert "\n" not in text and text.endswith(".") and ".." not in text
        for word in words:
            assert word in text


def test_a_gpu_that_is_not_there(pretended: Machine) -> None:
    with pytest.raises(ConfigError, match="no GPU 2: torch sees 2"):
        choose("cuda:2")


@pytest.mark.parametrize("device", ["tpu", "meta", "mps", "", "cuda:x", torch.device("meta"), 1.5])
def test_what_is_no_device(pretended: Machine, device: Any) -> None:
    with pytest.raises(ConfigError, match='must be "auto", "cpu", "cuda" or "cuda:N"') as caught:
        choose(device)
    assert str(device) in str(caught.value)


def test_the_extra_follows_torchs_cuda(pretended: Machine) -> None:
    expected = {"12.6": "cuda12", "12.9": "cuda12", "13.0": "cuda13", "13.2": "cuda13", None: "cuda13"}
    for cuda, name in expected.items():
        pretended.set(cuda=cuda)
        assert extra() == name


def test_here_cupy_is_what_it_is() -> None:
    """The real machine: no fake, whatever it has."""
    text = cupy_obstacle()
    assert text is None or "pip install 'cdlrm[cuda1" in text
    assert choose("auto").reason.endswith(".")


# --- cdlrm info ---


def test_info_with_a_gpu(pretended: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: "14.2.0" if name == "cupy-cuda13x" else "1.0")
    facts = machine.describe()
    assert facts["device"] == "cuda:0" and facts["drivers"]["cuda"] == "kernels through cupy-cuda13x 14.2.0"
    assert [(each["device"], each["used"]) for each in facts["devices"]] == [
        ("cpu", False), ("cuda:0", True), ("cuda:1", False),
    ]  # fmt: skip
    assert "Compiled kernels are kept in " in facts["notes"][0]
    text = machine.render_info(facts)
    assert "cuda:1        GPU number 1, 80.0 GiB, compute capability 8.6" in text
    assert "device        cuda:0" in text and "because torch and CuPy can use it." in text
    assert not [each for each in facts["missing"] if each["package"] == "cupy"]


@pytest.mark.parametrize(("cuda", "name"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_info_names_the_extra_that_is_missing(
    pretended: Machine, monkeypatch: pytest.MonkeyPatch, cuda: str, name: str
) -> None:
    pretended.set(cuda=cuda, cupy=NO_CUPY)
    monkeypatch.setattr(machine, "package_version", lambda package: None if package.startswith("cupy") else "1.0")
    facts = machine.describe()
    assert facts["device"] == "cpu" and facts["drivers"]["cuda"] == "not usable"
    assert {"package": "cupy", "extra": name, "for": "GPUs"} in facts["missing"]
    assert f"missing: cupy, for GPUs; pip install 'cdlrm[{name}]'" in machine.render_info(facts)
    assert f"CuPy is not installed; pip install 'cdlrm[{name}]'" in machine.render_info(facts)


def test_info_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cdlrm.driver.choose", None)
    assert machine._chosen() == ("cpu", "not usable", "device: cpu, because torch cannot be imported.", "cuda13")
