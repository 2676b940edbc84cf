"""The command line: `cdlrm train`, `eval`, `predict` and `info`; the other commands register themselves.

Exit codes: 0 done, 1 an error of the data or the run, 2 a flag or setting that cannot be right,
130 interrupted.  Errors are one sentence on standard error; `--debug` shows the traceback too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .arguments import add_command, add_debug, add_settings, check_file, given_settings, quiet_openmp, write_json
from .config import GROUPS, TrainConfig, in_flags, suggestion
from .convert_cli import add_convert
from .errors import CdlrmError, ConfigError, UsageError
from .simulate.command import add_simulate
from .sizing.command import add_calibrate, add_plan
from .sweep.command import add_sweep

M_ARENA_MAX = -8  # of malloc.h
COMPILED = "CDLRM_KERNELS_COMPILED"  # in the environment of a dry run's second process

TRAIN_ABOUT = """\
Train a DLRM through a look-ahead cache, evaluate it, and print a report.
Without flags: synthetic data shaped like Criteo's click logs, and a cache of 10 % of the rows.
"""
TRAIN_EXAMPLES = """\
examples:
  cdlrm train
  cdlrm train --data 'logs/*.orc' --cache-ratio 0.05 --test-freq 100
  cdlrm train --data day_0.tsv --test-data day_1.tsv --table-rows 1000000 --json report.json
  cdlrm train --learning-rate 0.05 --print-config > run.yaml && cdlrm train --config run.yaml
