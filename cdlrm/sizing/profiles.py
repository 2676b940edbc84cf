"""Profiles of machines: what a GPU and its link can do, from data sheets and measurements; or this machine, measured.

Every figure that is not exact has its source in `sources`.  GPU profiles carry a host that is *assumed*
(`cores`, `host_memory_bytes`, its rates): override it by `--cores` and `--host-memory`, or measure with
`cdlrm calibrate` on the host.  Shares marked "estimate" were not measured by us on that GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from .work import units_by_stage

GB = 10**9
FORMAT = 1
BUSY = 1.3
"""A spread of repeats above which a profile is doubted: on an idle machine it is below 1.1 or so (estimate)."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """One machine.  Rates are decimal (GB/s = 1e9 bytes a second).

    `device_random_share`: of the device's bandwidth that rows at random places reach; `dense_share`: of the peak that
    the matrix products of DLRM's MLPs reach.  `zero_copy_share`: share of the link that a kernel reaches which reads
    host rows in place, by record bytes (between two sizes: interpolated); `write_share`: when it writes them;
    `staged_share`: gathered into pinned pieces that the copy engine moves.
    `host_record_gb_per_s`: one core copying records from random places, by record bytes.
    `planner_lookups_per_s`: scan + plan + segments on one core; `segment_lookups_per_s`: segments alone, which is all
    that is left to plan when everything is resident.
    `costs`, of a measured machine: stage -> "wall" or "core" -> unit of work -> seconds.  `background_cost`: seconds
    that the trainer loses for each core second of planning and copying beside it, beyond the core that it lacks
    (caches, memory and the interpreter's lock are shared).  `spread`: of the repeats that a measured machine's figures
    are from, the median time over the least; above BUSY something else ran meanwhile.
    """

    name: str
    kind: str  # "gpu", or "cpu": the device is the host
    cores: int
    host_memory_bytes: int
    host_gb_per_s: float
    host_record_gb_per_s: dict[int, float]
    planner_lookups_per_s: float
    segment_lookups_per_s: float
    device_memory_bytes: int = 0
    device_gb_per_s: float = 0.0
    device_random_share: float = 1.0
    fp32_tflops: float = 0.0
    tf32_tflops: float = 0.0
    dense_share: float = 1.0
    launch_us: float = 0.0
    link_to_device_gb_per_s: float = 0.0
    link_to_host_gb_per_s: float = 0.0
    link_both_gb_per_s: float = 0.0
    zero_copy_share: dict[int, float] = dataclasses.field(default_factory=dict)
    write_share: float = 1.0
    staged_share: float = 1.0
    costs: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    background_cost: float = 0.0
    spread: float = 1.0
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def host_record_rate(self, record_bytes: int) -> float:
        """GB/s of one core that copies records of this size from random places."""
        return interpolate(self.host_record_gb_per_s, record_bytes)

    def zero_copy_rate(self, record_bytes: int) -> float:
        """GB/s of a kernel that reads host records in place."""
        return self.link_to_device_gb_per_s * interpolate(self.zero_copy_share, record_bytes)


def doubt(profile: Profile) -> str | None:
    """What to say of a profile that was measured on a busy machine."""
    if profile.spread <= BUSY:
        return None
    return (
        f"The machine was busy while this profile was measured (a repeat typically took {profile.spread:.1f} times the "
        "least): it looks slower than it is; run `cdlrm calibrate` again when nothing else runs."
    )


def interpolate(by_size: dict[int, float], size: float) -> float:
    """Between the two nearest sizes; beyond the ends, the value at the end."""
    known = sorted(by_size)
    if size <= known[0]:
        return by_size[known[0]]
    for low, high in zip(known, known[1:], strict=False):
        if size <= high:
            return by_size[low] + (by_size[high] - by_size[low]) * (size - low) / (high - low)
    return by_size[known[-1]]


# --- GPUs ---

_LINK = {
    3: (12.3, 13.1, 22.0, "PCIe 3.0 x16 (15.8 GB/s by its specification): 12.3 GB/s up is what EMOGI measured as the "
           "copy engine's peak (Min et al., VLDB 2020, arXiv:2006.06890); down and both at once: estimate"),
    4: (25.0, 25.6, 37.0, "PCIe 4.0 x16 (31.5 GB/s by its specification): 25-26 GB/s each way, 12-13 up while 24 go "
           "down, as users of nvbandwidth report for the A100 (github.com/NVIDIA/nvbandwidth issues 11 and 53)"),
    5: (55.0, 55.0, 85.0, "PCIe 5.0 x16 (63 GB/s by its specification): 55 GB/s each way (the project's design notes, "
           "H100); both at once: estimate, in PCIe 4.0's proportion"),
}  # fmt: skip
_ZERO_COPY = {32: 0.25, 64: 0.45, 128: 0.63, 256: 0.72, 512: 0.76, 1024: 0.80}
_COMMON_SOURCES = {
    "zero_copy_share": "63-80 % of the copy engine for 256-512 bytes (the project's design notes: 19 of 25 GB/s on an "
    "A100, 35 of 55 on an H100; 35.2 GB/s for kernel reads on an H100 in github.com/NVIDIA/nvbandwidth issue 24); "
    "below 128 bytes, a request's size: estimate",
    "write_share": "52.8 GB/s for kernel writes to the host on an H100 (github.com/NVIDIA/nvbandwidth issue 24), of 55",
    "staged_share": "estimate",
    "device_random_share": "estimate: rows of 64 bytes and more at random places",
    "dense_share": "estimate: small matrix products and the operations between them",
    "launch_us": "estimate: a kernel launch from PyTorch, back to back",
    "host": "assumed: a host of 8 cores and 64 GB/s, 16 and 200 for data-centre GPUs; memory of 2x the device's, at "
    "least 64 GB",
    "planner_lookups_per_s": "33 ns a lookup on one core: 27 to 31 ns of a busy core of an EPYC, 26 M rows, Zipf 1.05 "
    "and 1.15 (ours: bench/planning.py, bench/results/planning.jsonl of 2026-11-29)",
    "segment_lookups_per_s": "15 ns a lookup (design notes: 12.6 ns for a stamp, 2 for a counting sort)",
}


def _gpu(
    name: str, memory_gb: float, device_gb_per_s: float, fp32: float, tf32: float, pcie: int, sheet: str,
    server: bool = False,
) -> Profile:  # fmt: skip
    to_device, to_host, both, link = _LINK[pcie]
    return Profile(
        name=name, kind="gpu", cores=16 if server else 8, host_memory_bytes=int(max(64, 2 * memory_gb) * GB),
        host_gb_per_s=200.0 if server else 64.0,
        host_record_gb_per_s={32: 0.8, 64: 1.6, 128: 2.8, 256: 4.2, 512: 5.5, 1024: 6.5},
        planner_lookups_per_s=30e6, segment_lookups_per_s=66e6, device_memory_bytes=int(memory_gb * GB),
        device_gb_per_s=device_gb_per_s,
        device_random_share=0.6, fp32_tflops=fp32, tf32_tflops=tf32, dense_share=0.35, launch_us=6.0,
        link_to_device_gb_per_s=to_device, link_to_host_gb_per_s=to_host, link_both_gb_per_s=both,
        zero_copy_share=dict(_ZERO_COPY), write_share=0.9, staged_share=0.9,
        sources={"device": sheet, "link": link, **_COMMON_SOURCES,
                 "host_record_gb_per_s": "estimate: a miss of about 40 ns a record, in flight with others"},
    )  # fmt: skip


GPUS: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _gpu("rtx3060", 12, 360, 12.7, 12.7, 4, "GeForce RTX 3060 12 GB, NVIDIA's specifications (TF32: without "
             "sparsity, as FP32 in the GA102 white paper)"),
        _gpu("rtx3090", 24, 936, 35.6, 35.6, 4, "GeForce RTX 3090, NVIDIA's GA102 white paper"),
        _gpu("rtx4090", 24, 1008, 82.6, 82.6, 4, "GeForce RTX 4090, NVIDIA's Ada white paper"),
        _gpu("rtx5090", 32, 1792, 104.8, 104.8, 5, "GeForce RTX 5090, NVIDIA's RTX Blackwell white paper"),
        _gpu("a100-40", 40, 1555, 19.5, 156, 4, "A100 40 GB, NVIDIA's data sheet (TF32 without sparsity)", True),
        _gpu("a100-80", 80, 1935, 19.5, 156, 4, "A100 80 GB PCIe, NVIDIA's data sheet (TF32 without sparsity; SXM: "
             "2039 GB/s)", True),
        _gpu("l4", 24, 300, 30.3, 60, 4, "L4, NVIDIA's data sheet (TF32 without sparsity: half of 120)", True),
        _gpu("t4", 16, 320, 8.1, 8.1, 3, "T4, NVIDIA's data sheet (no TF32)", True),
        _gpu("h100", 80, 3350, 67, 494, 5, "H100 SXM 80 GB, NVIDIA's data sheet (TF32 without sparsity: half of 989)",
             True),
        _gpu("h200", 141, 4800, 67, 494, 5, "H200 SXM 141 GB, NVIDIA's data sheet (TF32 without sparsity)", True),
    )
}  # fmt: skip


def gpu_profile(name: str) -> Profile:
    """The profile of a GPU; raises ConfigError naming those that there are."""
    found = GPUS.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        raise ConfigError(
            f"--gpu {name}: there is no such profile; expected one of {', '.join(GPUS)}, or a --profile FILE that "
            "`cdlrm calibrate` wrote."
        )
    return found


# --- files ---


def save_profile(profile: Profile, file: Path) -> None:
    values = {"cdlrm_profile": FORMAT, **dataclasses.asdict(profile)}
    try:
        file.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--out {file}: cannot be written ({error.strerror}).") from error


def load_profile(file: str) -> Profile:
    """A profile as `save_profile` wrote it, or one made by hand.  Raises DataError for anything else."""
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"--profile {file}: {error.strerror or error}; `cdlrm calibrate --out {file}` makes one."
        ) from None
    except ValueError as error:
        raise DataError(f"--profile {file}: not JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict) or values.pop("cdlrm_profile", None) != FORMAT:
        raise DataError(
            f"--profile {file}: not a profile of this version; make it with `cdlrm calibrate --out {file}`."
        )
    names = {field.name for field in dataclasses.fields(Profile)}
    missing = sorted(_REQUIRED - set(values)) + sorted(set(values) - names)
    if missing:
        raise DataError(f"--profile {file}: {missing[0]!r} is missing or unknown; make it with `cdlrm calibrate`.")
    for name in ("host_record_gb_per_s", "zero_copy_share"):
        try:
            values[name] = {int(size): float(rate) for size, rate in values.get(name, {}).items()}
        except (AttributeError, TypeError, ValueError):
            raise DataError(f"--profile {file}: {name} must give numbers by record size, as {{\"64\": 1.6}}.") from None
    profile = Profile(**values)
    _check(profile, f"--profile {file}")
    return profile


_REQUIRED = {
    field.name
    for field in dataclasses.fields(Profile)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
}
_HOST = ("cores", "host_memory_bytes", "host_gb_per_s", "planner_lookups_per_s", "segment_lookups_per_s")
_POSITIVE = {
    "cpu": _HOST,
    "gpu": (
        *_HOST, "device_memory_bytes", "device_gb_per_s", "device_random_share", "fp32_tflops", "tf32_tflops",
        "dense_share", "link_to_device_gb_per_s", "link_to_host_gb_per_s", "link_both_gb_per_s", "write_share",
        "staged_share",
    ),
}  # fmt: skip
_NOT_NEGATIVE = ("launch_us", "background_cost", "spread")


def _check(profile: Profile, where: str) -> None:
    """Raises DataError naming the figure that cannot be."""
    if profile.kind not in _POSITIVE:
        raise DataError(f"{where}: kind {profile.kind!r} is unknown; expected gpu or cpu.")
    if not isinstance(profile.name, str):
        raise DataError(f"{where}: name is {profile.name!r}; it must be a word.")
    for name in _POSITIVE[profile.kind]:
        value: Any = getattr(profile, name)
        if not _not_negative(value) or not value:
            raise DataError(f"{where}: {name} is {value!r}; it must be a number above 0.")
    for name in ("cores", "host_memory_bytes", "device_memory_bytes"):
        value = getattr(profile, name)
        if not isinstance(value, int):
            raise DataError(f"{where}: {name} is {value!r}; it must be a whole number.")
    for name in _NOT_NEGATIVE:
        value = getattr(profile, name)
        if not _not_negative(value):
            raise DataError(f"{where}: {name} is {value!r}; it must be a number, 0 or more.")
    tables = ("host_record_gb_per_s", *(("zero_copy_share",) if profile.kind == "gpu" else ()))
    for name in tables:
        rates = getattr(profile, name)
        if not rates or not all(_not_negative(rate) and rate for rate in rates.values()):
            raise DataError(f"{where}: {name} must give a number above 0 for at least one record size.")
    if profile.kind == "cpu":
        for stage, units in units_by_stage().items():
            for kind in ("wall", "core"):
                given: list[Any] = [None]
                with contextlib.suppress(KeyError, TypeError):
                    given = [profile.costs[stage][kind][unit] for unit in units]
                if not all(_not_negative(cost) for cost in given):
                    raise DataError(
                        f"{where}: the costs of the stage {stage!r} are missing or no numbers of 0 or more; run `cdlrm "
                        "calibrate` again."
                    )


def _not_negative(value: Any) -> bool:
    """Whether it is a finite number, 0 or more."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
