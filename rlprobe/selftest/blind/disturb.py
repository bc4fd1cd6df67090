"""Change one quantity in a copy of a run, consistently: statistics, sketch, tensor and digest."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.dumps.beside import statistics
from rlprobe.judge.roundoff import UNIT
from rlprobe.selftest.blind import beside, told
from rlprobe.selftest.blind.quantities import (
    BUFFER,
    CHOICE,
    CONTRADICTION,
    DTYPE,
    DUMP,
    ELSEWHERE,
    KEY_DATA,
    LAYOUT,
    METRIC,
    MISSING,
    NAN,
    PART,
    PROOF,
    RECORD,
    SETTING,
    SHAPE,
    SINGLE,
    STEPPED,
    TABLE,
    TEN_FLOORS,
    TOKEN,
    TOLD,
    WEIGHT,
    ZERO,
    Quantity,
)

#: Times its floor that a number is moved by; and relative, where it has no floor.
TIMES, MOVED = 10.0, 0.1
_STATISTICS = ("max", "min", "mean", "norm")
_ENDS = ("max", "min")
#: What says a weight or a buffer.
_MEASURED = ("digest", "norm", "sketch")
#: Of fp32 and bf16.
_LARGEST = 3.4028234663852886e38


class UnchangedError(Exception):
    """The disturbance changes nothing: there is no number, or it is zero already."""


def contents(run: Path, quantity: Quantity, way: str) -> dict[str, bytes | None]:
    """The files that hold the quantity, with it disturbed; None for one that is to go.

    Raises:
        UnchangedError: it would be as it was.
    """
    if quantity.kind == LAYOUT:  # of the manifest, which is made anew with whatever has changed
        if way == MISSING and quantity.key != "rank":  # a process is there, or it is not
            raise UnchangedError
        return {}
    data = (run / quantity.file).read_bytes()
    if quantity.kind == KEY_DATA:
        return _saved(run, data, quantity, way)
    return {quantity.file: _CHANGES.get(quantity.kind, _beside)(data, quantity, way)}


def _record(data: bytes, quantity: Quantity, way: str) -> bytes:
    table = pl.read_parquet(io.BytesIO(data))
    at = quantity.row or 0
    if way == MISSING:
        return _parquet(table, pl.concat([table[:at], table[at + 1 :]]))
    row = table.row(at, named=True)
    new = dict(row)
    if way == DTYPE:
        if row["dtype"] is None:
            raise UnchangedError
        new["dtype"] = "torch.bfloat16" if row["dtype"] != "torch.bfloat16" else "torch.float32"
    elif way == PART:
        new[_part(row, (*_STATISTICS, "digest", "value", "sketch"), at)] = None
    elif way == SHAPE:
        shape = list(row["shape"] or [])
        new["shape"] = [*shape[:-1], shape[-1] + 1] if shape else [2]
        new["digest"] = _other(row["digest"])
    else:
        moved = _moved(row, quantity, way)
        if moved == {name: row[name] for name in moved}:
            raise UnchangedError
        new |= moved
        # a plain scalar is its value; a digest and a tensor are what the statistics say
        if way != CONTRADICTION:
            new["digest"] = _other(row["digest"])
    changed = pl.DataFrame([new], schema=table.schema)
    return _parquet(table, pl.concat([table[:at], changed, table[at + 1 :]]))


def _part(row: dict[str, Any], names: Sequence[str], at: int) -> str:
    """One of what says a thing: another one for each row, of those that it has."""
    there = [name for name in names if row.get(name) is not None]
    if len(there) < 2:
        raise UnchangedError
    return there[at % len(there)]


def _moved(row: dict[str, Any], quantity: Quantity, way: str) -> dict[str, Any]:
    size = _size(quantity)
    if way == CONTRADICTION:  # a statistic cannot say less than its own format resolves
        size = max(size, TIMES * UNIT.get(str(row["dtype"]), 0.0))
    factor = {NAN: float("nan"), ZERO: 0.0}.get(way, 1.0 + size)
    if any(abs(row[name] or 0.0) * factor > _LARGEST >= abs(row[name] or 0.0) for name in _ENDS):
        factor = 1.0 / factor  # no format that is recorded holds more: a mask that says never
    found: dict[str, Any] = {
        name: row[name] * factor for name in _STATISTICS if row[name] is not None
    }
    if row["sketch"] is not None and way != CONTRADICTION:
        found["sketch"] = [value * factor for value in row["sketch"]]
    if row["value"] is not None:
        found["value"] = _scalar(row["value"], factor, way)
    if not found:
        raise UnchangedError
    return found


def _scalar(text: str, factor: float, way: str) -> str:
    try:
        number = float(text)
    except ValueError:
        if way == ZERO:
            return ""
        return f"{text} disturbed"
    return repr(number * factor)


def _size(quantity: Quantity) -> float:
    floor = quantity.floor
    return TIMES * floor if floor is not None and floor > 0 else MOVED


def _saved(run: Path, data: bytes, quantity: Quantity, way: str) -> dict[str, bytes | None]:
    """An array and the JSON beside it, which says the array's statistics and format."""
    name = str(Path(quantity.file).with_suffix(".json"))
    there = (run / name).is_file()
    if way == MISSING:
        return dict.fromkeys([quantity.file, *([name] if there else [])])
    values = _array(data, TEN_FLOORS if way == CONTRADICTION else way, quantity.floor or 0.0)
    if way == CONTRADICTION and not there:
        raise UnchangedError
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    found: dict[str, bytes | None] = {quantity.file: out.getvalue()}
    if there and way != CONTRADICTION:
        whole = json.loads((run / name).read_bytes())
        whole["data"] |= statistics(values)
        if way == DTYPE and "dtype" in whole["data"]:
            whole["data"]["dtype"] = f"torch.{values.dtype.name}"
        found[name] = json.dumps(whole).encode()
    return found