"""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence, suggestions for unknown flags, and no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help lists what is possible).")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        found, rest = self.parse_known_args(argv)
        if rest:
            word = rest[0].split("=")[0]
            known = getattr(found, "parser", self).flags()
            self.error(f"{rest[0]!r} is not a known flag{suggestion(word, known)}")
        return found

    def flags(self) -> list[str]:
        return list(self._option_string_actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SystemExit as stop:  # argparse, after --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted.\n")
        return 130
    except CdlrmError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(f"error: {in_flags(str(error))}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except RuntimeError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11, while a dataclass is imported
            raise
        sys.stderr.write("interrupted.\n")
        return 130


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    found = parser.parse(arguments)
    if "command" not in found:
        parser.print_help()
        return 0
    return found.command(found)


def build_parser() -> Parser:
    parser = Parser(
        prog="cdlrm",
        description="Train large DLRM models through an exact look-ahead embedding cache.",
        epilog="examples:\n  cdlrm train\n  cdlrm train --data 'logs/*.orc' --checkpoint-dir run\n"
        "  cdlrm eval --checkpoint run --data day_2.orc\n  cdlrm info\n",
    )
    parser.add_argument("--version", action="version", version=f"cdlrm {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(commands)
    add_convert(commands)
    add_simulate(commands)
    add_sweep(commands)
    add_plan(commands)
    add_calibrate(commands)
    _add_score(
        commands, "eval", "metrics of a checkpoint on new files", run_eval,
        "cdlrm eval --checkpoint run --data day_2.tsv --json metrics.json",
    ).add_argument("--json", metavar="FILE", help="also write the result to this file, as JSON")  # fmt: skip
    output = _add_score(
        commands, "predict", "click probabilities of a checkpoint on new files, to Parquet", run_predict,
        "cdlrm predict --checkpoint run --data 'new/*.parquet' --out probabilities.parquet",
    )  # fmt: skip
    output.add_argument("--out", metavar="FILE", help="the Parquet file to write: row, probability, label")
    output.add_argument("--overwrite", action="store_true", help="replace the file --out, when the new one is complete")
    info = add_command(
        commands, "info", run_info, usage="[--json]", about="versions, processor, memory, GPU support",
        description="What this machine has, and the versions that matter; for a report of a fault, add it.",
        examples="examples:\n  cdlrm info\n  cdlrm info --json > machine.json\n",
    )  # fmt: skip
    info.add_argument("--json", action="store_true", help="as JSON")
    add_debug(info)
    return parser


def _add_train(commands: Any) -> None:
    train = add_command(
        commands, "train", run_train, about="train a DLRM and report", description=TRAIN_ABOUT, examples=TRAIN_EXAMPLES
    )
    groups = {name: train.add_argument_group(*title.partition(": ")[::2]) for name, title in GROUPS.items()}
    add_settings(groups, dataclasses.fields(TrainConfig))
    output = groups["output"]
    output.add_argument("--config", metavar="FILE", help="settings in YAML, by the flags' names; flags win over it")
    output.add_argument("--print-config", action="store_true", help="print all settings as YAML, and stop")
    output.add_argument("--dry-run", action="store_true", help="print how much memory the run will use, and stop")
    add_debug(output)


def _add_score(commands: Any, name: str, about: str, command: Any, example: str) -> Any:
    from .scoring_config import GROUPS as SCORE_GROUPS
    from .scoring_config import ScoreConfig

    parser = add_command(
        commands, name, command, about=about, description=about[0].upper() + about[1:] + ".",
        examples=f"example:\n  {example}\n",
    )  # fmt: skip
    groups = {key: parser.add_argument_group(title) for key, title in SCORE_GROUPS.items()}
    add_settings(groups, dataclasses.fields(ScoreConfig))
    add_debug(groups["output"])
    return groups["output"]


def run_train(found: argparse.Namespace) -> int:
    config = _config(found)
    if found.print_config:
        import yaml

        sys.stdout.write(yaml.safe_dump(config.to_mapping(), sort_keys=False))
        return 0
    check_file("--json", config.json)
    quiet_openmp()
    _one_heap()
    if found.dry_run:
        return _dry_run(config)
    from .progress import Listener, ProgressBar
    from .report import jsonable, render
    from .train import train

    report = train(config, ProgressBar() if config.progress else Listener())
    sys.stdout.write(render(report) + "\n")
    if config.json is not None:
        write_json(config.json, jsonable(report))
    return 130 if report["interrupted"] else 0


def _dry_run(config: TrainConfig) -> int:
    from numba.core import event

    from .memory_plan import plan_memory
    from .memory_text import render_plan

    with event.install_recorder("numba:compile") as compiled:
        plan = plan_memory(config)
    if compiled.buffer and COMPILED not in os.environ:
        plan = _plan_again(config)
    sys.stdout.write(render_plan(plan) + "\n")
    if config.json is not None:
        write_json(config.json, plan)
    return 0


def _plan_again(config: TrainConfig) -> dict[str, Any]:
    """The plan made by a new process, where kernels were compiled in this one: the compiler took some 100 MiB, which a
    run whose kernels lie on disk, as they do now, does without."""
    import yaml

    sys.stderr.write("kernels were compiled for the first time; measuring once more without the compiler's memory.\n")
    with tempfile.TemporaryDirectory(prefix="cdlrm-dry-run-") as folder:
        settings, plan = Path(folder) / "settings.yaml", Path(folder) / "plan.json"
        settings.write_text(yaml.safe_dump({**config.to_mapping(), "json": str(plan)}), encoding="utf-8")
        command = [sys.executable, "-m", "cdlrm", "train", "--config", str(settings), "--dry-run"]
        done = subprocess.run(command, env={**os.environ, COMPILED: "1"}, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise UsageError(f"the second measurement of --dry-run ended with code {done.returncode}; see above.")
        return dict(json.loads(plan.read_text(encoding="utf-8")))


def run_eval(found: argparse.Namespace) -> int:
    quiet_openmp()
    config, file = _score_config(found), vars(found).get("json")
    check_file("--json", file)
    from .progress import Listener, ProgressBar
    from .report import jsonable
    from .scoring import evaluate, render_evaluation

    result = evaluate(config, ProgressBar(name="eval") if config.progress else Listener())
    sys.stdout.write(render_evaluation(result) + "\n")
    if file is not None:
        write_json(file, jsonable(result))
    return 0


def run_predict(found: argparse.Namespace) -> int:
    quiet_openmp()
    config, out = _score_config(found), vars(found).get("out")
    if out is None:
        raise ConfigError("--out is missing: name the Parquet file to write.")
    from .progress import Listener, ProgressBar
    from .scoring import predict, render_prediction

    bar = ProgressBar(name="predict") if config.progress else Listener()
    result = predict(config, out, bar, overwrite=found.overwrite)
    sys.stdout.write(render_prediction(result) + "\n")
    return 0


def _score_config(found: argparse.Namespace) -> Any:
    from .scoring_config import ScoreConfig

    return ScoreConfig(**given_settings(found, dataclasses.fields(ScoreConfig)))


def _one_heap() -> None:
    """glibc gives each thread a heap of its own; how full those become depends on timing, and made the peak of equal
    runs differ by 10 %.  With one the peak is lower, and what `--dry-run` foretells.  (Large arrays are in no heap.)"""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def _config(found: argparse.Namespace) -> TrainConfig:
    """The settings: defaults, then the YAML file, then the flags."""
    values = read_yaml(found.config) if found.config else {}
    return TrainConfig.from_mapping(values | given_settings(found, dataclasses.fields(TrainConfig)))


def read_yaml(file: str) -> dict[str, Any]:
    """A YAML mapping; raises ConfigError where the file is missing or is something else."""
    import yaml

    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: expected lines of 'name: value', found a {type(values).__name__}.")
    return values


def run_info(found: argparse.Namespace) -> int:
    from .machine import describe, render_info

    facts = describe()
    sys.stdout.write((json.dumps(facts, indent=2) if found.json else render_info(facts)) + "\n")
    return 0


def version() -> str:
    """The installed version, or "unknown (not installed)" when run from a source tree."""
    from .machine import package_version

    return package_version("cdlrm") or "unknown (not installed)"
