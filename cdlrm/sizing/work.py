"""What a training step has to do: the shape of the model, and counts of everything that costs time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..config import TrainConfig, dashed

Counts = dict[str, float]


class Moves(NamedTuple):
    """Means over batches: lookups, distinct rows, fills copied from the store and generated, rows written back."""

    lookups: float
    distinct: float
    copied: float
    generated: float
    written: float


@dataclass(frozen=True)
class Shape:
    """A DLRM and its batches.  `mlp_top` with its input width; `state_width` floats of optimizer state a row."""

    batch_size: int
    features: int
    dim: int
    state_width: int
    optimizer: str
    mlp_bot: tuple[int, ...]
    mlp_top: tuple[int, ...]
    pairs: int  # products of the interaction; 0: features are concatenated

    @property
    def record_bytes(self) -> int:
        return 4 * (self.dim + self.state_width)

    @property
    def layers(self) -> list[tuple[int, int]]:
        return [*pairwise(self.mlp_bot), *pairwise(self.mlp_top)]

    @property
    def parameters(self) -> int:
        return sum(a * b + b for a, b in self.layers)

    @property
    def dense_flops(self) -> float:
        """Of forward and backward: three products of matrices a layer, but two for the first of the bottom MLP."""
        products = 6 * sum(a * b for a, b in self.layers) - 2 * self.mlp_bot[0] * self.mlp_bot[1]
        return float(self.batch_size * (products + 6 * self.vectors**2 * self.dim * (self.pairs > 0)))

    @property
    def vectors(self) -> int:
        """What interacts: the bottom MLP's output and one vector a feature."""
        return self.features + 1


def shape_of(config: TrainConfig, features: int, num_dense: int) -> Shape:
    """The shape of `cdlrm train` with these settings on data of `features` tables and `num_dense` dense columns.

    Raises ConfigError where `--arch-mlp-bot` does not fit them.
    """
    from ..assemble import TABLE_OPTIMIZERS, bottom_mlp

    dim = config.arch_sparse_feature_size
    vectors = features + 1
    dot = config.arch_interaction_op == "dot"
    pairs = vectors * (features + 2 * int(config.arch_interaction_itself)) // 2 if dot else 0
    width = dim + pairs if dot else dim * vectors
    return Shape(
        batch_size=config.mini_batch_size, features=features, dim=dim,
        state_width=TABLE_OPTIMIZERS[config.optimizer](lr=1.0).state_width(dim), optimizer=config.optimizer,
        mlp_bot=tuple(bottom_mlp(config, num_dense)),
        mlp_top=(width, *dashed("--arch-mlp-top", config.arch_mlp_top)), pairs=pairs,
    )  # fmt: skip


# --- counts: what the calibrated seconds of a stage are multiplied with ---


def plan_counts(moves: Moves) -> Counts:
    """Scan, plan, segments and the count of MIN."""
    return {
        "batch": 1.0,
        "lookup": moves.lookups,
        "distinct": moves.distinct,
        "moved": moves.copied + moves.generated + moves.written,
    }


def resident_counts(moves: Moves) -> Counts:
    """Segments alone."""
    return {"batch": 1.0, "lookup": moves.lookups, "distinct": moves.distinct}


def fill_counts(shape: Shape, moves: Moves) -> Counts:
    return {
        "fill_batch": 1.0,
        "copied": moves.copied,
        "copied_byte": moves.copied * shape.record_bytes,
        "generated": moves.generated,
        "generated_value": moves.generated * shape.dim,
    }


def write_counts(shape: Shape, moves: Moves) -> Counts:
    return {"written": moves.written, "written_byte": moves.written * shape.record_bytes}


def lookup_counts(shape: Shape, moves: Moves) -> Counts:
    """Ids checked again, slots looked up, rows pooled."""
    return {
        "batch": 1.0,
        "lookup": moves.lookups,
        "value": moves.lookups * shape.dim,
        "distinct_value": moves.distinct * shape.dim,
    }


def update_counts(shape: Shape, moves: Moves) -> Counts:
    """Gradients checked and summed by row, the optimizer's formula."""
    return {
        "batch": 1.0,
        "value": moves.lookups * shape.dim,
        "distinct": moves.distinct,
        f"{shape.optimizer}_value": moves.distinct * shape.dim,
    }


def dense_counts(shape: Shape) -> Counts:
    """Both MLPs and the interaction, forward and backward, and the MLPs' optimizer."""
    size, vectors = shape.batch_size, shape.vectors
    pairs = size * shape.pairs
    return {
        "batch": 1.0,
        "layer": float(len(shape.layers)),
        "flop": size * (6.0 * sum(a * b for a, b in shape.layers) - 2.0 * shape.mlp_bot[0] * shape.mlp_bot[1]),
        "activation": float(size * sum(b for _, b in shape.layers)),
        "vector_value": float(size * vectors * shape.dim),
        "pair": float(pairs),
        "pair_flop": 6.0 * size * vectors**2 * shape.dim if pairs else 0.0,
    }


def units_by_stage() -> dict[str, set[str]]:
    """What a measured machine's profile gives costs for: the units of work of each stage, of every optimizer."""
    from ..assemble import TABLE_OPTIMIZERS

    moves = Moves(1, 1, 1, 1, 1)
    shapes = [Shape(1, 1, 1, 0, optimizer, (1, 1), (1, 1), 1) for optimizer in TABLE_OPTIMIZERS]
    return {
        "plan": {*plan_counts(moves)},
        "resident": {*resident_counts(moves)},
        "transfer": {*fill_counts(shapes[0], moves), *write_counts(shapes[0], moves)},
        "lookup": {*lookup_counts(shapes[0], moves)},
        "update": {unit for shape in shapes for unit in update_counts(shape, moves)},
        "dense": {*dense_counts(shapes[0])},
    }
