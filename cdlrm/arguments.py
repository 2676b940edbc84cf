"""What several commands share: flags made from settings, and checks of values before the work."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .config import TrainConfig, flag_of
from .errors import ConfigError


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


def add_common(output: Any) -> None:
    """The flags of output that every long command has."""
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="the progress bar (default: yes)"
    )
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")


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
    """Before the work, not after it: the folder exists and the ending is one that can be written."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder; name a file in it.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag} {file}: its folder does not exist; create it first.")
    if endings and path.suffix not in endings:
        raise ConfigError(f"{flag} {file}: expected a name that ends in {' or '.join(endings)}.")
