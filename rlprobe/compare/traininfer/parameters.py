"""The weights both models ran with; a tensor-parallel rank's against its part of training's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from rlprobe.compare import measures
from rlprobe.compare.compare import Options
from rlprobe.compare.match import pairs
from rlprobe.compare.match.rules import Rules
from rlprobe.compare.stage_sources import Process, StageSource
from rlprobe.compare.tensors import elementwise
from rlprobe.compare.tensors.distance import distance
from rlprobe.compare.traininfer import layout, shards
from rlprobe.compare.traininfer.matching import halves, matched
from rlprobe.dumps.apinames import SEPARATOR
from rlprobe.dumps.tensors.source import TensorSource
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

Shape = Sequence[int]

PACKED = (
    "the engine has packed this weight for its kernels and left the tensor empty; it is not "
    "compared"
)


def compare(
    engine: tuple[StageSource, Process],
    trainer: tuple[StageSource, Process],
    rules: Rules,
    options: Options,
) -> pl.DataFrame | None:
    """Measured rows of the weights of one process each; None where a side dumped none.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    frames = [_weights(*side) for side in (engine, trainer)]
    if any(frame.is_empty() for frame in frames):
        return None
    table = matched(frames[0], frames[1], rules)
    sources = [source.tensors(process, options.check_crc) for source, process in (engine, trainer)]
    table = elementwise.measure(table, sources[0], sources[1], options.jobs)
    table = _packed(table)
    if sources[0] is None or sources[1] is None:
        return table
    return _with_pieces(table, (sources[0], sources[1]), frames[1], engine[1].rank, halves(rules))


def _packed(table: pl.DataFrame) -> pl.DataFrame:
    """Weights that the engine keeps in a layout of its own, which leaves their tensor empty."""
    emptied = (pl.col("shape_benchmark") == [0]) & (pl.col("shape_target") != [0])
    return table.with_columns(
        reason=pl.when(emptied).then(pl.lit(PACKED)).otherwise("reason"),
        status=pl.when(emptied).then(pl.lit(measures.SHAPE)).otherwise("status"),
    )


def _weights(source: StageSource, process: Process) -> pl.DataFrame:
    frame = (
        source.table(process)
        .rows(pairs.LOADED)
        .filter(
            (pl.col("slot") == "parameters")
            & (pl.col("direction") == "forward")
            & pl.col("module").is_not_null()
        )
    )
    frame = frame.unique(["module", "index"], keep="first", maintain_order=True)
    return frame.with_columns(call=pl.lit(0, pl.Int32))


def _with_pieces(
    table: pl.DataFrame,
    sources: tuple[TensorSource, TensorSource],
    training: pl.DataFrame,
    rank: int,
    halves_: frozenset[str],
) -> pl.DataFrame:
    """The rows whose shapes differ along one axis, as pieces of training's."""
    rows = [
        (row, axis)
        for row in table.with_row_index("row").iter_rows(named=True)
        if row["status"] == measures.SHAPE
        and row["data_name_benchmark"]
        and row["data_name_target"]
        and (axis := _axis(row["shape_benchmark"], row["shape_target"])) is not None
    ]
    size = shards.ranks(
        (row["shape_benchmark"][axis], row["shape_target"][axis])
        for row, axis in rows
        if shards.says_ranks(row["name_benchmark"])
    )
    shapes = dict(training.select("name", "shape").iter_rows())
    found = []
    for row, axis in rows:
        if axis == 0 and shards.is_vocabulary(row["name_benchmark"]):
            found.append(_common_rows(row, sources, rank % size))
            continue
        if size == 1:
            continue
        parts = [int(shapes[name][axis]) for name in row["name_target"].split(SEPARATOR)]
        if axis == 1 or sum(parts) != row["shape_target"][axis]:
            parts = [row["shape_target"][axis]]
        if axis == 0:
            parts = shards.divided(parts, row["module"], halves_)
        found.append(_figures(row, axis, parts, sources, rank % size, size))
    return elementwise.applied(table, [f for f in found if f is not None], ())


def _common_rows(
    row: Mapping[str, Any], sources: tuple[TensorSource, TensorSource], rank: int
) -> dict[str, Any] | None:
    """The rows that a padded vocabulary and training's have in common, on this rank."""
    held, rows = row["shape_benchmark"][0], row["shape_target"][0]
    first, last = rank * held, min(rows, (rank + 1) * held)
    try:
        one, other = (
            source.open(row[f"data_name_{side}"], row[f"shape_{side}"])
            for side, source in zip(("benchmark", "target"), sources, strict=True)
        )
    except TensorFileError:
        # measured before, and said then
        return None
    if last <= first:
        described = elementwise.unmeasured(measures.SHAPE, "this rank has padding rows only")
    else:
        parts = (one.view()[: last - first], other.view()[first:last])
        described = elementwise.described(
            distance(
                *(
                    layout.as_tensor(t, np.ascontiguousarray(part).reshape(last - first, -1))
                    for t, part in zip((one, other), parts, strict=True)
                )
            )
        )
        described["t_reason"] = described["t_reason"] or (
            f"{last - first} rows are compared: the engine has {held} with its padding, training "
            f"{rows}"
        )
    return {**dict.fromkeys(elementwise.RESULT), **described, "row": row["row"]}


def _axis(one: Shape | None, other: Shape | None) -> int | None:
    """The only axis of a weight or bias along which two shapes differ."""
    if not one or not other or len(one) != len(other) or len(one) > 2:
        return None
    unlike = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return unlike[0] if len(unlike) == 1 else None


def _figures(
    row: Mapping[str, Any],
    axis: int,
    parts: Sequence[int],
    sources: tuple[TensorSource, TensorSource],
    rank: int,
    size: int,
) -> dict[str, Any] | None:
    """What :mod:`rlprobe.compare.tensors.elementwise` says of a piece; None where it is none."""
    try:
        one, other = (
            _columns(source.open(row[f"data_name_{side}"], row[f"shape_{side}"]), axis)
            for side, source in zip(("benchmark", "target"), sources, strict=True)
        )
        width = int(one.shape[1])
        other = layout.as_tensor(other, shards.piece(other.view(), parts, width, rank, size))
    except TensorFileError:
        # measured before, and said then
        return None
    except ValueError as error:
        described = elementwise.unmeasured(measures.SHAPE, str(error))
    else:
        described = elementwise.described(distance(one, other))
    return {**dict.fromkeys(elementwise.RESULT), **described, "row": row["row"]}


def _columns(tensor: TensorFile, axis: int) -> TensorFile:
    """A weight as a matrix whose columns are what is divided."""
    view = tensor.view()
    matrix = view.reshape(view.shape[0], -1)
    return layout.as_tensor(tensor, np.ascontiguousarray(matrix.T if axis == 0 else matrix))
