"""The kernels under the sanitizers, as programs of their own (a preloaded TSan does not survive Python).

`build("address")` has ASan and UBSan, `build("thread")` TSan; `run(program, launches, workers)` feeds it launches of
`launches.py`.  Programs are kept by their text, as the emulator's libraries are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cdlrm.driver import signatures, sources

from .compile import HEADERS, cache_folder, compiler, files, team_threads
from .launches import ENTRIES, Launch, encode

MAIN = HEADERS / "sanitize.cpp"
COMMON = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-pthread")
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "abort_on_error=0:exitcode=66:detect_leaks=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
RUN_TEAMS = """
// The teams worker, worker + workers, ... of a grid.
template <class... P>
static void run_teams(void (*kernel)(P...), int threads, int team, int worker, int workers, int grid,
                      const void* const* args) {
    gridDim.x = grid;
    const long long teams = threads / team;
    for (long long number = worker; number < grid * teams; number += workers) {
        blockIdx.x = (unsigned)(number / teams);
        threadIdx.x = (unsigned)(number % teams * team);
        call(kernel, args, std::index_sequence_for<P...>{});
    }
}
"""


def symbol(name: str, variant: signatures.Variant) -> str:
    return "_".join(map(str, ("teams", name, *variant)))


def _unit(file: str, change: Callable[[str], str]) -> str:
    """A kernel file for the host, with a function for each variant that runs a worker's teams."""
    parts = [(HEADERS / "host.h").read_text(encoding="utf-8"), change(sources.source(file)), RUN_TEAMS]
    for name, variant in ENTRIES:
        if signatures.KERNELS[name].file == file:
            parts.append(
                f'extern "C" void {symbol(name, variant)}(int worker, int workers, int grid, const void* const* args) '
                f"{{ run_teams({signatures.expression(name, variant)}, {signatures.BLOCK_THREADS}, "
                f"{team_threads(variant, name)}, worker, workers, grid, args); }}\n"
            )
    return "".join(parts)


def _main(only: Sequence[str]) -> str:
    """sanitize.cpp with its lists; entries of files left out are empty."""
    entries = [(symbol(*entry), signatures.KERNELS[entry[0]].file in only) for entry in ENTRIES]
    nothing = "(int, int, int, const void* const*) {}"
    absent = "".join(f'extern "C" void {name}{nothing}\n' for name, there in entries if not there)
    lists = {"ENTRIES": [name for name, _ in entries], "FILES": [_take(file) for file in only]}
    defines = [f"#define {name}(DO) {' '.join(f'DO({word})' for word in words)}\n" for name, words in lists.items()]
    return "".join(defines) + MAIN.read_text(encoding="utf-8") + absent


def _take(file: str) -> str:
    """Each file's own name for host.h's function."""
    return f"take_fault_{Path(file).stem}"


def build(
    sanitizer: str, only: Sequence[str] | None = None, change: Callable[[str], str] = lambda text: text
) -> Path:
    """The program with the kernels of the files `only` (default: all), their text changed by `change` (for faults
    that tests plant).  Raises RuntimeError with the compiler's text."""
    chosen = list(only or files())
    flags = [*COMMON, *SANITIZERS[sanitizer]]
    units = {"main": _main(chosen)} | {Path(file).stem: _unit(file, change) for file in chosen}
    version = _call(["--version"])
    key = hashlib.sha256("\0".join([version, *flags, *units.values()]).encode()).hexdigest()[:20]
    program = cache_folder() / f"{sanitizer}-{key}"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=cache_folder()) as work, ThreadPoolExecutor(2) as pool:

        def compile_unit(stem: str) -> Path:
            unit, made = Path(work) / f"{stem}.cpp", Path(work) / f"{stem}.o"
            unit.write_text(units[stem], encoding="utf-8")
            _call([*flags, f"-Dtake_fault={_take(stem)}", "-c", str(unit), "-o", str(made)])
            return made

        largest_first = sorted(units, key=lambda stem: -units[stem].count("run_teams"))
        objects = [str(made) for made in pool.map(compile_unit, largest_first)]
        linked = Path(work) / "linked"
        _call([*flags, *objects, "-o", str(linked)])
        linked.replace(program)
    return program


def _call(words: list[str]) -> str:
    """Call the compiler; what it says."""
    done = subprocess.run([compiler() or "c++", *words], capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"a sanitizer's build failed:\n{done.stderr[-8000:]}")
    return done.stdout


@functools.cache
def _fixed_addresses() -> list[str]:
    """What to put before a command so that its addresses are not random, where that is allowed: TSan wants ranges
    that much randomisation may take."""
    prefix = [shutil.which("setarch") or "setarch", platform.machine(), "-R"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        allowed = False
    return prefix if allowed else []


def run(program: Path, launches: Iterable[Launch], workers: int) -> subprocess.CompletedProcess[str]:
    """Run the launches; `stdout` says how many, `stderr` holds the sanitizer's report, returncode 66 its verdict."""
    command = [*(_fixed_addresses() if program.name.startswith("thread") else []), str(program), str(workers)]
    environment = {**os.environ, **ENVIRONMENT}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has found something and ended
                for launch in launches:
                    process.stdin.write(encode(launch))
                process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
