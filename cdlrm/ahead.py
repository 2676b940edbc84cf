"""`lookahead`: wrap a loader so that the rows of coming batches are on the device in time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from .errors import ConfigError, InputError
from .group import Group
from .lookups import Lookups
from .runtime import Pipeline, Work

FIRST_HORIZON = 32  # with "auto", until the first batch is scanned
WINDOW_BYTES = 1 << 30

Ids = Callable[[Any], Any]


def lookahead(
    modules: nn.Module | Iterable[nn.Module],
    loader: Iterable[Any],
    *,
    ids: Ids | None = None,
    horizon: int | str = "auto",
    prefetch_depth: int = 1,
    window_bytes: int = WINDOW_BYTES,
) -> Lookahead:
    """Iterate over `loader` while coming batches are scanned, planned and copied ahead.

    `modules`: an embedding module of this library, several, or a model that contains them.
    `loader`: any iterable of `Batch`, or of anything when `ids` is given.
    `ids(batch)`: the argument(s) that each module will be called with: for one module its argument
    (or a tuple of them, or a list of such for several calls in a step); for several a mapping
    module -> the same.  Default: the batch itself is the argument of every module.
    `horizon`: future batches that are scanned (host memory only, at most `window_bytes` of it), or "auto":
    24 batches for each time that the cache holds a batch's distinct rows, at most 4,096, looked at again every 64
    batches (what that leaves to gain, and on which traces: `horizon.py`);
    `prefetch_depth`: batches that may compute while a batch's rows are copied (costs slots);
    `horizon < prefetch_depth` means the larger.

    A batch ends when the loop asks for the next one.  Leaving the loop early, errors and Ctrl-C leave
    the tables as after the last batch that ended.  Raises ConfigError for settings that cannot work.
    """
    return Lookahead(
        modules, loader, ids=ids, horizon=horizon, prefetch_depth=prefetch_depth, window_bytes=window_bytes
    )


def embedding_modules(modules: nn.Module | Iterable[nn.Module]) -> list[Any]:
    """This library's embedding modules among `modules` and what they contain, each once."""
    given = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: list[Any] = []
    for module in given:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"lookahead: {module!r} is not a torch.nn.Module; pass the model or its embedding modules."
            )
        for part in module.modules():
            if hasattr(part, "lookahead_calls") and not any(part is other for other in found):
                found.append(part)
    if not found:
        raise ConfigError(
            "lookahead: the model has no embedding module of cdlrm; pass an EmbeddingBagCollection or a model with one."
        )
    return found