def _array(data: bytes, way: str, floor: float) -> npt.NDArray[Any]:
    values = np.load(io.BytesIO(data), allow_pickle=False)
    if not values.size:
        raise UnchangedError
    if way == DTYPE:
        return np.asarray(values.astype(_OTHER.get(values.dtype.name, "float64")))
    if way == SINGLE:
        new = values.copy().reshape(-1)
        wide = np.nan_to_num(new.astype(np.float64))
        at = int(np.argmax(np.abs(wide)))
        # relative to all values of the name, of which these may be a quarter
        whole = 2.0 * TIMES * floor * float(np.linalg.norm(wide))
        new[at : at + 1] = _changed(new[at : at + 1], whole / (abs(wide[at]) or 1.0))
        new = new.reshape(values.shape)
    elif way == ZERO:
        new = np.zeros_like(values)
    elif way == NAN:
        if not np.issubdtype(values.dtype, np.floating):
            raise UnchangedError
        new = np.full_like(values, np.nan)
    else:
        new = _changed(values, 2.0 * TIMES * floor)
    if np.array_equal(new, values, equal_nan=np.issubdtype(values.dtype, np.floating)):
        raise UnchangedError
    return np.asarray(new)


#: Another format for each that frameworks record; what is not here becomes float64.
_OTHER = {"float64": "float32"}


def _changed(values: npt.NDArray[Any], by: float) -> npt.NDArray[Any]:
    if np.issubdtype(values.dtype, np.floating):
        return np.asarray((values * (1.0 + max(MOVED, by))).astype(values.dtype))
    return np.asarray(values ^ True if values.dtype == bool else values + 1)


def _metric(data: bytes, quantity: Quantity, way: str) -> bytes:
    lines = data.splitlines()
    first = 1 if b'"format"' in lines[0] else 0
    entry = json.loads(lines[first + (quantity.row or 0)])
    value = entry["metrics"].get(quantity.name)
    if not isinstance(value, int | float):
        raise UnchangedError
    if way == MISSING:
        del entry["metrics"][quantity.name]
    else:
        by = value * MOVED if quantity.floor is None else TIMES * quantity.floor
        new = {NAN: float("nan"), ZERO: 0.0}.get(way, value + by)
        if new == value or (way == ZERO and abs(value) <= (quantity.floor or 0.0)):
            raise UnchangedError
        entry["metrics"][quantity.name] = new
    lines[first + (quantity.row or 0)] = json.dumps(entry).encode()
    return b"\n".join(lines) + b"\n"


def _proof(data: bytes, quantity: Quantity, way: str) -> bytes:
    value = json.loads(data)
    entry = value["samples"][quantity.row or 0]
    if way == MISSING:
        del value["samples"][quantity.row or 0]
    elif entry["samples"]:
        entry["samples"][0] = _other(entry["samples"][0])
    else:
        raise UnchangedError
    return json.dumps(value).encode()


def _setting(data: bytes, quantity: Quantity, way: str) -> bytes:
    whole = json.loads(data)
    place, _, name = quantity.key.partition("/")
    group = whole["optimizers"][quantity.row or 0]["groups"][int(place)]
    if name.startswith(STEPPED):
        if way != MISSING:
            raise UnchangedError
        group["names"].remove(name.removeprefix(STEPPED))
        return json.dumps(whole).encode()
    settings = group["settings"]
    old = settings.pop(name)
    if way != MISSING:
        settings[name] = _told(old, way)
        if settings[name] == old:
            raise UnchangedError
    return json.dumps(whole).encode()


def _beside(data: bytes, quantity: Quantity, way: str) -> bytes | None:
    if way == MISSING and quantity.kind in (DUMP, TABLE):
        return None
    found = beside.changed(data, quantity, way)
    if found is None:
        raise UnchangedError
    return found


def _told_of(data: bytes, quantity: Quantity, way: str) -> bytes:
    found = told.changed(data, quantity, way)
    if found is None:
        raise UnchangedError
    return found


