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
from rlprobe.judge.origin import CLIPPING, LOSS, OPTIMIZER, REDUCTION, SETTING
from rlprobe.refine import experiments, trace
from rlprobe.refine.difference import COLLECTIVE, IMPLEMENTATION, Difference
from rlprobe.refine.look import Look, look
from rlprobe.refine.observe import Observed, observe
from rlprobe.refine.pairing import Both
from rlprobe.refine.suspects import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import NOTHING_SAID, Message, Said, kept, of_side, restored, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "refined.json"
FORMAT = 2


class Seen(msgspec.Struct, frozen=True):
    """A cause that the operators' trace or an experiment shows."""

    cause: str
    statement: str
    evidence: list[str]


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
    repeats = [
        _repeats(run, Run.open(run.store, key), suspects)
        for run, key in ((benchmark, plan.benchmark), (target, plan.target))
    ]
    repeated = all(until for _, until in repeats)
    if not repeated:
        judged.evidence.append(
            say("the runs that kept tensors did not repeat the diagnosed numbers bit for bit")
        )
    elif not all(whole for whole, _ in repeats):
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
        repeated=repeated,
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
        observed=None if watched is None else _seen(watched, plan, suspects),
        tried=_with_chance(
            _tried(sides, repeated, plan.floor, backward=".forward." not in suspects.record),
            _by_chance([benchmark, target], plan, suspects),
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


def _seen(watched: Observed, plan: Plan, suspects: Suspects) -> Seen:
    first = watched.first
    if first is None:
        also = [say("the traces differ in: {said}", said=d.said) for d in watched.differences]
        return Seen("unknown", "", [_none(watched, plan), *also])
    benchmark, target = watched.operators
    where = NOTHING_SAID
    if suspects.trace_module:
        where = say(" in {module}", module=suspects.trace_module)
    others = [d.said for d in watched.differences if d is not first]
    evidence = [
        say(
            "the traces of {benchmark} and {target} operators (benchmark and target){where} part "
            "at: {said}",
            benchmark=benchmark,
            target=target,
            where=where,
            said=first.said,
        ),
        *(say("the traces also differ in: {said}", said=said) for said in others),
        *(
            say("so do {count} further calls of {operator}", count=count - 1, operator=operator)
            for operator, count in watched.calls.items()
            if count > 1
        ),
    ]
    return Seen(_class(first, plan), first.said + where, [*evidence])


def _none(watched: Observed, plan: Plan) -> Said:
    """That no operator is seen to differ, with how much of that is known."""
    benchmark, target = watched.operators
    if watched.differences:
        return say(
            "of {benchmark} and {target} operators traced on benchmark and target, those that "
            "differ change no number by more than {floor:.2g}, as much as results may differ",
            benchmark=benchmark,
            target=target,
            floor=plan.floor,
        )
    if not watched.untold:
        return say(
            "of {benchmark} and {target} operators traced on benchmark and target, none differs by "
            "itself",
            benchmark=benchmark,
            target=target,
        )
    worst = max(watched.untold, key=_grown)
    return say(
        "of {benchmark} and {target} operators traced on benchmark and target, none is seen to "
        "differ by itself; of {count} that are given other numbers nothing tells what these make, "
        "first of all of {operator}, which makes {made:.2g} of {given:.2g}",
        benchmark=benchmark,
        target=target,
        count=len(watched.untold),
        operator=worst.target.said,
        made=_most(worst.benchmark.outputs, worst.target.outputs),
        given=_most(worst.benchmark.inputs, worst.target.inputs),
    )


def _grown(step: Both) -> float:
    """By how much more the results of an operator differ than what it is given."""
    given = _most(step.benchmark.inputs, step.target.inputs)
    made = _most(step.benchmark.outputs, step.target.outputs)
    return made / given if given else made


def _most(one: list[trace.Value], other: list[trace.Value]) -> float:
    """The largest relative difference that is known."""
    sizes = [trace.error(v, w) for v, w in zip(one, other, strict=False)]
    return max((s for s in sizes if s is not None and math.isfinite(s)), default=0.0)


def _class(first: Difference, plan: Plan) -> str:
    """The class of a difference, where its place says more than that operators differ."""
    if first.kind == COLLECTIVE and plan.origin == REDUCTION:
        return "reduction"
    if first.cause == IMPLEMENTATION and first.kind != "kernel":
        return _OF_PLACES.get(plan.origin, first.cause)
    return first.cause


#: The classes of other operators in the loss, and in clipping and optimizer: parameters change
#: otherwise there although their gradients agree.
_OF_PLACES = {LOSS: "loss", CLIPPING: "optimizer", OPTIMIZER: "optimizer", SETTING: "optimizer"}


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


def _with_chance(tried: Seen | None, chance: Seen | None) -> Seen | None:
    """What was tried, with what the side's own runs differ by where no experiment shows chance."""
    if chance is None or (tried is not None and tried.cause == chance.cause):
        return tried
    more = [] if tried is None else tried.evidence
    return Seen(chance.cause, chance.statement, [*chance.evidence, *more])


def _by_chance(runs: list[Run], plan: Plan, suspects: Suspects) -> Seen | None:
    """That one side does not make the suspect record again, where all before it repeats.

    What the side's two runs differ by must be of the size of what the sides differ by.
    """
    diagnosed = [
        Run.open(run.store, key)
        for run, key in zip(runs, (plan.benchmark, plan.target), strict=True)
    ]
    apart = [_apart(run, before, suspects) for run, before in zip(runs, diagnosed, strict=True)]
    sides = _sketched_apart(*(_record(run, suspects) for run in diagnosed))
    for side, other in ((1, 0), (0, 1)):
        own = apart[side]
        if apart[other] != 0.0 or not own or sides is None or own < _OF_ERROR * sides:
            continue
        names = [of_side(name) for name in (BENCHMARK, TARGET)]
        said = say(
            "run once more, the {side} makes other numbers of {record} (they differ by {own:.2g}, "
            "the two sides by {apart:.2g}), while all before it repeats bit for bit, and so does "
            "the {other}",
            side=names[side],
            record=suspects.record,
            own=own,
            apart=sides,
            other=names[other],
        )
        return Seen("nondeterministic", said, [said])
    return None


#: Share of the difference of the sides that chance must make to be its cause.
_OF_ERROR = 0.5


def _apart(run: Run, diagnosed: Run, suspects: Suspects) -> float | None:
    """By how much the suspect record differs from the diagnosed run's, where all before repeats.

    0 where it repeats; None where something before it does not, or nothing tells.
    """
    both, same = _both_runs(run, diagnosed, suspects)
    other = both.filter(~same).get_column("order").min()
    own = both.filter(pl.col("name") == suspects.record)
    at = own.get_column("order").min()
    if not isinstance(at, int) or (isinstance(other, int) and other < at):
        return None
    if own.filter(~same).is_empty():
        return 0.0
    return _sketched_apart(*(_record(each, suspects) for each in (diagnosed, run)))


def _record(run: Run, suspects: Suspects) -> dict[str, Any] | None:
    """The suspect record's numbers in a run."""
    found = _numbers(run, suspects).filter(pl.col("name") == suspects.record)
    return None if found.is_empty() else found.row(0, named=True)


def _sketched_apart(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """Relative L2 difference of a record in two runs, from its sketches."""
    if one is None or other is None or not one["sketch"] or not other["sketch"] or not one["norm"]:
        return None
    pair = [np.asarray(row["sketch"], dtype=np.float64) for row in (one, other)]
    return float(np.linalg.norm(pair[0] - pair[1])) / float(one["norm"])


def _repeats(run: Run, diagnosed: Run, suspects: Suspects) -> tuple[bool, bool]:
    """Whether the records of a refining run are as in the run that was diagnosed.

    Returns:
        whether all are, and those up to the suspect one: running a suspect again beside its own
        call changes what comes after where it keeps something from call to call.
    """
    both, same = _both_runs(run, diagnosed, suspects)
    other = both.filter(~same)
    if other.is_empty():
        return both.height > 0, both.height > 0
    suspect = both.filter(pl.col("name") == suspects.record).get_column("order").min()
    first = other.get_column("order").min()
    until = isinstance(suspect, int) and isinstance(first, int) and first > suspect
    return False, until


_STATISTICS = ("max", "min", "mean", "norm")


def _both_runs(run: Run, diagnosed: Run, suspects: Suspects) -> tuple[pl.DataFrame, pl.Expr]:
    """Records of a refining run beside the diagnosed run's, and whether they are the same."""
    again, before = (_numbers(each, suspects) for each in (run, diagnosed))
    both = again.join(before, on=["name", "order_in_name"], suffix="_before")
    same = [pl.col(n).eq_missing(pl.col(f"{n}_before")) for n in _STATISTICS]
    return both, pl.all_horizontal(same)


def _numbers(run: Run, suspects: Suspects) -> pl.DataFrame:
    """The stage's statistics in a run, by record."""
    return (
        pl.scan_parquet(run.records(suspects.stage), glob=False)
        .filter((pl.col("step") == suspects.step) & (pl.col("rank") == suspects.rank))
        .select("name", "order", "sketch", *_STATISTICS)
        .with_columns(order_in_name=pl.int_range(pl.len()).over("name"))
        .collect()
    )


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Side:
    """One run's tensors of the suspects."""

    def __init__(self, run: Run, suspects: Suspects) -> None:
        self._run = run
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
            raise DumpError(f"{self._run.path}: {data}: {error}") from error
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
