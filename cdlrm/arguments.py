"""What several commands share: their parsers, flags made from settings, checks of values before the work, and files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .config import TrainConfig, flag_of
from .errors import ConfigError, DataError

WORDS = {"horizon": ("auto",)}
"""What the flags of a grid take besides numbers."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, usage: str = "[flags]", about: str,
    description: str, examples: str,
) -> Any:  # fmt: skip
    """A command's parser; `run(found)` does its work and returns the exit code."""
    parser = commands.add_parser(
        name, usage=f"cdlrm {name} {usage}", help=about, description=description, epilog=examples
    )
    parser.set_defaults(command=run, parser=parser)
    return parser


def settings_of(chosen: Callable[[dataclasses.Field[Any]], bool]) -> list[dataclasses.Field[Any]]:
    """The settings of `cdlrm train` for which `chosen` is true."""
    return [field for field in dataclasses.fields(TrainConfig) if chosen(field)]


def add_settings(groups: Any, fields: Iterable[dataclasses.Field[Any]]) -> None:
    """A flag for each setting, under its name in `cdlrm train`; values are checked by the settings themselves.

    `groups`: one group of flags, or a mapping from the settings' groups to theirs.
    """
    for field in fields:
        about = field.metadata
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = about["help"].replace("%", "%%")
        if about["kind"] is bool:
            options["action"] = argparse.BooleanOptionalAction
            text += f" (default: {'yes' if field.default else 'no'})"
        else:
            choices = "|".join(about["choices"])
            options["metavar"] = about["metavar"] or choices or ("N" if about["kind"] is int else "X")
            options["nargs"] = "+" if about["many"] else None
            if field.default is not None:
                text += f" (default: {field.default})"
        group = groups[about["group"]] if isinstance(groups, dict) else groups
        group.add_argument(flag_of(field.name), *about["aliases"], help=text, **options)


def given_settings(found: argparse.Namespace, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Those of the settings `fields` that were given as flags."""
    return {field.name: getattr(found, field.name) for field in fields if hasattr(found, field.name)}


def add_grid(group: Any, flags: dict[str, tuple[type, str]]) -> None:
    """Flags that take several values each: name -> type of a value, help; read them by `number_list` and WORDS."""
    for name, (kind, text) in flags.items():
        metavar = "|".join([*WORDS.get(name, ()), {int: "N", float: "X", str: "NAME"}[kind]])
        group.add_argument(flag_of(name), nargs="+", metavar=metavar, default=argparse.SUPPRESS, help=text)


def add_debug(output: Any) -> None:
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_common(output: Any) -> None:
    """The flags of output that every long command has."""
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="the progress bar (default: yes)"
    )
    add_debug(output)


def number_list(flag: str, kind: type, words: list[str], others: tuple[str, ...] = ()) -> list[Any]:
    """The values of a flag with several, numbers or words of `others`; raises ConfigError naming what is neither."""
    values: list[Any] = []
    for word in words:
        try:
            values.append(word if word in others else kind(word))
        except ValueError:
            expected = " or ".join([{int: "a whole number", float: "a number"}[kind], *others])
            raise ConfigError(f"{flag} {word}: expected {expected}.") from None
    return values


def whole(flag: str, word: str | None, low: int) -> int | None:
    if word is None:
        return None
    value = number_list(flag, int, [word])[0]
    if value < low:
        raise ConfigError(f"{flag} {value}: must be at least {low}.")
    return int(value)


def check_file(flag: str, file: str | None, endings: tuple[str, ...] = ()) -> None:
    """Before the work, not after it: the folder exists, the ending is one that can be written, and so is the file."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder; name a file in it.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag} {file}: its folder does not exist; create it first.")
    if endings and path.suffix not in endings:
        raise ConfigError(f"{flag} {file}: expected a name that ends in {' or '.join(endings)}.")
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # not a device or a pipe
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: cannot be written ({error.strerror}); name another file.") from error


@contextlib.contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    """Inside, `file`, which `flag` names, is written: raises DataError where that fails (a full disk)."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{flag} {file}: cannot be written ({error.strerror or error}).") from error


def write_json(file: str, value: Any) -> None:
    """Into the file that `--json` names; raises DataError where it cannot be written."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with writing("--json", file):
        Path(file).write_text(text, encoding="utf-8")


def quiet_openmp() -> None:
    """OpenMP threads that spin while they wait take the cores from the threads that plan and copy (measured on two
    shared cores: five times slower).  It is read when torch is loaded, so it is set before."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
