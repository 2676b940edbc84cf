"""Fixtures of all tests: a hang guard around each one, and the switch for long campaigns."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# torch's OpenMP threads spin while they wait, which on a machine of two cores is most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# numba knows a kernel's own file only, not the files of what it calls: a cache for each state of the sources.
_sources = hashlib.sha1(usedforsecurity=False)
for _path in sorted((Path(__file__).resolve().parent.parent / "cdlrm").rglob("*.py")):
    _sources.update(_path.read_bytes())
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"cdlrm-numba-{_sources.hexdigest()[:16]}"))

# Tests of Ctrl-C need it; a script that starts pytest in the background has it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

DEFAULT_LIMIT_SECONDS = 120.0
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="also run the tests marked `long`")
    parser.addoption("--emulated", action="store_true", help="run every test on the emulated GPU instead of the CPU")
    parser.addoption("--seed-offset", type=int, default=0, help="first seed of the emulated streams")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--run-long") and config.option.markexpr == "not long":  # the default of pyproject.toml
        config.option.markexpr = ""
    config.addinivalue_line("markers", "limit(seconds): hard limit of one test (default 120 s)")
    # The guard must still be able to write when pytest has redirected stderr.
    config.stash[_STDERR] = os.fdopen(os.dup(sys.__stderr__.fileno()), "w") if sys.__stderr__ else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


_STDERR: pytest.StashKey = pytest.StashKey()


@pytest.fixture(autouse=True)
def hang_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the whole run with all stacks when a test exceeds its limit: a hang must not wait for a person."""
    marker = request.node.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else DEFAULT_LIMIT_SECONDS
    if "long" in request.keywords:
        seconds = 3600.0
    stream = request.config.stash[_STDERR]
    if stream is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=stream)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def device_of_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With --emulated, every module that a test makes is on the emulated GPU."""
    if request.config.getoption("--emulated"):
        from emulated import use

        first = int(hashlib.sha1(request.node.nodeid.encode(), usedforsecurity=False).hexdigest()[:8], 16)
        use(monkeypatch, first + request.config.getoption("--seed-offset"))
    before = _drivers_made()
    yield
    request.node.user_properties.append((SEEDS, _drivers_made() - before))


SEEDS = "emulated seeds"


def _drivers_made() -> int:
    return int(getattr(sys.modules.get("emulated"), "drivers_made", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many modules were on the emulated GPU, each under an order of the streams of its own."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    ended = [report for report in reports if getattr(report, "when", "") == "teardown"]
    seeds = sum(count for report in ended for name, count in report.user_properties if name == SEEDS)
    if seeds:
        terminalreporter.write_line(f"{seeds:,} seeds: modules on the emulated GPU, each with its order of the streams")


def find_data_dir() -> Path | None:
    """The folder of real data: $CDLRM_DATA, or ../shared/data beside the project."""
    named = os.environ.get("CDLRM_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    return path if path.is_dir() else None


@pytest.fixture(scope="session")
def data_dir() -> Path:
    path = find_data_dir()
    if path is None:
        pytest.skip("no real data: neither $CDLRM_DATA nor ../shared/data beside the project is a folder")
    return path
