"""From tensors of the suspects to a sharper verdict, ``RESULTS_DIR/refine/refined.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from rlprobe.diagnose.cause.hypotheses.experts import is_choice
from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.tensors import source
from rlprobe.dumps.tensors.dtypes import numbers
from rlprobe.dumps.tensors.spans import spans
from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import DumpError
from rlprobe.files import replace_bytes
from rlprobe.refine import experiments, repeated, seen, stale, trace
from rlprobe.refine.difference import IMPLEMENTATION
from rlprobe.refine.look import Look, look
from rlprobe.refine.observe import Observed, observe
from rlprobe.refine.seen import Seen
from rlprobe.refine.suspects import Plan
from rlprobe.said import Message, Said, kept, restored, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "refined.json"
FORMAT = 2


class Refined(msgspec.Struct, frozen=True):
    """What a closer look at the suspects shows."""

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
    #: The law that the tensors obey, in words, its class, and what of the error it leaves.
    cause: str | None
    law: str
    left: float
    evidence: list[str]
    #: Rows (tokens of the micro-batch) and channels that hold the difference; empty: all alike.
    tokens: list[int]
    channels: list[int]
    #: The same for every suspect record with tensors on both sides.
    records: list[dict[str, Any]]
    #: From the traces of operators, and from running the suspect again.
    observed: Seen | None = None
    tried: Seen | None = None
    #: Operators compared, on either side.
    operators: list[int] = []
    #: The record's noise floor, where it is not that of the record that parts.
    floor: float | None = None
    #: How its sentences were made (:mod:`rlprobe.said`), by sentence.
    messages: dict[str, Message] = {}
    format: int = FORMAT

    def said(self, text: str) -> Said:
        """One of its sentences, with how it was made."""
        return text if isinstance(text, Said) else restored(text, self.messages)


def refine(plan: Plan, suspects: Suspects, benchmark: Run, target: Run) -> Refined:
    """Look at the suspects' tensors and operators.

    Args:
        plan: what was diagnosed.
        suspects: its suspects.
        benchmark, target: the runs that kept tensors, of the same store as those diagnosed.

    Raises:
        DumpError: a file is damaged, or there is neither a tensor nor a trace on both sides.
        StoreError: a run is damaged.
    """
    sides = [_Side(run, suspects) for run in (benchmark, target)]
    names = [name for name in sides[0].named if name in sides[1].named]
    shown = []
    judged: Look | None = None
    beside: Look | None = None
    for name in names:
        arrays = [side.array(name) for side in sides]
        if arrays[0].shape != arrays[1].shape:
            continue  # the comparison says so already
        found = look(*arrays)
        shown.append({
            "record": name, "error": _plain(found.error), "cause": found.cause,
            "evidence": found.evidence,
        })  # fmt: skip
        if name == suspects.record:
            judged = found
        elif _is_beside(name, suspects) and found.cause in _OF_BESIDE:
            lines = [say("of {record}: {line}", record=name, line=line) for line in found.evidence]
            beside = replace(found, evidence=[*lines])
    kept = sum(len(side.named) for side in sides)
    left_out = sum(side.left_out for side in sides)
    watched = _observed(sides, plan, suspects)
    if judged is None and watched is None:
        raise DumpError(
            f"{suspects.stage}: {suspects.record} was kept on "
            f"{sum(suspects.record in s.named for s in sides)} of 2 sides; {left_out} tensors did "
            f"not fit into {suspects.budget_mib} MiB: raise --budget-mib"
        )
    judged = judged or Look(math.nan)
    if judged.cause is None and beside is not None:
        # what the suspect also hands out says how it made the record
        judged = replace(beside, evidence=[*judged.evidence, *beside.evidence])
    made_again = [
        repeated.repeats(run, Run.open(run.store, key), suspects)
        for run, key in ((benchmark, plan.benchmark), (target, plan.target))
    ]
    as_diagnosed = all(until for _, until in made_again)
    if not as_diagnosed:
        judged.evidence.append(
            say("the runs that kept tensors did not repeat the diagnosed numbers bit for bit")
        )
    elif not all(whole for whole, _ in made_again):
        judged.evidence.append(
            say(
                "after it was run a second time, later numbers are others: the suspect keeps "
                "something from one call to the next"
            )
        )
    return Refined(
        benchmark=plan.benchmark,
        target=plan.target,
        refining=[benchmark.key, target.key],
        stage=suspects.stage,
        record=suspects.record,
        repeated=as_diagnosed,
        kept=kept,
        left_out=left_out,
        bytes=sum(side.bytes for side in sides),
        error=_plain(judged.error),
        cause=judged.cause,
        law=judged.law,
        left=judged.left,
        evidence=[*judged.evidence],
        tokens=judged.rows,
        channels=judged.channels,
        records=shown,
        observed=None if watched is None else _seen(watched, sides, plan, suspects),
        tried=repeated.with_chance(
            _tried(sides, as_diagnosed, plan.floor, backward=".forward." not in suspects.record),
            repeated.by_chance([benchmark, target], plan, suspects),
        ),
        operators=[] if watched is None else list(watched.operators),
        floor=plan.of_record,
    )


#: Laws of another output that say how the suspect made the record: how probabilities are computed.
_OF_BESIDE = ("hyperparameter", "rounding_order")


def _is_beside(name: str, suspects: Suspects) -> bool:
    """Whether a record is another output of the suspect's forward pass, beside its first."""
    if suspects.trace_module is None or ".forward." not in suspects.record:
        return False
    module = re.escape(suspects.trace_module)
    return re.fullmatch(rf"Module\.{module}\.\w+\.forward\.\d+\.output\.[1-9]\d*", name) is not None


