"""What the processes of a run left in ``side/``, brought together into one table or file each."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.rows import of_another, whole
from rlprobe.errors import StoreError
from rlprobe.store.keys import canonical_json

#: Columns of ``weights.parquet``: a row per parameter, step and process that holds a part of it.
WEIGHTS: dict[str, Any] = {
    "step": pl.Int32,
    "stage": pl.String,
    "role": pl.String,
    "rank": pl.Int32,
    "name": pl.String,
    "dtype": pl.String,
    "shape": pl.List(pl.Int64),
    "local_shape": pl.List(pl.Int64),
    # where a shard lies in the whole parameter, as JSON; null where it is the whole or unknown
    "offset": pl.String,
    "digest": pl.String,
    "norm": pl.Float64,
    "sketch": pl.List(pl.Float32),
    "complete": pl.Boolean,
}
#: Columns of ``gradients.parquet``: which part of a parameter a process has the gradient of, where
#: its optimizer has another part than its model (Megatron's distributed optimizer).
GRADIENTS: dict[str, Any] = {
    key: WEIGHTS[key]
    for key in ("step", "stage", "role", "rank", "name", "shape", "local_shape", "offset",
                "complete")
}  # fmt: skip
#: Further ones, which runs of earlier versions lack.
COPIES: dict[str, Any] = {
    # format of the copies that changes were read off, which lie as the gradients do; null where
    # changes are those of the model's own weights
    "kept": pl.String,
}
FORMAT = 1
_SHAPES = ("shape", "local_shape")
_FILE = re.compile(r"(?P<role>[a-z][a-z0-9_]*)-rank(?P<rank>\d{1,9})\.jsonl?")


class _Weight(msgspec.Struct, forbid_unknown_fields=True):
    """One line of ``parts/weights``."""

    step: int
    stage: str
    role: str
    rank: int
    name: str
    dtype: str
    shape: list[int]
    local_shape: list[int]
    digest: str | None
    norm: float | None
    sketch: list[float] | None
    complete: bool
    offset: Any = None

    def row(self) -> tuple[Any, ...]:
        values = msgspec.structs.asdict(self)
        if self.offset is not None:
            values["offset"] = canonical_json(self.offset).decode()
        return tuple(values[column] for column in WEIGHTS)


class _Gradient(msgspec.Struct, forbid_unknown_fields=True):
    """One line of ``parts/gradients``."""

    step: int
    stage: str
    role: str
    rank: int
    name: str
    shape: list[int]
    local_shape: list[int]
    complete: bool
    offset: Any = None
    kept: str | None = None

    def row(self) -> tuple[Any, ...]:
        values = msgspec.structs.asdict(self)
        if self.offset is not None:
            values["offset"] = canonical_json(self.offset).decode()
        return tuple(values[column] for column in GRADIENTS | COPIES)


def _table(
    side: Path,
    part: str,
    kind: type[_Weight] | type[_Gradient],
    schema: dict[str, Any],
    otherwise: str,
) -> pl.DataFrame | None:
    """All lines of a part as a table; None where there are none."""
    rows = []
    for origin, value in _lines(side, part):
        try:
            rows.append(msgspec.convert(value, kind).row())
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise StoreError(f"{origin} is {otherwise}: {error}") from error
    if not rows:
        return None
    try:
        return pl.DataFrame(rows, schema=schema, orient="row")
    except (pl.exceptions.PolarsError, OverflowError) as error:
        raise StoreError(f"{side}/parts/{part}: {error}") from error


def gradients(side: Path) -> pl.DataFrame | None:
    """Where the gradients of every process lie in their parameters; None when nothing says it.

    Raises:
        StoreError: a line is not what capture writes.
    """
    table = _table(side, "gradients", _Gradient, GRADIENTS | COPIES, "no place of a gradient")
    if table is None:
        return None
    first = table.unique(["step", "stage", "rank", "name"], keep="first", maintain_order=True)
    return first.sort("step", "stage", "role", "rank", maintain_order=True)


def weights(side: Path) -> pl.DataFrame | None:
    """Every process's parameters in one table; None when none was digested.

    Raises:
        StoreError: a line is not what capture writes.
    """
    table = _table(side, "weights", _Weight, WEIGHTS, "not a record of a weight")
    if table is None:
        return None
    place = pl.col("stage").replace_strict(
        list(stages.STAGES), list(range(len(stages.STAGES))), default=-1, return_dtype=pl.Int32
    )
    return table.sort("step", place, "role", "rank", maintain_order=True)


def require(table: pl.DataFrame, where: str) -> pl.DataFrame:
    """A table of weights or gradients made elsewhere, if its rows are what capture writes.

    Args:
        table: columns of :data:`WEIGHTS` or of :data:`GRADIENTS`.
        where: its path, for the error.

    Raises:
        StoreError: a row is none.
    """
    texts = [name for name in ("stage", "role", "name", "dtype") if name in table.columns]
    good = [
        pl.col("step", "rank", "complete", *texts).is_not_null(),
        pl.min_horizontal("step", "rank") >= 0,
        *(whole(name) & (pl.col(name).list.min().fill_null(0) >= 0) for name in _SHAPES),
    ]
    if "sketch" in table.columns:
        size = pl.col("sketch").list.len()
        known = pl.col("sketch").is_not_null()
        # sketches of one table are added up and held against each other
        good.append(~known | (whole("sketch") & (size == size.drop_nulls().first())))
    what = "parts of parameters that capture writes"
    return of_another(table, pl.all_horizontal(good), what, where, "name")


def mock_proof(side: Path) -> dict[str, Any] | None:
    """``mock_proof.json``: which samples each process trained on, row by row.

    Raises:
        StoreError: a line is not what capture writes.
    """
    rows = []
    for origin, row in _lines(side, "samples"):
        match row:
            case {"step": int(), "stage": str(), "rank": int(), "samples": list()}:
                rows.append({"role": origin.role, **row})
            case _:
                raise StoreError(f"{origin} is not a record of samples")
    rows += _generated(side)
    if not rows:
        return None
    rows.sort(key=lambda row: (row["step"], row["role"], row["rank"]))
    return {"format": FORMAT, "samples": rows}


def _generated(side: Path) -> list[dict[str, Any]]:
    """The samples that the forwards of an inference engine's processes belong to, in their order.

    A request is numbered among those of its step and replica, and its number is the micro-step of
    what was recorded of it. After one that is not known none is named: they would be taken for
    others.
    """
    samples = {row.get("request"): row.get("sample") for _, row in _lines(side, "requests")}
    known: dict[tuple[str, str, int, int], dict[int, Any]] = {}
    for origin, row in _lines(side, "captured"):
        match row:
            case {"request": str() as request, "step": int() as step, "rank": int() as rank}:
                number = request.rpartition(":")[2]
                if not number.isdecimal():
                    raise StoreError(f"{origin}: the request {request!r} has no number")
                stage = str(row.get("stage"))
                if request in samples:
                    numbered = known.setdefault((stage, origin.role, step, rank), {})
                    numbered[int(number)] = samples[request]
    return [
        {
            "role": role,
            "step": step,
            "rank": rank,
            "stage": stage,
            "samples": [numbered[n]],
        }
        for (stage, role, step, rank), numbered in known.items()
        for n in itertools.takewhile(numbered.__contains__, itertools.count())
    ]


def environment(side: Path) -> dict[str, Any]:
    """``environment.json``: versions and settings of each process, by ``{role}-rank{R}``."""
    return {
        "format": FORMAT,
        "processes": {
            f"{origin.role}-rank{origin.rank}": value
            for origin, value in _documents(side, "environment")
        },
    }


def layout(side: Path) -> list[dict[str, Any]]:
    """Parallel layout, a mapping per process."""
    return [value for _, value in _documents(side, "layout")]


def captured(side: Path) -> list[dict[str, Any]]:
    """What each process captured of each stage and step, as it said itself.

    An inference engine's process knows the request that it served; which sample the request became
    is known where it was answered (``parts/requests``), and joined here.
    """
    samples = {row.get("request"): row.get("sample") for _, row in _lines(side, "requests")}
    rows = []
    for _, row in _lines(side, "captured"):
        request = row.pop("request", None)
        rows.append({**row, "samples": [samples[request]]} if request in samples else row)
    return rows


def joined(side: Path) -> list[dict[str, Any]]:
    """What each process loaded of another run's state, by role, step and rank.

    Raises:
        StoreError: a line is not what capture writes.
    """
    rows = []
    for origin, row in _lines(side, "joined"):
        if not isinstance(row.get("step"), int):
            raise StoreError(f"{origin} says of no step what was loaded")
        rows.append({"role": origin.role, "rank": origin.rank, **row})
    return sorted(rows, key=lambda row: (row["role"], row["step"], row["rank"]))


def optimizers(side: Path) -> list[dict[str, Any]]:
    """What optimizers were told as they stepped: a row an update that was told otherwise than the
    one before it, of all ranks that say the same.

    Raises:
        StoreError: a line is not what capture writes.
    """
    ranks: dict[bytes, list[int]] = {}
    for origin, row in _lines(side, "optimizers"):
        match row:
            case {"step": int(), "stage": str(), "update": int(), "groups": list()}:
                key = canonical_json({"role": origin.role, **row})
                ranks.setdefault(key, []).append(origin.rank)
            case _:
                raise StoreError(f"{origin} is not what an optimizer was told")
    rows = [{**_parse(key, str(side)), "ranks": of} for key, of in ranks.items()]
    return sorted(rows, key=lambda row: (row["step"], row["role"], row["stage"], row["update"],
                                         row["ranks"]))  # fmt: skip


def buffers(side: Path) -> list[dict[str, Any]]:
    """What modules kept beside their parameters: a row each time a model entered a stage, of all
    ranks that kept the same.

    Raises:
        StoreError: a line is not what capture writes.
    """
    ranks: dict[bytes, list[int]] = {}
    for origin, row in _lines(side, "buffers"):
        match row:
            case {"step": int(), "stage": str(), "role": str(), "buffers": list()}:
                key = canonical_json({k: v for k, v in row.items() if k != "rank"})
                ranks.setdefault(key, []).append(origin.rank)
            case _:
                raise StoreError(f"{origin} is not what a model's buffers are")
    rows = [{**_parse(key, str(side)), "ranks": sorted(of)} for key, of in ranks.items()]
    return sorted(rows, key=lambda row: (row["step"], row["role"], row["stage"], row["ranks"]))


def first_step(side: Path) -> int | None:
    """The trainer's number of the step that this run began with."""
    path = side / "parts" / "first_step.json"
    if not path.is_file():
        return None
    value = _parse(path.read_bytes(), str(path))
    if not isinstance(value.get("first_step"), int):
        raise StoreError(f"{path}: first_step is {value.get('first_step')!r}, not a number")
    return int(value["first_step"])


