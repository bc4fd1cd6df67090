"""Execution order: from the order in which records were completed to that in which they ran.

A dump lists a module call when it is complete, so a parent stands after its children and brings its
inputs along, which were there before them. And gradients, changes and losses stand in a file of
their own. Here every row gets its time:

- ``micro_batch``: which forward and backward over the model it belongs to, from 0; a new one
  begins with each call of the first module. Updates come after all of them.
- ``phase``: forward, loss, backward, gradients, changes.
- ``sequence``: within the phase; a call's inputs stand before everything that ran inside it.

``update`` is the update of weights within the stage that a row belongs to, from 0, and
``before_update`` marks what ran before the first update of weights within the stage. Later, weights
differ by inheritance. Where no update was recorded, that there was one shows in the weights that
later passes were given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from rlprobe.compare.stacks import call_of
from rlprobe.dumps import apinames, construct
from rlprobe.judge.nesting import Told

FORWARD, LOSS, BACKWARD, GRADIENTS, CHANGES = range(5)
_UPDATED = ("grad", "grad_reduced", "grad_clipped")


@dataclass(slots=True)
class Call:
    """One call of a module (or functional operation) in one direction."""

    module: str | None
    operator: str | None
    number: int | None
    direction: str
    #: First and last row of its own, in the order of the dump.
    first: int
    last: int
    #: First row of everything that ran inside it.
    start: int
    micro_batch: int = 0
    children: list[int] = field(default_factory=list)
    parent: int | None = None
    #: Path of the module whose call it ran in, recorded or not, where the dump says so.
    within: str | None = None


def timeline(rows: pl.DataFrame, told: Told | None = None) -> tuple[pl.DataFrame, list[Call]]:
    """Rows of one process and stage in execution order, and their calls.

    Args:
        rows: columns of compare's records.parquet, of one step and rank.
        told: which call ran inside which, where the dump says so.

    Returns:
        the rows with ``call_id`` (index into the calls), ``micro_batch``, ``phase``, ``sequence``,
        ``update``, ``before_update`` and ``within`` (the module whose call it ran in, null where
        that is not told), sorted; and the calls.
    """
    rows = rows.sort("order", maintain_order=True).with_row_index("_at")
    rows = rows.with_columns(
        _key=pl.concat_str(
            [
                pl.coalesce("module", "op", "name"),
                pl.col("call").cast(pl.String).fill_null("-"),
                pl.col("direction"),
                pl.when(pl.col("slot") == "grad").then(pl.lit("g")).otherwise(pl.lit("")),
            ],
            separator="\x1f",
        )
    )
    rows = rows.with_columns(call_id=pl.col("_key").rle_id().cast(pl.Int64))
    calls = _calls(rows)
    _nest(calls)
    if told is not None:
        _nest_as_told(calls, rows, told)
    _number_micro_batches(calls)
    table = pl.DataFrame(
        {
            "call_id": range(len(calls)),
            "start": [call.start for call in calls],
            "micro_batch": [call.micro_batch for call in calls],
            "depth": [(call.module or "").count(".") for call in calls],
            "within": [call.within for call in calls],
        },
        schema={
            "call_id": pl.Int64,
            "start": pl.Int64,
            "micro_batch": pl.Int64,
            "depth": pl.Int64,
            "within": pl.String,
        },
    )
    rows = rows.join(table, on="call_id", how="left", maintain_order="left")
    rows = _ordered(rows)
    return rows.drop("_key", "start", "depth", "_at"), calls


def _calls(rows: pl.DataFrame) -> list[Call]:
    grouped = rows.group_by("call_id", maintain_order=True).agg(
        pl.col("module").first(),
        pl.col("op").first(),
        pl.col("call").first(),
        pl.col("direction").first(),
        first=pl.col("_at").min(),
        last=pl.col("_at").max(),
    )
    return [
        Call(module, op, number, direction, first, last, first)
        for _, module, op, number, direction, first, last in grouped.iter_rows()
    ]


def _nest(calls: list[Call]) -> None:
    """Find each call's children: those completed before it, below its path, not yet claimed."""
    open_: dict[str, list[int]] = {"forward": [], "backward": []}
    for index, call in enumerate(calls):
        pending = open_.get(call.direction)
        if pending is None:
            continue
        if call.module is not None:
            prefix = f"{call.module}." if call.module else ""
            take = len(pending)
            while take and _inside(calls[pending[take - 1]], prefix):
                take -= 1
            # Functional calls before the first child are the parent's only if a child follows.
            while take < len(pending) and calls[pending[take]].module is None:
                take += 1
            for child in pending[take:]:
                calls[child].parent = index
                call.start = min(call.start, calls[child].start)
            call.children = pending[take:]
            del pending[take:]
        pending.append(index)


def _nest_as_told(calls: list[Call], rows: pl.DataFrame, told: Told) -> None:
    """Nest the calls that the dump tells of as it does; the others stay as :func:`_nest` left them.

    A parent is listed after what ran inside it; a file that says otherwise is not followed.
    """
    name = pl.coalesce(f"name_{told.side}", "name").first().alias("name")
    names = rows.group_by("call_id", maintain_order=True).agg(name).get_column("name")
    known = [call_of(name) for name in names]
    numbers: dict[str, int] = {}
    for index, own in enumerate(known):
        numbers.setdefault(own, index)
    outer = {own: construct.around(told.around, own) for own in known if own in told.around}
    nearest = pl.Series([calls[0] for calls in outer.values() if calls], dtype=pl.String).unique()
    paths = dict(zip(nearest, apinames.parse(nearest).get_column("module"), strict=True))
    for index, (call, own) in enumerate(zip(calls, known, strict=True)):
        if own in outer:
            call.within = paths[outer[own][0]] if outer[own] else None
            recorded = (numbers[name] for name in outer[own] if numbers.get(name, -1) > index)
            call.parent = next(recorded, None)
    for call in calls:
        call.children, call.start = [], call.first
    for index, call in enumerate(calls):  # what ran inside a call comes before it
        if call.parent is not None:
            parent = calls[call.parent]
            parent.children.append(index)
            parent.start = min(parent.start, call.start)


