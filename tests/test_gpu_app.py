"""Modules and the command line on the emulated GPU: memory of the tables, dtypes, checkpoints, notes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Emulated, use
from emulator.compile import compiler
from test_train import InterruptAt, small, weights

import cdlrm
from cdlrm import placement
from cdlrm.driver import cpu, pinned
from cdlrm.errors import ConfigError
from cdlrm.progress import Listener
from cdlrm.train import Trainer

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")
TABLES = [cdlrm.Table("a", 300, 8), cdlrm.Table("b", 50, 8, pooling="mean")]


def inputs(seed: int, tables: Any = TABLES, size: int = 12) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    offsets = torch.arange(size + 1) * 3
    return {t.name: (torch.from_numpy(rng.integers(0, t.num_embeddings, 3 * size)), offsets) for t in tables}


def module(**changes: Any) -> cdlrm.EmbeddingBagCollection:
    settings = {"optimizer": cdlrm.RowWiseAdagrad(lr=0.1), "cache_ratio": 0.4, "seed": 0, **changes}
    return cdlrm.EmbeddingBagCollection(settings.pop("tables", TABLES), **settings)


# --- host tables ---


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_tables_that_are_pinned_have_pages_of_their_own(monkeypatch: Any, zero_copy: bool, padded: bool) -> None:
    asked: list[int] = []
    monkeypatch.setattr("cdlrm.store.ram.host_memory", lambda n: asked.append(n) or pinned.host_memory(n))
    emulated = use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", lambda self, chosen: self._make(zero_copy=zero_copy, padded=padded))
    ebc = module()
    sizes = [4 * 350 * 16] if padded else [4 * 350 * 8, 4 * 350]
    assert asked == (sizes if zero_copy else [])
    arrays = ebc.groups[0].store.memory()
    assert [array.nbytes for array in arrays] == sizes
    if zero_copy:
        assert all(array.ctypes.data % mmap.PAGESIZE == 0 for array in arrays)
        assert any(f"{sum(sizes) / 2**30:.2f} GiB of host memory were pinned" in note for note in ebc.notes)
    backend = ebc.groups[0].driver.backend
    assert len(backend.memory.live("registered")) == len(asked)
    ebc(inputs(0)).sum().backward()
    ebc.close()
    assert not backend.memory.live("registered") and emulated.made == 1


def test_the_host_has_no_memory_for_pinned_tables(monkeypatch: Any) -> None:
    use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    with pytest.raises(ConfigError, match="host memory"):
        module(tables=[cdlrm.Table("large", 2**34, 4096)], cache_rows=10, cache_ratio=None)


@pytest.mark.parametrize("progress", [True, False])
def test_pinning_tells_how_far_it_is(monkeypatch: Any, capsys: Any, progress: bool) -> None:
    use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    monkeypatch.setattr(pinned, "BAR_SECONDS", 0.0)
    module(progress=progress).close()
    assert ("pinning the tables" in capsys.readouterr().err) == progress


# --- outputs of 16 bits ---


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_once(monkeypatch: Any, emulate: bool, dtype: torch.dtype) -> None:
    """The rows, and so every later output, are as with float32 outputs that are rounded outside."""
    if emulate:
        use(monkeypatch, first=3)
    exact, rounded = module(), module(output_dtype=dtype)
    for seed in range(4):
        out, expected = rounded(inputs(seed)), exact(inputs(seed)).to(dtype)
        assert out.dtype == dtype and torch.equal(out, expected)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        out.backward(grad)
        expected.backward(grad)
        with torch.no_grad():
            assert torch.equal(rounded(inputs(seed)), exact(inputs(seed)).to(dtype))
    for name, value in exact.state_dict().items():
        assert torch.equal(rounded.state_dict()[name], value) and value.dtype == torch.float32
    exact.close(), rounded.close()


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float64, torch.int32, "bfloat16", None):
        with pytest.raises(ConfigError, match=r"output_dtype=.*torch.float32, torch.bfloat16, torch.float16\."):
            module(output_dtype=dtype)


# --- the device of a module ---


class Asked:
    """What device modules asked for; all are on the CPU."""

    def __init__(self, monkeypatch: Any) -> None:
        self.devices: list[Any] = []
        for where in ("replace", "bag", "embedding"):
            monkeypatch.setattr(f"cdlrm.{where}.choose_driver", self.choose)

    def choose(self, device: Any, progress: bool = True) -> Any:
        self.devices.append(device)
        return cpu.CpuDriver()


def test_the_device_that_is_asked_for(monkeypatch: Any) -> None:
    asked, gpu = Asked(monkeypatch), torch.device("cuda", 1)
    module(device="cuda")
    cdlrm.EmbeddingBag(10, 4, device=gpu, optimizer=cdlrm.SGD(lr=0.1))
    cdlrm.Embedding(10, 4, device="cuda:0", optimizer=cdlrm.SGD(lr=0.1))
    assert asked.devices == ["cuda", gpu, "cuda:0"]


def test_a_model_that_is_replaced_keeps_its_device(monkeypatch: Any) -> None:
    asked = Asked(monkeypatch)
    spec = cdlrm.SGD(lr=0.1)
    for device, expected in (("auto", torch.device("cpu")), ("cpu", "cpu"), ("cuda", "cuda")):
        model = torch.nn.ModuleDict({"a": torch.nn.Embedding(5, 4), "b": torch.nn.EmbeddingBag(5, 4)})
        done = cdlrm.replace_embeddings(model, optimizer=spec, device=device)
        assert asked.devices[-1] == expected
        assert done.modules["a"]._settings["device"] == expected  # a copy goes there, too
        done.undo()
        assert model["a"].weight.shape == (5, 4) and model["a"].weight.device.type == "cpu"


def test_rows_on_several_devices_are_refused() -> None:
    from types import SimpleNamespace

    from cdlrm.replace import _home

    gpus = [SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda", number))) for number in range(2)]
    found = {"a": gpus[0], "b": gpus[1]}
    assert _home({"a": found["a"]}) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="'a' are on cuda:0 and those of 'b' on cuda:1"):
        _home(found)


def test_moving_a_module_to_where_it_is_changes_nothing(monkeypatch: Any) -> None:
    """All memory on a GPU counts as shared between processes; that must not read as a wish to share."""
    ebc = module()
    elsewhere = torch.device("meta")
    monkeypatch.setattr(ebc.groups[0].driver, "device", elsewhere, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_shared", lambda tensor: True)
    assert ebc.to(elsewhere) is ebc and ebc.float() is ebc
    with pytest.raises(cdlrm.UsageError, match="lives on meta and cannot move"):
        ebc.to("cpu")


# --- checkpoints between devices ---


@pytest.mark.parametrize("optimizer", ["rowwise-adagrad", "adam"])
@pytest.mark.parametrize("first_emulated", [True, False])
def test_a_run_goes_on_on_the_other_device(
    monkeypatch: Any, tmp_path: Any, first_emulated: bool, optimizer: str
) -> None:
    """Saved on one device and resumed on the other, in one process: the bits of a run without a stop."""
    settings = {"metrics": False, "optimizer": optimizer, "dense_optimizer": "adam", "num_batches": 6}
    with Trainer(small(**settings)) as whole:
        whole.run()
        expected = weights(whole)
    for number, listener in enumerate((InterruptAt(3), Listener())):
        with monkeypatch.context() as patch:
            if first_emulated == (number == 0):
                use(patch)
            config = small(**settings, checkpoint_dir=str(tmp_path), resume=number == 1)
            with Trainer(config, listener) as trainer:
                report = trainer.run()
                found = weights(trainer)
                kind = trainer.tables.groups[0].driver.name
        assert report["training"]["steps"] == 3 * (number + 1)
        assert kind == ("emulated" if first_emulated == (number == 0) else "cpu")
        assert any(note.startswith("device: cpu") for note in report["chosen"])
    assert found == expected


def test_waits_of_the_run_are_counted(monkeypatch: Any) -> None:
    """Where a step's loss and gradient are looked at, and where the loss is logged."""
    use(monkeypatch)
    with Trainer(small(metrics=False, num_batches=6, print_freq=2)) as trainer:
        report = trainer.run()
        waits = trainer.tables.groups[0].driver.backend.traffic.synchronizations
        assert waits["finite"] == 2 * report["training"]["steps"] == 12
        assert waits["logging"] == 3