def run_facts(side: Path) -> dict[str, Any]:
    """``run.json``: command, times and what else ``rlprobe run`` noted; empty without it."""
    path = side / "run.json"
    return _parse(path.read_bytes(), str(path)) if path.is_file() else {}


def weights_by_step(table: pl.DataFrame) -> dict[str, str]:
    """Step to a digest over every parameter's, where each is known."""
    result = {}
    for (step,), rows in table.group_by("step", maintain_order=True):
        if rows["digest"].null_count() == 0:
            keys = rows.select("role", "name", "digest").unique().sort("role", "name", "digest")
            result[str(step)] = _digest(keys.rows())
    return result


def samples_by_step(proof: dict[str, Any]) -> dict[str, str]:
    """Step to a digest over the set of its samples."""
    steps: dict[int, set[str]] = {}
    for row in proof["samples"]:
        steps.setdefault(row["step"], set()).update(row["samples"])
    return {str(step): _digest(sorted(samples)) for step, samples in sorted(steps.items())}


def _digest(value: Iterable[Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical_json(list(value))).hexdigest()


class _Origin(str):
    """Where a value came from, for messages; a file named ``{role}-rank{R}``."""

    role: str
    rank: int


def _files(side: Path, kind: str) -> Iterator[tuple[_Origin, Path]]:
    directory = side / "parts" / kind
    found = []
    for path in directory.iterdir() if directory.is_dir() else []:
        match = _FILE.fullmatch(path.name)
        if match is None:
            if path.name.startswith("."):
                continue
            raise StoreError(f"{path}: expected files named {{role}}-rank{{R}}.json or .jsonl")
        origin = _Origin(path)
        origin.role, origin.rank = match["role"], int(match["rank"])
        found.append((origin, path))
    yield from sorted(found, key=lambda item: (item[0].role, item[0].rank))


def _lines(side: Path, kind: str) -> Iterator[tuple[_Origin, dict[str, Any]]]:
    for origin, path in _files(side, kind):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            here = _Origin(f"{path}, line {number}")
            here.role, here.rank = origin.role, origin.rank
            yield here, _parse(line, here)


def _documents(side: Path, kind: str) -> Iterator[tuple[_Origin, dict[str, Any]]]:
    for origin, path in _files(side, kind):
        yield origin, _parse(path.read_bytes(), origin)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = jsonfile.parse(data, nonfinite=True)
    except DocumentError as error:
        raise StoreError(f"{where}: {error}; was a process killed there?") from error
    if not isinstance(value, dict):
        raise StoreError(f"{where} holds a {type(value).__name__} where a mapping is expected")
    return value