def _observed(sides: list[_Side], plan: Plan, suspects: Suspects) -> Observed | None:
    """What the traces show; None where either side has none."""
    traces = [side.trace for side in sides]
    if traces[0] is None or traces[1] is None:
        return None
    forward = ".forward." in suspects.record
    return observe(traces[0], traces[1], plan.noise, plan.floor, forward=forward)


def _of_age(found: Seen, sides: list[_Side], suspects: Suspects) -> Seen:
    """Weights that differ; older ones where one side still has those that its stage began with."""
    traces = sides[0].trace, sides[1].trace
    if traces[0] is None or traces[1] is None:
        return found
    older = stale.found((traces[0], traces[1]), (sides[0].run, sides[1].run), suspects)
    if older is None:
        return found
    return Seen("stale_weights", say("{first}; {older}", first=found.statement, older=older),
                [*found.evidence, older])  # fmt: skip


def _seen(watched: Observed, sides: list[_Side], plan: Plan, suspects: Suspects) -> Seen:
    """What the traces show; operators that draw are random where what they make is."""
    found = seen.of_traces(watched, plan, suspects)
    if found.cause == "weights" and plan.updated:
        found = _of_age(found, sides, suspects)
    backward = ".backward." in suspects.record
    again = [trace.fixed(side.trace, backward=backward) for side in sides if side.trace is not None]
    if found.cause != "nondeterministic" or not all(again):
        return found
    said = say("other random numbers change nothing of what it makes: it draws the same each time")
    return Seen(IMPLEMENTATION, found.statement, [*found.evidence, said])


def _tried(sides: list[_Side], repeated: bool, floor: float, *, backward: bool) -> Seen | None:
    traces = [side.trace for side in sides]
    if any(t is None or t.again is None for t in traces):
        return None
    benchmark, target = (side.experiment() for side in sides)
    found = experiments.judge(
        benchmark, target, floor, given=_given(traces), stable=repeated, backward=backward
    )
    return Seen(found.cause or "unknown", found.statement, [*found.evidence])


def _given(traces: list[trace.Trace | None]) -> float:
    """Largest relative difference of the suspects' inputs; 0 where it is not known."""
    named = [
        {v.origin: v for op in (t.operators if t else ()) for v in op.inputs
         if v.origin is not None and v.origin.startswith("input ")}
        for t in traces
    ]  # fmt: skip
    sizes = [trace.error(v, named[1][name]) for name, v in named[0].items() if name in named[1]]
    return max((size for size in sizes if size is not None and math.isfinite(size)), default=0.0)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Side:
    """One run's tensors of the suspects."""

    def __init__(self, run: Run, suspects: Suspects) -> None:
        self.run = run
        table = pl.read_parquet(run.records(suspects.stage), glob=False).filter(
            (pl.col("step") == suspects.step) & (pl.col("rank") == suspects.rank)
        )
        kept = table.filter(pl.col("data_name").is_not_null())
        self.named = {
            name: (data, shape)
            for name, data, shape in kept.select("name", "data_name", "shape").iter_rows()
        }
        directory = run.written(suspects.stage, suspects.step, suspects.rank)
        found = spans(run.path, directory.relative_to(run.dump).as_posix())
        self.bytes = sum(span.size for span in found.values())
        self._source = source.in_store(found)
        self.trace = trace.read(directory / trace.NAME)
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
        return self._read(*self.named[name])

    def _read(self, data: str, shape: list[int]) -> np.ndarray[Any, Any]:
        try:
            tensor = self._source.open(data, shape)
        except TensorFileError as error:
            raise DumpError(f"{self.run.path}: {data}: {error}") from error
        return numbers(tensor.view().reshape(-1), tensor.dtype, True).reshape(tensor.shape)

    def experiment(self) -> experiments.Side:
        """What running the suspect again left, by output."""
        assert self.trace is not None
        again, back = self.trace.again, self.trace.again_backward
        wide = again.wide_data if again is not None else []
        return experiments.Side(
            again,
            [self._kept(value.data, value.shape) for value in self.trace.outputs],
            [
                self._kept(data, value.shape)
                for data, value in zip(wide, again.wide if again else [], strict=False)
            ],
            back,
            self._gradients(() if back is None else back.made),
            self._gradients(() if back is None else back.wide),
            None
            if again is None or again.reach is None
            else self._kept(again.reach.data, again.reach.shape),
            frozenset(v.dtype for op in self.trace.operators for v in op.outputs),
            frozenset(
                place for place, value in enumerate(self.trace.outputs) if is_choice(value.dtype)
            ),
        )

    def _gradients(self, made: Iterable[trace.Gradient]) -> dict[str, np.ndarray[Any, Any]]:
        """Gradients that were kept, by name."""
        return {g.name: self._read(g.data, g.shape) for g in made if g.data is not None}

    def _kept(self, data: str | None, shape: list[int]) -> np.ndarray[Any, Any] | None:
        return None if data is None else self._read(data, shape)


def write(directory: Path, refined: Refined) -> Path:
    """Write ``RESULTS_DIR/refine/refined.json``."""
    path = directory / "refine" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    plain, messages = kept(refined)
    replace_bytes(path, structfile.encoded(plain | {"messages": messages}))
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
        return structfile.load(path, Refined, (FORMAT,), again="refine again")
    except DocumentError as error:
        raise DumpError(f"{path} {error}; refine again") from error