def _told(value: Any, way: str) -> Any:
    """Another value of a setting; not finite is text, as capture writes it."""
    if isinstance(value, list):
        return [_told(item, way) for item in value]
    if way == NAN:
        return "nan"
    if isinstance(value, bool):
        return False if way == ZERO else not value
    if isinstance(value, int | float):
        return 0 if way == ZERO else value * (1.0 + MOVED)
    return None if way == ZERO else f"{value} disturbed"


def _buffer(data: bytes, quantity: Quantity, way: str) -> bytes:
    whole = json.loads(data)
    line = whole["buffers"][quantity.row or 0]
    kept = next(one for one in line["buffers"] if one["name"] == quantity.key)
    if way == MISSING:
        line["buffers"].remove(kept)
        return json.dumps(whole).encode()
    if way not in (CONTRADICTION, PART):
        kept["digest"] = _other(kept["digest"])
    if way == PART:
        kept[_part(kept, _MEASURED, quantity.row or 0)] = None
    elif way == DTYPE:
        coarse = "torch.bfloat16"
        kept["dtype"] = coarse if kept["dtype"] != coarse else "torch.float32"
    elif way == SHAPE:
        kept["shape"] = [*kept["shape"][:-1], (kept["shape"] or [1])[-1] + 1]
    elif way == NAN:
        kept["norm"] = kept["sketch"] = None
    else:
        factor = 0.0 if way == ZERO else 1.0 + MOVED
        if not kept["norm"]:
            raise UnchangedError
        kept["norm"] *= factor
        if kept["sketch"] is not None and way != CONTRADICTION:
            kept["sketch"] = [value * factor for value in kept["sketch"]]
    return json.dumps(whole).encode()


def _weight(data: bytes, quantity: Quantity, way: str) -> bytes:
    table = pl.read_parquet(io.BytesIO(data))
    at = quantity.row or 0
    if way == MISSING:
        return _parquet(table, pl.concat([table[:at], table[at + 1 :]]))
    row = table.row(at, named=True)
    if way not in (CONTRADICTION, PART, ELSEWHERE):
        row["digest"] = _other(row["digest"])
    if way == PART:
        row[_part(row, _MEASURED, at)] = None
    elif way == ELSEWHERE:
        row |= {"offset": json.dumps("disturbed"), "complete": False}
    elif way == SHAPE:
        row |= {
            name: [*row[name][:-1], row[name][-1] + 1] if row[name] else [2]
            for name in ("shape", "local_shape")
        }
    elif way == DTYPE:  # the same numbers, which are other bytes
        coarse = "torch.bfloat16"
        row["dtype"] = coarse if row["dtype"] != coarse else "torch.float32"
    else:
        factor = {NAN: float("nan"), ZERO: 0.0}.get(way, 1.0 + MOVED)
        moved = {
            name: [number * factor for number in value] if isinstance(value, list) else
            value * factor
            for name in ("norm", "sketch")
            if (value := row.get(name)) is not None
            and (way != CONTRADICTION or name == "norm")
        }  # fmt: skip
        if all(moved[name] == row[name] for name in moved):
            raise UnchangedError
        row |= moved
    changed = pl.DataFrame([row], schema=table.schema)
    return _parquet(table, pl.concat([table[:at], changed, table[at + 1 :]]))


def _line(data: bytes, quantity: Quantity, way: str) -> bytes:
    """A token's sketch or experts; another expert where a sketch would be ten floors off."""
    table = pl.read_parquet(io.BytesIO(data))
    at = quantity.row or 0
    if way == MISSING:
        return _parquet(table, pl.concat([table[:at], table[at + 1 :]]))
    row = table.row(at, named=True)
    if quantity.kind == CHOICE:
        free = sorted(set(range(row["experts"])) - set(row["chosen"]))
        if not free:
            raise UnchangedError
        row["chosen"] = sorted([*row["chosen"][1:], free[0]])
    else:
        factor = {NAN: float("nan"), ZERO: 0.0}.get(way, 1.0 + _size(quantity))
        if not any(row["sketch"]):
            raise UnchangedError
        row["sketch"] = [value * factor for value in row["sketch"]]
    changed = pl.DataFrame([row], schema=table.schema)
    return _parquet(table, pl.concat([table[:at], changed, table[at + 1 :]]))


def _parquet(old: pl.DataFrame, new: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    new.cast(old.schema).write_parquet(out)
    return out.getvalue()


def _other(digest: str | None) -> str | None:
    """Another digest of the same form."""
    if digest is None:
        return None
    prefix, colon, text = digest.rpartition(":")
    return f"{prefix}{colon}{hashlib.sha256(text.encode()).hexdigest()[: len(text)]}"


#: How a file of each kind is changed; of any other kind, what lies beside the numbers.
_CHANGES: dict[str, Callable[[bytes, Quantity, str], bytes | None]] = {
    RECORD: _record,
    METRIC: _metric,
    PROOF: _proof,
    SETTING: _setting,
    BUFFER: _buffer,
    WEIGHT: _weight,
    **dict.fromkeys(TOLD, _told_of),
    **dict.fromkeys((TOKEN, CHOICE), _line),
}