class Lookahead:
    """Iterator over the loader's batches; see `lookahead`.  Also a context manager.

    Iterating again starts a new pass (epoch), and so does whatever calls `iter()`, such as `itertools.islice`: to
    take a few batches at a time, call `next()`.  `close` may be called at any time, and is called at the end of a pass
    and when the object is no longer referenced.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        loader: Iterable[Any],
        *,
        ids: Ids | None = None,
        horizon: int | str = "auto",
        prefetch_depth: int = 1,
        window_bytes: int = WINDOW_BYTES,
        threads: bool = True,
    ) -> None:
        self._auto = horizon == "auto"
        horizon = FIRST_HORIZON if self._auto else horizon
        for name, value, low in (("horizon", horizon, 0), ("prefetch_depth", prefetch_depth, 0),
                                 ("window_bytes", window_bytes, 1)):  # fmt: skip
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                other = ' or "auto"' if name == "horizon" else ""
                raise ConfigError(f"lookahead({name}={value!r}): must be an integer, {low} or more{other}.")
        if ids is not None and not callable(ids):
            raise ConfigError(f"lookahead(ids={ids!r}): must be a function batch -> arguments of the modules.")
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"lookahead: the loader ({type(loader).__name__}) is not iterable.")
        self.modules = embedding_modules(modules)
        self.loader = loader
        self._horizon, self.prefetch_depth = max(int(horizon), prefetch_depth), prefetch_depth
        self._ids, self._window_bytes, self._threads = ids, window_bytes, threads
        self._why: str | None = None
        self._pipeline: Pipeline | None = None
        self._state: Any = None
        self._totals = {"batches": 0, "seconds_read": 0.0, "seconds_stall": 0.0, "short_windows": 0}

    def __iter__(self) -> Lookahead:
        self.close()
        self._start()
        return self

    def __next__(self) -> Any:
        if self._pipeline is None:
            if self._totals["batches"] or self._state is not None:
                raise StopIteration
            self._start()
        assert self._pipeline is not None
        try:
            work: Work | None = self._pipeline.advance()
        except BaseException:
            self.close()
            raise
        if work is None:
            self.close()
            raise StopIteration
        self._state = work.state
        return work.batch

    def _start(self) -> None:
        groups: list[Group] = []
        for module in self.modules:
            module.require_open()
            groups += [g for g in module.groups if g not in groups]
        for group in groups:
            if group.attached is not None:
                group.attached.close()  # an earlier loop that was left early
            group.abandon()
        self._pipeline = Pipeline(
            groups, self.loader, _Announcer(self.modules, self._ids), horizon=self._horizon,
            prefetch_depth=self.prefetch_depth, window_bytes=self._window_bytes, threads=self._threads,
            auto_horizon=self._auto,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """batches, seconds_read (inside the loader), seconds_stall (the trainer waited), short_windows."""
        out = dict(self._totals)
        line = self._pipeline
        if line is not None:
            out["batches"] += line.trained
            out["seconds_read"] += line.seconds_read
            out["seconds_stall"] += line.seconds_stall
            out["short_windows"] += line.short_windows
        return {**out, "horizon": self.horizon, "prefetch_depth": self.prefetch_depth}

    @property
    def horizon(self) -> int:
        """Batches that are scanned ahead at present ("auto" changes it)."""
        return self._horizon if self._pipeline is None else self._pipeline.horizon

    @property
    def horizon_why(self) -> str | None:
        """A sentence about the newest choice of "auto"; None before it."""
        line = self._pipeline
        return self._why if line is None or line.chooser is None else line.chooser.why or self._why

    def state_dict(self) -> Any:
        """`loader.state_dict()` as it was after the batch that is being trained (None before the first,
        or when the loader has none): what was only read ahead is read again after a resume."""
        return self._state

    def close(self) -> None:
        """End the current batch and stop reading ahead.  May be called twice."""
        line, self._pipeline = self._pipeline, None
        if line is None:
            return
        self._horizon = line.horizon
        if line.chooser is not None and line.chooser.why:
            self._why = line.chooser.why
        try:
            line.finish_batch()
        finally:
            line.close()
        self._totals["batches"] += line.trained
        self._totals["seconds_read"] += line.seconds_read
        self._totals["seconds_stall"] += line.seconds_stall
        self._totals["short_windows"] += line.short_windows

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pipeline", None) is not None:
            self.close()


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(repr, value))}"
    return f"a {type(value).__name__}"


class _Announcer:
    """From a batch to the lookups of every group, call after call.  Holds no look-ahead, so that a
    look-ahead that nobody references any more is closed."""

    def __init__(self, modules: list[Any], ids: Ids | None) -> None:
        self.modules, self.ids = modules, ids

    def __call__(self, batch: Any) -> dict[Group, list[Lookups]]:
        out: dict[Group, list[Lookups]] = {}
        for module, argument in self._arguments(batch):
            for one in argument if isinstance(argument, list) else [argument]:
                try:
                    calls = module.lookahead_calls(one)
                except TypeError as error:
                    raise InputError(self._not_arguments(module, batch if self.ids is None else one)) from error
                except InputError as error:
                    if self.ids is None and isinstance(batch, (list, tuple)) and not isinstance(one, Mapping):
                        raise InputError(
                            f"{str(error).removesuffix('.')}; or, if only a part of the batch, {_described(batch)}, is "
                            f"for {type(module).__name__}, pass ids=, such as ids=lambda batch: {self._example()}."
                        ) from error
                    raise
                for group, lookups in calls.items():
                    out.setdefault(group, []).append(lookups)
        return out

    def _not_arguments(self, module: Any, given: Any) -> str:
        """The sentence about something that `module` cannot be called with."""
        return (
            f"{'a batch is' if self.ids is None else 'ids= returned'} {_described(given)} where "
            f"{type(module).__name__} is called with ({', '.join(inspect.signature(module.forward).parameters)}); pass "
            f"ids=, a function from a batch to what the module is called with, such as ids=lambda batch: "
            f"{self._example()}."
        )

    def _example(self) -> str:
        return "batch[0]" if len(self.modules) == 1 else "{model.user: batch[0], model.item: batch[1]}"

    def _arguments(self, batch: Any) -> list[tuple[Any, Any]]:
        if self.ids is None:
            return [(module, batch) for module in self.modules]
        given = self.ids(batch)
        if isinstance(given, Mapping) and given and all(hasattr(key, "lookahead_calls") for key in given):
            for module in given:
                if not any(module is known for known in self.modules):
                    raise ConfigError(
                        f"ids= returned arguments for a module ({type(module).__name__}) that lookahead was not given; "
                        f"pass it to lookahead too."
                    )
            return list(given.items())
        if len(self.modules) > 1:
            raise ConfigError(
                f"ids= must return a mapping module -> arguments, since lookahead was given {len(self.modules)} "
                f"embedding modules; it returned {type(given).__name__}."
            )
        return [(self.modules[0], given)]
