"""Forward passes of a whole model in one process's dump: their records, token ids and positions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.compare.match import matcher
from rlprobe.compare.match.rules import Rules
from rlprobe.compare.stage_sources import Process
from rlprobe.dumps.tensors.source import TensorSource
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

Integers = npt.NDArray[np.int64]

#: Modules whose input is the token ids: Hugging Face and the engines, Megatron, GPT-2.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in)$")
#: What positions are called as keyword arguments, and modules that take them as arguments.
_POSITIONS = ("position_ids", "positions")
_TAKES_POSITIONS = re.compile(r"(^|\.)(rotary_emb|layers\.\d+|embedding)$|^$|^model$")
_INTEGERS = ("torch.int64", "torch.int32")


@dataclass(frozen=True)
class Grid:
    """The tokens of one pass: ids of shape [rows, length], and positions where they are known."""

    ids: Integers
    positions: Integers | None
    #: Where sequences begin in a packed row, known from elsewhere.
    starts: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])


@dataclass(frozen=True)
class Pass:
    """One forward pass of the model."""

    process: Process
    number: int
    grid: Grid
    #: Its records, columns of :data:`rlprobe.compare.match.pairs.LOADED`.
    records: pl.DataFrame
    tensors: TensorSource


def passes(
    process: Process, records: pl.DataFrame, tensors: TensorSource, rules: Rules
) -> list[Pass]:
    """The passes of a process whose token ids were dumped, in order.

    Args:
        records: columns of :data:`rlprobe.compare.match.pairs.LOADED`, in execution order.
        tensors: the process's tensor files.
        rules: rewrite module paths, so that an embedding is known whatever it is called.

    Raises:
        TensorFileError: token ids or positions are damaged.
    """
    forward = records.filter(
        pl.col("module").is_not_null()
        & (pl.col("direction") == "forward")
        & pl.col("slot").is_in(["input", "output", "parameters"])
    )
    if forward.is_empty():
        return []
    known = forward.with_columns(path=renamed(forward.get_column("module"), rules))
    ids = known.filter(
        pl.col("path").str.contains(_EMBEDDING.pattern)
        & (pl.col("slot") == "input")
        & pl.col("dtype").is_in(_INTEGERS)
        & pl.col("data_name").is_not_null()
    ).unique("call", keep="first", maintain_order=True)
    starts = ids.get_column("order")
    numbered = known.with_columns(number=_numbers(known, len(starts), starts))
    found = []
    for number, row in enumerate(ids.iter_rows(named=True)):
        mine = numbered.filter(pl.col("number") == number)
        values = _integers(tensors.open(row["data_name"], row["shape"]))
        grid = Grid(_as_rows(values), _positions(mine, values, tensors))
        found.append(Pass(process, number, grid, mine.drop("path", "number"), tensors))
    return found


def renamed(modules: pl.Series, rules: Rules) -> pl.Series:
    """Module paths as the rules spell them."""
    new = matcher.rewritten(modules.unique().to_list(), rules)
    return modules.replace_strict({old: path for old, (path, _) in new.items()})


def _numbers(known: pl.DataFrame, count: int, starts: pl.Series) -> pl.Series:
    """The pass of each record.

    A module that runs once a pass is counted; one that runs more or less often (an expert) belongs
    to the pass whose embedding ran last before it.
    """
    calls = pl.col("call").rank("dense").over("module", "op") - 1
    often = pl.col("call").n_unique().over("module", "op")
    order = known.get_column("order")
    by_order = starts.search_sorted(order, side="right").cast(pl.Int64) - 1
    return known.select(
        pl.when(often == count)
        .then(calls.cast(pl.Int64))
        .otherwise(pl.max_horizontal(by_order, pl.lit(0)))
        .alias("number")
    ).to_series()


def _positions(records: pl.DataFrame, ids: Integers, tensors: TensorSource) -> Integers | None:
    """Positions of the tokens, from whichever module was given them."""
    candidates = records.filter(
        (pl.col("slot") == "input")
        & pl.col("dtype").is_in(_INTEGERS)
        & pl.col("data_name").is_not_null()
        & (
            pl.col("index").is_in(_POSITIONS)
            | (
                pl.col("path").str.contains(_TAKES_POSITIONS.pattern)
                & pl.col("index").is_in(["0", "1"])
            )
        )
    )
    for row in candidates.iter_rows(named=True):
        if int(np.prod(row["shape"] or [0])) != ids.size:
            continue
        values = _integers(tensors.open(row["data_name"], row["shape"])).reshape(ids.shape)
        named = row["index"] in _POSITIONS
        # a positional argument of the same size may be the ids themselves
        if named or not np.array_equal(values, ids):
            return _as_rows(values)
    return None


def _integers(tensor: TensorFile) -> Integers:
    if tensor.dtype.kind != "int":
        raise TensorFileError(f"token ids or positions of type {tensor.dtype.name}")
    return np.array(tensor.view(), dtype=np.int64)


def _as_rows(values: Integers) -> Integers:
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
