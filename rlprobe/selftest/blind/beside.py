"""What a run records beside its numbers: where parts lie, the same tensors by coordinates, calls.

Of calls the first, the middle and the last record of each slot stand for all: who made a call is
held against nothing, and there are thousands.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from rlprobe.diagnose import unheld
from rlprobe.diagnose.gate import by_coordinates
from rlprobe.diagnose.run import Examined
from rlprobe.judge.reasons import COPIED, LATER_STEP, NO_PARTNER, OTHER_PLACES, SHOWN
from rlprobe.judge.stage import Stage
from rlprobe.selftest.blind.quantities import (
    CALL,
    CONTRADICTION,
    COORDINATE,
    DTYPE,
    DUMP,
    ELSEWHERE,
    LAYOUT,
    MISSING,
    NAN,
    PLACE,
    SHAPE,
    TABLE,
    ZERO,
    Quantity,
)
from rlprobe.store.manifest import NAME as MANIFEST
from rlprobe.store.manifest import Process
from rlprobe.store.read import Run

_GRADIENTS = "gradients.parquet"
_REQUIRES = "requires_grad"
#: Times its floor that a number is moved by; and relative, where it has no floor.
_TIMES, _MOVED = 10.0, 0.1
#: Directories of a run whose files are disturbed entry by entry only, or were made by others.
_OTHERS = ("records", "dump", "states", "rollouts", "tensors.parquet")


def of(judged: Examined) -> list[Quantity]:
    """Everything of these kinds that the target recorded."""
    target = judged.target
    found = [*_places(judged), *_dumps(target), *_tables(target), *_layout(target)]
    for name, finding in judged.step.findings.items():
        found += _coordinates(judged, name, finding.stage)
        found += _calls(judged, name, finding.stage)
    return found


def _later(judged: Examined, step: int) -> str | None:
    """Why nothing of a step is judged."""
    return None if step in {one.number for one in judged.every} else LATER_STEP


def _places(judged: Examined) -> Iterator[Quantity]:
    table = judged.target.gradients()
    if table is None:
        return
    keys = ("step", "stage", "rank", "name")
    for number, (step, stage, rank, name) in enumerate(table.select(keys).iter_rows()):
        group = (PLACE, stage, "", "", str(step), str(rank))
        yield Quantity(
            PLACE, stage, _GRADIENTS, number, group, f"place of {name} ({stage}, step {step})",
            None, _later(judged, step),
        )  # fmt: skip


def _coordinates(judged: Examined, name: str, stage: Stage) -> Iterator[Quantity]:
    table = judged.target.logical(name)
    if table is None:
        return
    known = by_coordinates.floors(stage.rows)
    otherwise = stage.laid_out is not None or stage.misplaced is not None
    because = stage.rows.filter(pl.col("unjudged_because").is_not_null()).select(
        pl.struct("module", "direction", "slot").alias("of"), why="unjudged_because"
    )
    unjudged = {tuple(key.values()): why for key, why in because.iter_rows()}
    keys = ("step", "rank", "module", "direction", "slot")
    for number, (step, rank, *key) in enumerate(table.select(keys).iter_rows()):
        group = (COORDINATE, name, f"{key[2]}/{key[1]}", "", str(step), str(rank))
        floor = known.get((key[0], key[1], key[2]))
        declared = _later(judged, step) or (OTHER_PLACES if otherwise else None)
        if floor is None:
            declared = declared or unjudged.get(tuple(key))
        yield Quantity(
            COORDINATE, name, f"logical/{name}.parquet", number, group,
            f"{'.'.join(map(str, key))} by coordinates (step {step}, rank {rank})",
            None if floor is None else by_coordinates.OF_CALLS * floor, declared,
        )  # fmt: skip


def _calls(judged: Examined, name: str, stage: Stage) -> Iterator[Quantity]:
    file = f"records/{name}.parquet"
    table = pl.read_parquet(judged.target.records(name), glob=False).with_row_index("_row")
    paired = set(
        stage.rows.filter(pl.col("status") == "matched").get_column("name_target").drop_nulls()
    )
    otherwise = stage.laid_out is not None or stage.misplaced is not None
    for column, own in (("stack", SHOWN), ("order", SHOWN), (_REQUIRES, None)):
        here = table.filter(pl.col(column).is_not_null())
        for key, rows in here.group_by("step", "rank", "slot", "direction", maintain_order=True):
            step, rank, slot, direction = key
            group = (CALL, name, column, f"{slot}/{direction}", str(step), str(rank))
            for at in dict.fromkeys((0, rows.height // 2, rows.height - 1)):
                called = rows.item(at, "name")
                lone = None if called in paired else NO_PARTNER
                declared = own or _later(judged, int(step)) or (
                    OTHER_PLACES if otherwise else lone
                )  # fmt: skip
                yield Quantity(
                    CALL, name, file, rows.item(at, "_row"), group,
                    f"{column} of {called} (step {step}, rank {rank})", None, declared, key=column,
                )  # fmt: skip


def _dumps(target: Run) -> Iterator[Quantity]:
    for path in unheld.copies(target):
        parts = path.split("/")
        group = (DUMP, parts[1], parts[-1], "", parts[2], "")
        yield Quantity(DUMP, None, path, None, group, path, None, COPIED)


def _tables(target: Run) -> Iterator[Quantity]:
    """Each file as a whole, which may be lost as such."""
    for file in target.manifest.files:
        kind, _, rest = file.path.partition("/")
        if kind in _OTHERS and file.path != unheld.CONFIGURATION:
            continue
        stage = rest.removesuffix(".parquet") if kind == "token_sketches" else None
        yield Quantity(TABLE, stage, file.path, None, (TABLE, file.path), file.path, None, None)


def _layout(target: Run) -> Iterator[Quantity]:
    for number, process in enumerate(target.manifest.layout):
        of = f"{process.role}, rank {process.rank}"
        for field in type(process).model_fields:
            group = (LAYOUT, process.role, field, "", "", str(process.rank))
            yield Quantity(
                LAYOUT, None, MANIFEST, number, group, f"{field} of {of}", None, None, key=field
            )


def laid_out(layout: Sequence[Process], quantity: Quantity, way: str) -> list[Process]:
    """The processes with one of them in another place, or without it."""
    at = quantity.row or 0
    old = getattr(layout[at], quantity.key)
    if way == MISSING:
        return [*layout[:at], *layout[at + 1 :]]
    if isinstance(old, str) or quantity.key == "backend":
        new: Any = f"{old} disturbed"
    elif isinstance(old, bool) or quantity.key == "sequence_parallel":
        new = not old
    else:
        new = (old or 0) + 1
    one = layout[at].model_copy(update={quantity.key: new})
    return [*layout[:at], one, *layout[at + 1 :]]


def changed(data: bytes, quantity: Quantity, way: str) -> bytes | None:
    """The file with one of these disturbed; None where that changes nothing."""
    if quantity.kind == DUMP:
        return b"{}"
    table = pl.read_parquet(io.BytesIO(data))
    at = quantity.row or 0
    old = table.row(at, named=True)
    if quantity.kind == CALL:
        new: dict[str, Any] | None = old | {quantity.key: _called(old[quantity.key], way)}
    elif way == MISSING:
        new = None
    else:
        new = old | (_placed(old, way) if quantity.kind == PLACE else _made(old, quantity, way))
    if new == old:
        return None
    one = pl.DataFrame([] if new is None else [new], schema=table.schema)
    out = io.BytesIO()
    pl.concat([table[:at], one, table[at + 1 :]]).write_parquet(out)
    return out.getvalue()


def _called(value: Any, way: str) -> Any:
    if isinstance(value, bool):
        return None if way == MISSING else not value
    if isinstance(value, int):  # a place in the order there must be
        return value if way == MISSING else value + 100_000
    return None if way == MISSING else f"{value} disturbed"


def _placed(row: dict[str, Any], way: str) -> dict[str, Any]:
    """Another part, another place, or copies of another format."""
    if way == ELSEWHERE:
        return {"offset": json.dumps("disturbed"), "complete": False}
    if way == SHAPE:
        local = (
            [*row["local_shape"][:-1], row["local_shape"][-1] + 1] if row["local_shape"] else [2]
        )
        return {"local_shape": local}
    return {"kept": "torch.bfloat16" if row["kept"] != "torch.bfloat16" else None}


def _made(row: dict[str, Any], quantity: Quantity, way: str) -> dict[str, Any]:
    """All numbers of a record by coordinates together, or what they are of."""
    if way == DTYPE:
        coarse = "torch.bfloat16"
        return {"dtype": coarse if row["dtype"] != coarse else "torch.float32"}
    if way == SHAPE:
        return {"width": row["width"] + 1, "features": row["features"] + 1}
    if way == ELSEWHERE:
        return {"identity": hashlib.sha256(row["identity"].encode()).hexdigest()[:16]}
    size = _TIMES * quantity.floor if quantity.floor else _MOVED
    factor = {NAN: math.nan, ZERO: 0.0}.get(way, 1.0 + size)
    numbers = {name: row[name] * factor for name in ("sum", "max", "min")}
    numbers["squares"] = row["squares"] * factor**2
    if way != CONTRADICTION:
        numbers["sketch"] = [value * factor for value in row["sketch"]]
    return numbers