def _inside(call: Call, prefix: str) -> bool:
    if call.module is None:
        return True
    return call.module.startswith(prefix) and call.module != prefix.rstrip(".")


def _number_micro_batches(calls: list[Call]) -> None:
    """A pass begins where the first module of the stage is called again."""
    forward = [call for call in calls if call.direction == "forward" and call.module is not None]
    if not forward:
        return
    leader = forward[0].module
    starts = [call.start for call in forward if call.module == leader]
    position = -1
    ordered = sorted(range(len(calls)), key=lambda i: (calls[i].start, calls[i].first))
    for index in ordered:
        call = calls[index]
        while position + 1 < len(starts) and starts[position + 1] <= call.start:
            position += 1
        call.micro_batch = max(position, 0)


def _ordered(rows: pl.DataFrame) -> pl.DataFrame:
    slot, direction = pl.col("slot"), pl.col("direction")
    phase = (
        pl.when(slot == "loss")
        .then(LOSS)
        .when(slot == "change")
        .then(CHANGES)
        .when(direction == "update")
        .then(GRADIENTS)
        .when(direction == "backward")
        .then(BACKWARD)
        .otherwise(FORWARD)
    )
    coming = slot.is_in(["input", "parameters"])
    rows = rows.with_columns(
        phase=phase,
        # A loss is one number a pass; gradients and changes belong to an update, after all passes.
        micro_batch=pl.when(slot == "loss").then(pl.col("call")).otherwise(pl.col("micro_batch")),
        inside=pl.when(coming).then(pl.col("start")).otherwise(pl.col("_at")),
        coming=coming,
    )
    # A parameter's gradient is made of what arrives at its module's output, although a dump may
    # list it first.
    arrives = (slot == "input") & (direction == "backward")
    arrival = pl.col("inside").filter(arrives).min().over("module", "call")
    follows = (slot == "grad") & (direction == "backward") & pl.col("module").is_not_null()
    rows = rows.with_columns(
        inside=pl.when(follows)
        .then(pl.max_horizontal("inside", arrival))
        .otherwise(pl.col("inside"))
    )
    passes = rows.filter(pl.col("phase").is_in([FORWARD, BACKWARD])).get_column("micro_batch").max()
    passes = int(passes) + 1 if isinstance(passes, int) else 1
    updates = (
        rows.filter(slot.is_in(_UPDATED) & (direction == "update")).get_column("call").n_unique()
    )
    # Weights change after each update: only what ran before the first can be a first divergence.
    before = passes // updates if updates > 1 and passes % updates == 0 else passes
    if updates == 0:
        before = _moved(rows, passes)
    last = passes * 2
    changed = rows.filter(slot == "change").get_column("call").n_unique()
    # A change that is recorded once is of all updates.
    by_all = (pl.col("phase") == CHANGES) & pl.lit(updates > 1 and changed == 1)
    rows = rows.with_columns(
        update=pl.when(by_all)
        .then(updates - 1)
        .when(pl.col("phase") >= GRADIENTS)
        .then(pl.col("call").fill_null(0))
        .otherwise(pl.col("micro_batch") // max(before, 1))
        .cast(pl.Int64)
        if updates > 1
        else (pl.col("micro_batch") >= before).cast(pl.Int64)
        if updates == 0
        else pl.lit(0, pl.Int64)
    )
    rows = rows.with_columns(
        micro_batch=pl.when(pl.col("phase") >= GRADIENTS)
        .then(last + pl.col("call").fill_null(0))
        .otherwise(pl.col("micro_batch"))
    ).with_columns(
        before_update=pl.when(pl.col("phase") >= GRADIENTS)
        .then((pl.col("call").fill_null(0) == 0) | (pl.lit(updates) <= 1))
        # where one update ends the stage, more losses than passes are those of a side that cuts its
        # batch otherwise
        .otherwise((pl.col("micro_batch") < before) | pl.lit(updates <= 1 and before == passes)),
        # Inputs before what ran inside, the outermost first; results in the order of the dump.
        _order=pl.when(pl.col("coming")).then(0).otherwise(1),
        _depth=pl.when(pl.col("coming")).then(pl.col("depth")).otherwise(0),
    )
    rows = rows.sort(
        "micro_batch",
        "phase",
        "inside",
        "_order",
        "_depth",
        "_at",
        maintain_order=True,
        nulls_last=True,
    )
    return rows.with_columns(sequence=pl.int_range(pl.len(), dtype=pl.Int64)).drop(
        "inside", "coming", "_order", "_depth"
    )


def _moved(rows: pl.DataFrame, passes: int) -> int:
    """The first pass with other weights than the first one's, where no update was recorded; as many
    as there are where weights stay, or are not recorded."""
    given = rows.filter((pl.col("slot") == "parameters") & (pl.col("direction") == "forward"))
    if given.is_empty():
        return passes
    first = pl.col("norm_benchmark").sort_by("micro_batch").first().over("module", "index")
    found = given.filter(pl.col("norm_benchmark") != first).get_column("micro_batch").min()
    return int(found) if isinstance(found, int) else passes