# --- cache_rows="auto" ---


@pytest.mark.parametrize("missing", [0, 9])
def test_resident_when_it_fits_and_a_cache_otherwise(monkeypatch: Any, missing: int) -> None:
    """Of the device's free bytes a stated share is left to everything else."""
    tables, count = [cdlrm.Table("a", 400_000, 8)], 400_000
    need, flags = count * 4 * 9, 4 * 4097  # bytes of the records, and of the driver
    room = int(need / (1 - placement.RESERVE)) + 2 + flags - missing
    use(monkeypatch, device_bytes=room)
    ebc = module(tables=tables, cache_rows="auto", cache_ratio=None)
    resident, rows = ebc.groups[0].resident, ebc.stats()["cache_rows"]
    assert resident == (missing == 0) and (rows == count if resident else 0.9 * count < rows < count)
    (note,) = [note for note in ebc.notes if note.startswith("cache_rows=auto")]
    assert ("everything is resident" if resident else f"{rows} of {count} rows are cached") in note
    assert "GiB of records" in note and "GiB of emulated memory available" in note and "25% reserved" in note
    ebc(inputs(0, tables)).sum().backward()
    ebc.close()


@pytest.mark.parametrize("store", ["ram", "file"])
def test_an_evaluation_before_training_needs_no_second_cache(monkeypatch: Any, tmp_path: Any, store: str) -> None:
    """Rows that are only read are gathered apart."""
    tables = [cdlrm.Table("a", 4000, 16)]
    record, slots, flags = 4 * 17, 1000, 4 * 4097
    use(monkeypatch, device_bytes=int(1.5 * record * slots) + flags + 250_000)
    where = {"store": "ram" if store == "ram" else f"file:{tmp_path}"}
    ebc = module(tables=tables, cache_rows=slots, cache_ratio=None, **where)
    backend = ebc.groups[0].driver.backend
    before = backend.memory.device.now()
    with torch.no_grad():
        expected = module(tables=tables, device="cpu")(inputs(0, tables, 60))
        assert torch.equal(ebc(inputs(0, tables, 60)), expected)
    assert ebc.groups[0].cache.slot_row.size == ebc.groups[0].records.rows == slots
    assert backend.most_bytes()[0] < before + record * slots
    ebc(inputs(1, tables, 60)).sum().backward()
    ebc.check()
    ebc.close()


def test_no_room_to_grow_an_empty_cache_leaves_it_as_it_was(monkeypatch: Any) -> None:
    use(monkeypatch)
    ebc = module()
    backend, records = ebc.groups[0].driver.backend, ebc.groups[0].records
    rows = records.rows
    backend.fail_at("alloc", 2)  # the first gives the old places back
    with pytest.raises(cdlrm.DeviceMemoryError, match="growth of the cache"):
        records.resize(2 * rows, ())
    assert records.rows == rows and records.places.weight.nbytes == 4 * 8 * rows
    ebc(inputs(1)).sum().backward()
    ebc.check()
    ebc.close()
