"""Tables beyond memory: our file store and cache against `nn.EmbeddingBag` over a memory-mapped file.

One table of 4x the memory limit, dim 64, SGD, Zipf 1.05, batches of 2048 x 26 ids; every row is in the file.

The limit.  Ours keeps everything it needs for the table (cache slots, planner, bits) below it, reads and
writes past the page cache (O_DIRECT), and reports its growth.  The rival's share of the page cache cannot be
limited without a cgroup of its own, so this script plays the kernel, in the rival's favour: after each step,
off the clock, the pages of the map beyond the limit are dropped in exact LRU order, and the write-back of
dirty pages (which a real limit would charge to the rival) is not timed.  The rival starts with the most
popular pages in memory.  It is timed as torch and NumPy leave it (`plain`: the ratio is against this one) and,
for information, with a hand-tuned `madvise(MADV_RANDOM)`, with and without its write-back.

Both train the same batches in turns; the first steps of each of our turns, which the look-ahead may have
prepared during the rival's turn, are not counted.  `--cgroup DIR` instead joins an existing memory cgroup
(v1 or v2) that has its own limit; nothing is dropped by hand then.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import cdlrm

DIM = 64
SAMPLES, IDS = 2048, 26
PAGE = mmap.PAGESIZE
LR = 0.01
SKIP = 3  # steps of a turn of ours that may have been prepared before
RESULTS = Path(__file__).resolve().parent / "results" / "file_store.jsonl"


def zipf_batches(rows: int, count: int, exponent: float) -> np.ndarray:
    """Ids int64 [count, SAMPLES * IDS]; popular ids are scattered over the table."""
    rng = np.random.default_rng(0)
    cdf = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    rank = np.searchsorted(cdf, rng.random((count, SAMPLES * IDS)) * cdf[-1]).astype(np.int64)
    return rank * 387_420_489 % rows  # a multiplier coprime to `rows` permutes


class PageLimit:
    """Keeps at most `pages` pages of a mapped file in memory: exact LRU, off the clock."""

    def __init__(self, mapped: np.memmap, path: Path, pages: int) -> None:
        self.map, self.pages = mapped._mmap, pages
        self.address, self.size = mapped.ctypes.data, mapped.nbytes
        self.fd = os.open(path, os.O_RDWR)
        self.used = np.full(-(-self.size // PAGE), -1, np.int64)
        self.resident = np.zeros(self.used.size, np.uint8)
        self.clock = 0
        self._mincore = ctypes.CDLL(None, use_errno=True).mincore
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def touch(self, ids: np.ndarray) -> None:
        self.clock += 1
        self.used[ids * (4 * DIM) // PAGE] = self.clock

    def count(self) -> int:
        if self._mincore(self.address, self.size, self.resident.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((self.resident & 1).sum())

    def enforce(self) -> float:
        """Write dirty pages (returns the seconds of it) and drop the least recently used ones beyond the limit."""
        started = time.perf_counter()
        os.fdatasync(self.fd)
        seconds = time.perf_counter() - started
        excess = self.count() - self.pages
        if excess > 0:
            pages = np.flatnonzero(self.resident & 1)
            victims = np.sort(pages[np.argpartition(self.used[pages], excess - 1)[:excess]])
            cuts = np.flatnonzero(np.diff(victims) != 1) + 1
            starts, stops = victims[np.r_[0, cuts]], victims[np.r_[cuts - 1, victims.size - 1]] + 1
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                self.map.madvise(mmap.MADV_DONTNEED, start * PAGE, (stop - start) * PAGE)
                os.posix_fadvise(self.fd, start * PAGE, (stop - start) * PAGE, os.POSIX_FADV_DONTNEED)
        return seconds

    def warm(self, popular: np.ndarray) -> None:
        """Have the pages `popular` (best first) in memory, as many as the limit allows."""
        for page in np.sort(popular[: self.pages]).tolist():
            os.posix_fadvise(self.fd, page * PAGE, PAGE, os.POSIX_FADV_WILLNEED)
        self.used[popular[: self.pages]] = 0

    def drop_all(self) -> None:
        """Leave no page of the file in memory (another map of it may follow)."""
        os.fdatasync(self.fd)
        self.map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Rival:
    """`nn.EmbeddingBag(sparse=True)` over `np.memmap`, with torch's SGD."""

    def __init__(self, path: Path, rows: int, limit: int, random: bool, enforced: bool) -> None:
        mapped = np.memmap(path, np.float32, "r+", shape=(rows, DIM))
        if random:
            mapped._mmap.madvise(mmap.MADV_RANDOM)
        self.bag = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=torch.from_numpy(mapped))
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=LR)
        self.limit = PageLimit(mapped, path, limit // PAGE) if enforced else None
        self.seconds: list[float] = []
        self.writeback: list[float] = []

    def step(self, ids: np.ndarray) -> None:
        values = torch.from_numpy(ids).view(SAMPLES, IDS)
        started = time.perf_counter()
        self.bag(values).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        if self.limit:
            self.limit.touch(ids)
            self.writeback.append(self.limit.enforce())


class Ours:
    """`EmbeddingBagCollection(store="file:DIR")` under a look-ahead."""

    def __init__(self, folder: Path, rows: int, cache_rows: int, batches: np.ndarray, horizon: int) -> None:
        before = resident_bytes()
        self.module = cdlrm.EmbeddingBagCollection(
            [cdlrm.Table("t", rows, DIM)], optimizer=cdlrm.SGD(lr=LR), cache_rows=cache_rows, store=f"file:{folder}",
            device="cpu",
        )
        self.ahead = cdlrm.lookahead(self.module, self._loader(batches), horizon=horizon)
        self.growth_bytes = -before
        self.seconds: list[float] = []

    @staticmethod
    def _loader(batches: np.ndarray) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        offsets = torch.arange(0, SAMPLES * IDS + 1, IDS)
        for ids in batches:
            yield {"t": (torch.from_numpy(ids), offsets)}

    def turn(self, steps: int) -> None:
        """`steps` steps; all but the first few are timed, each from one end to the next."""
        for i in range(steps):
            started = time.perf_counter()
            self.module(next(self.ahead)).sum().backward()
            if i >= SKIP:
                self.seconds.append(time.perf_counter() - started)


def resident_bytes() -> int:
    """Memory of this process that is not a file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def fill(folder: Path, plain: Path, rows: int) -> None:
    """Both files hold every row (the same values)."""
    values = np.random.default_rng(1).random((1 << 18, DIM), np.float32)
    module = cdlrm.EmbeddingBagCollection(
        [cdlrm.Table("t", rows, DIM)], optimizer=cdlrm.SGD(lr=LR), cache_rows=1, store=f"file:{folder}"
    )
    with open(plain, "wb") as file:
        for lo in range(0, rows, len(values)):
            part = values[: min(len(values), rows - lo)]
            module.groups[0].store.put(lo, part, None)
            file.write(part.data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    module.close()


def popular_pages(batches: np.ndarray, rows: int) -> np.ndarray:
    """Pages by number of lookups in `batches`, most first."""
    counts = np.bincount(batches.reshape(-1) * (4 * DIM) // PAGE, minlength=-(-rows * 4 * DIM // PAGE))
    return np.argsort(-counts, kind="stable")


def machine() -> dict[str, object]:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = f"{names[0]} x{len(names)}" if names else platform.machine()
    return {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpu": cpu}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    limit = args.limit_mib << 20
    rows = 4 * limit // (4 * DIM)
    cache_rows = int(limit * args.cache_share) // (4 * DIM)
    plain = folder / "plain.rows"
    fill(folder / "store", plain, rows)
    batches = zipf_batches(rows, args.warm + args.turns * args.steps + 2 * args.horizon, 1.05)
    enforced = args.cgroup is None
    if args.cgroup:
        (Path(args.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    ours = Ours(folder / "store", rows, cache_rows, batches, args.horizon)
    ours.turn(args.warm)
    ours.growth_bytes += resident_bytes()
    ours.seconds.clear()
    warmed = ours.module.stats()
    rivals = {name: Rival(plain, rows, limit, name == "random", enforced) for name in ("random", "plain")}
    popular = popular_pages(batches[: args.warm], rows)
    at = args.warm
    for _ in range(args.turns):
        ours.turn(args.steps)
        for rival in rivals.values():
            if rival.limit:
                rival.limit.warm(popular)
            for ids in batches[at : at + args.rival_steps + 1]:
                rival.step(ids)
            if rival.limit:
                rival.limit.drop_all()
            rival.seconds.pop(-args.rival_steps - 1)  # its first step of a turn brings what was dropped
        at += args.steps
    stats = ours.module.stats()
    timed = args.turns * args.steps
    ours.ahead.close()
    ours.module.close()
    medians = {name: float(np.median(rival.seconds)) for name, rival in rivals.items()}
    mine = float(np.median(ours.seconds))
    writeback = {name: float(np.median(rival.writeback or [0.0])) for name, rival in rivals.items()}
    return {
        "bench": "file_store", "rows": rows, "dim": DIM, "limit_mib": args.limit_mib, "cache_rows": cache_rows,
        "limit_by": "cgroup" if args.cgroup else "O_DIRECT / exact page LRU",
        "batch": SAMPLES, "ids": IDS, "zipf": 1.05, "horizon": args.horizon, "ours_growth_mib": ours.growth_bytes >> 20,
        "fills_per_step": round((stats["fills"] - warmed["fills"]) / timed),
        "written_per_step": round((stats["evicts_written"] - warmed["evicts_written"]) / timed),
        "transfer_ms_per_step": round(1e3 * (stats["seconds_transfer"] - warmed["seconds_transfer"]) / timed, 1),
        "ours_ms_median": round(1e3 * mine, 1), "ours_ms_mean": round(1e3 * float(np.mean(ours.seconds)), 1),
        "rival_random_ms_median": round(1e3 * medians["random"], 1),
        "rival_plain_ms_median": round(1e3 * medians["plain"], 1),
        "rival_plain_writeback_ms_untimed": round(1e3 * writeback["plain"], 1),
        "rival_random_writeback_ms_untimed": round(1e3 * writeback["random"], 1),
        "ratio_median": round(medians["plain"] / mine, 2),
        "ratio_of_means": round(float(np.mean(rivals["plain"].seconds)) / float(np.mean(ours.seconds)), 2),
        "ratio_tuned_rival": round(medians["random"] / mine, 2),
        "ratio_tuned_rival_with_writeback": round((medians["random"] + writeback["random"]) / mine, 2),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--cache-share", type=float, default=0.5, help="of the limit; the rest is metadata")
    parser.add_argument("--warm", type=int, default=150, help="steps before the clock starts")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="steps of ours in a turn")
    parser.add_argument("--rival-steps", type=int, default=2, help="timed steps of each rival in a turn")
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--cgroup", default=None)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cdlrm-bench-", dir=args.dir))
    try:
        result = machine() | measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = json.dumps(result)
    print(line)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
