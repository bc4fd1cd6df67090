"""From tensors of the suspects to a sharper verdict, ``RESULTS_DIR/refine/refined.json``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from rlprobe.diagnose.diagnosis import Cause, Diagnosis
from rlprobe.dumps.tensors import source
from rlprobe.dumps.tensors.dtypes import numbers
from rlprobe.dumps.tensors.places import places
from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import DumpError
from rlprobe.files import replace_bytes
from rlprobe.judge.inputs import Results
from rlprobe.refine.look import Look, look
from rlprobe.refine.suspects import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "refined.json"
FORMAT = 1
#: A fit to the tensors overrules what sketches suggest from this confidence on.
_SURE = 0.9


class Refined(msgspec.Struct, frozen=True):
    """What the tensors of the suspects say."""

    #: Keys of the runs that were diagnosed, and of those that kept tensors.
    benchmark: str
    target: str
    refining: list[str]
    stage: str
    record: str
    #: Whether both runs left the record as the runs that were diagnosed did, bit for bit.
    repeated: bool
    #: Tensors kept, and tensors that the budget left out, on both sides together.
    kept: int
    left_out: int
    bytes: int
    error: float | None
    cause: str | None
    confidence: float
    evidence: list[str]
    #: Rows (tokens of the micro-batch) and channels that hold the difference; empty: all alike.
    tokens: list[int]
    channels: list[int]
    #: The same for every suspect record with tensors on both sides.
    records: list[dict[str, Any]]
    format: int = FORMAT


def refine(plan: Plan, suspects: Suspects, benchmark: Run, target: Run) -> Refined:
    """Look at the suspects' tensors.

    Args:
        plan: what was diagnosed.
        suspects: its suspects.
        benchmark, target: the runs that kept tensors, of the same store as those diagnosed.

    Raises:
        DumpError: the record in question has no tensor on both sides.
        StoreError: a run is damaged.
    """
    sides = [_Side(run, suspects) for run in (benchmark, target)]
    names = [name for name in sides[0].named if name in sides[1].named]
    shown = []
    judged: Look | None = None
    for name in names:
        found = look(*(side.array(name) for side in sides))
        shown.append({
            "record": name, "error": _plain(found.error), "cause": found.cause,
            "evidence": found.evidence,
        })  # fmt: skip
        if name == suspects.record:
            judged = found
    kept = sum(len(side.named) for side in sides)
    left_out = sum(side.left_out for side in sides)
    if judged is None:
        raise DumpError(
            f"{suspects.stage}: {suspects.record} was kept on "
            f"{sum(suspects.record in s.named for s in sides)} of 2 sides; {left_out} tensors did "
            f"not fit into {suspects.budget_mib} MiB: raise --budget-mib"
        )
    repeated = all(
        _numbers(run, suspects) == _numbers(Run.open(run.store, key), suspects)
        for run, key in ((benchmark, plan.benchmark), (target, plan.target))
    )
    if not repeated:
        judged.evidence.append(
            "the runs that kept tensors did not repeat the diagnosed numbers bit for bit"
        )
    return Refined(
        benchmark=plan.benchmark,
        target=plan.target,
        refining=[benchmark.key, target.key],
        stage=suspects.stage,
        record=suspects.record,
        repeated=repeated,
        kept=kept,
        left_out=left_out,
        bytes=sum(side.bytes for side in sides),
        error=_plain(judged.error),
        cause=judged.cause,
        confidence=judged.confidence,
        evidence=judged.evidence,
        tokens=judged.rows,
        channels=judged.channels,
        records=shown,
    )


def _numbers(run: Run, suspects: Suspects) -> list[tuple[float, ...]]:
    """The record's statistics in a run."""
    return (
        pl.scan_parquet(run.records(suspects.stage))
        .filter(
            (pl.col("step") == suspects.step)
            & (pl.col("rank") == suspects.rank)
            & (pl.col("name") == suspects.record)
        )
        .select("max", "min", "mean", "norm")
        .collect()
        .rows()
    )


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Side:
    """One run's tensors of the suspects."""

    def __init__(self, run: Run, suspects: Suspects) -> None:
        self._run = run
        table = pl.read_parquet(run.records(suspects.stage)).filter(
            (pl.col("step") == suspects.step) & (pl.col("rank") == suspects.rank)
        )
        kept = table.filter(pl.col("data_name").is_not_null())
        self.named = {
            name: (data, shape)
            for name, data, shape in kept.select("name", "data_name", "shape").iter_rows()
        }
        found = places(run.path, f"{suspects.stage}/step{suspects.step}/rank{suspects.rank}")
        self.bytes = sum(place.size for place in found.values())
        self._source = source.in_store(found)
        # a module is called once a micro-batch
        wanted = table.filter(
            pl.col("module").is_not_null()
            & pl.col("direction").is_in(["forward", "backward"])
            & pl.col("norm").is_not_null()
            & (pl.col("call").is_in(list(suspects.micro_steps)) | (not suspects.micro_steps))
        )
        self.left_out = wanted.filter(pl.col("data_name").is_null()).height

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A record's tensor in float64.

        Raises:
            DumpError: its file is damaged.
        """
        data, shape = self.named[name]
        try:
            tensor = self._source.open(data, shape)
        except TensorFileError as error:
            raise DumpError(f"{self._run.path}: {data}: {error}") from error
        return numbers(tensor.view().reshape(-1), tensor.dtype, True).reshape(tensor.shape)


def write(directory: Path, refined: Refined) -> Path:
    """Write ``RESULTS_DIR/refine/refined.json``."""
    path = directory / "refine" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, msgspec.json.format(msgspec.json.encode(refined), indent=1) + b"\n")
    return path


def read(directory: Path) -> Refined | None:
    """What an earlier refinement found; None where there was none.

    Raises:
        DumpError: it is damaged.
    """
    path = directory / "refine" / NAME
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Refined)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not readable: {error}; refine again") from error


def sharpened(directory: Path, diagnosis: Diagnosis) -> Diagnosis:
    """A diagnosis with what an earlier refinement of the same runs found.

    Raises:
        DumpError: ``refined.json`` or ``alignment.json`` is damaged.
    """
    refined = read(directory)
    if refined is None:
        return diagnosis
    runs = Results.open(directory).plan.runs
    return sharpen(diagnosis, refined, (runs[BENCHMARK].key, runs[TARGET].key))


def sharpen(diagnosis: Diagnosis, refined: Refined, keys: tuple[str, str]) -> Diagnosis:
    """The diagnosis with what the tensors say, if they are of the runs that were diagnosed.

    A law that explains the whole difference overrules the class that sketches suggest; anything
    else adds evidence.
    """
    cause, first = diagnosis.cause, diagnosis.first
    if cause is None or first is None or (refined.benchmark, refined.target) != keys:
        return diagnosis
    if first.stage != refined.stage:
        return diagnosis
    said = [f"tensors of {refined.record}: {line}" for line in refined.evidence]
    if refined.cause is not None and refined.confidence >= _SURE and refined.repeated:
        same = refined.cause == cause.class_
        confidence = max(refined.confidence, cause.confidence) if same else refined.confidence
        cause = Cause(refined.cause, confidence, [*cause.evidence, *said])
    else:
        cause = Cause(cause.class_, cause.confidence, [*cause.evidence, *said])
    return msgspec.structs.replace(diagnosis, cause=cause)
