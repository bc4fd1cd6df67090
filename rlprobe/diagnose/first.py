"""Where the sides part first, as diagnosis.json says it: module, call, sample and token."""

from __future__ import annotations

from typing import Literal

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import Cause, First, Values
from rlprobe.diagnose.gate.evidence import Shut
from rlprobe.diagnose.noise import plain
from rlprobe.errors import ReplayError
from rlprobe.judge import forced, tokens
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical.ranks import Place
from rlprobe.judge.origin import REDUCTION_OVER_RANKS, Origin
from rlprobe.judge.outcomes import SINGLE_VALUE
from rlprobe.judge.row import Row, columns_where
from rlprobe.rollouts import hdf5
from rlprobe.said import listed, say
from rlprobe.store.read import Run


def of(results: Results, step: Step, diverged: Finding, benchmark: Run) -> First:
    """The first divergence of a stage that parts."""
    origin = diverged.origin
    assert origin is not None
    row = origin.row
    place = _place(results, step, diverged)
    sample, token = _of_key_data(diverged)
    forward = _forward(step, diverged, benchmark)
    if forward is not None and (forward.phase == forced.DECODE or forward.sample != sample):
        sample = forward.sample
        token = forward.token if forward.phase == forced.DECODE else None
    order = _order(diverged)
    if sample is None and order is not None:
        # a stage without key data of its own: token sketches, where they were captured
        rank = _process(diverged)
        found = tokens.where(results, diverged.stage.name, step.number, rank, order)
        sample, token = found or (None, None)
    sample = _sample_id(benchmark, step.number, sample)
    return First(
        stage=diverged.stage.name,
        step=step.number,
        rank=diverged.rank or 0 if place is None else place.rank,
        module=origin.module,
        # a record of a whole stage is of no call
        call=row.get("call") if diverged.stage.laid_out is None else None,
        operator=_operator(origin, benchmark),
        sample=sample,
        token=token,
        benchmark=_side(row, "benchmark"),
        target=_side(row, "target"),
        phase=_phase(diverged, forward),
    )


def _operator(origin: Origin, run: Run) -> str | None:
    """What made the first divergence: one process reduces nothing over ranks."""
    alone = max((process.world_size for process in run.manifest.layout), default=1) == 1
    reduces = origin.operator == REDUCTION_OVER_RANKS
    return "accumulated gradients" if reduces and alone else origin.operator


def _forward(step: Step, diverged: Finding, benchmark: Run) -> forced.Forward | None:
    """The forward of an engine that a record is of, where it was led through responses."""
    if diverged.stage.name != stages.FORCED or diverged.origin is None:
        return None
    return forced.forward_of(benchmark, step.number, diverged.rank or 0, diverged.origin.row)


def _phase(
    diverged: Finding, forward: forced.Forward | None
) -> Literal["prefill", "prompt", "decode"] | None:
    """Of a record its forward's; of an engine's log-probs the one that they are of."""
    names = {forced.log_probs(forced.PREFILL): "prefill", forced.log_probs(forced.DECODE): "decode"}
    row = diverged.origin.row if diverged.origin is not None else {}
    found = forward.phase if forward is not None else names.get(str(row.get("name")))
    match found:
        case "prefill" | "prompt" | "decode":
            return found
    return None


def with_phases(step: Step, diverged: Finding, cause: Cause, benchmark: Run) -> Cause:
    """The cause with what prefill and decoding say of each other, of forced generation."""
    if diverged.stage.name != stages.FORCED:
        return cause
    rows = diverged.stage.rows.filter(pl.col("rank") == (diverged.rank or 0))
    known = forced.forwards(benchmark, step.number, diverged.rank or 0)
    apart = {int(n) for n in rows.filter(pl.col("beyond"))["micro_batch"].unique()}
    said = []
    for phase, what in _PHASES.items():
        own = [number for number, forward in enumerate(known) if forward.phase == phase]
        wrong = sum(number in apart for number in own)
        if own:
            said.append(
                say("{what}: {wrong} of {count} part", what=what, wrong=wrong, count=len(own))
            )
    return msgspec.structs.replace(cause, evidence=[*cause.evidence, *said])


_PHASES = {
    forced.PREFILL: say("prefills of prompt and response"),
    forced.PROMPT: say("prompts before decoding"),
    forced.DECODE: say("decoded tokens"),
}


def with_unjudged(step: Step, diverged: Finding, cause: Cause) -> Cause:
    """The cause with the stages whose results an update is given, and of which nothing was judged:
    what parts there may have begun in one of them."""
    if diverged.stage.name not in stages.UPDATE_STAGES:
        return cause
    silent = [
        name
        for name in stages.TRAINING_STAGES
        if name not in stages.UPDATE_STAGES
        and name in step.findings
        and not step.findings[name].records
    ]
    if not silent:
        return cause
    said = say(
        "nothing of {stages} was judged, which hands its results on to this stage: it may have "
        "begun there",
        stages=listed(silent),
    )
    return msgspec.structs.replace(cause, evidence=[*cause.evidence, said])


def _of_key_data(diverged: Finding) -> tuple[str | None, int | None]:
    """Sample and position where the stage's own key data parts most."""
    found = [d for d in diverged.key_data if (d.error or any(d.lopsided)) and d.sample is not None]
    if not found:
        return None, None
    beyond = {outcome.name for outcome in diverged.outcomes if outcome.excess > 1}
    found = [d for d in found if d.name in beyond] or found
    worst = max(found, key=lambda d: (max(d.lopsided), d.error or 0.0))
    single = {outcome.name for outcome in diverged.outcomes if outcome.measure == SINGLE_VALUE}
    if worst.name in single:
        return worst.peak_sample, worst.peak_position
    return worst.sample, worst.position


def _place(results: Results, step: Step, diverged: Finding) -> Place | None:
    """The one rank of the target that has the record otherwise, where that is known."""
    logical, origin = diverged.stage.logical, diverged.origin
    if logical is None or origin is None:
        return None
    found = logical.places.get(str(origin.row.get("name")))
    order = _order(diverged)
    if found is not None or order is None or origin.row.get("direction") != "forward":
        return found
    rank = tokens.lone_rank(results, diverged.stage.name, step.number, order)
    if rank is None:
        return None
    return Place(rank, say("of the tokens behind it only those on rank {rank} differ", rank=rank))


def _order(diverged: Finding) -> int | None:
    """Where the record that parts first stands in the benchmark's execution order."""
    row = diverged.origin.row if diverged.origin is not None else {}
    logical = diverged.stage.logical
    order = row.get("order") if logical is None else logical.orders.get(str(row.get("name")))
    return order if isinstance(order, int) else None


def _process(diverged: Finding) -> int | None:
    """The benchmark's process that the record is of; None where it is of all."""
    return (diverged.rank or 0) if diverged.stage.logical is None else None


def _side(row: Row, side: str) -> Values:
    values: Values = {"record": row.get(f"name_{side}") or row.get("name")}
    for name in ("dtype", "shape", "max", "min", "mean", "norm", "value"):
        value = row.get(f"{name}_{side}")
        if value is not None:
            values[name] = plain(value)
    return values


def of_gate(shut: Shut, step: Step, benchmark: Run) -> First | None:
    """Where what shut the gate was seen; None where it is of no stage."""
    if not shut.stage:
        return None
    number = step.number if shut.step is None else shut.step
    sample = _sample_id(benchmark, step.number, shut.sample)
    return First(
        shut.stage, number, shut.rank, shut.module, None, shut.operator, sample, None,
        shut.benchmark, shut.target,
    )  # fmt: skip


def profile(results: Results, step: Step, diverged: Finding) -> tokens.Profile | None:
    """How the error lies along the sequences of the first block behind it, if tokens tell."""
    row = diverged.origin.row if diverged.origin is not None else {}
    order = _order(diverged)
    if row.get("direction") != "forward" or order is None:
        return None
    passes = diverged.stage.before_update
    rank = _process(diverged)
    return tokens.profile(results, diverged.stage.name, step.number, rank, order, passes)


def with_block(results: Results, step: Step, diverged: Finding, cause: Cause) -> Cause:
    """The cause with the rank or the block that a difference is of, where no record says it."""
    stage = diverged.stage
    place = _place(results, step, diverged)
    if place is not None:
        return msgspec.structs.replace(cause, evidence=[*cause.evidence, place.said])
    if stage.misplaced is None:
        return cause
    floors = columns_where(stage.rows, pl.col("floor").is_not_null(), "name", "floor")
    found = tokens.first_block(results, stage.name, step.number, floors)
    if found is None:
        return cause
    name, error = found
    said = say(
        "of the blocks' outputs, joined token by token, {name} is the first to differ, half of "
        "its tokens by more than {error:.2g}",
        name=name,
        error=error,
    )
    return msgspec.structs.replace(cause, evidence=[*cause.evidence, said])


def _sample_id(benchmark: Run, step: int, digest: str | None) -> str | None:
    """A sample's id in the rollouts; its digest where they are not in the store."""
    path = benchmark.rollouts.get(step)
    if digest is None or path is None:
        return digest
    try:
        samples = hdf5.read(path).samples
    except ReplayError:
        return digest  # the gate says that they cannot be read
    return next((s.id for s in samples if s.sample_digest == digest), digest)


#: Why refining has nothing to look at between sides that are laid out otherwise.
NO_COUNTERPART = say(
    "the sides are laid out otherwise, so that operators, tensors and calls of one have no "
    "counterpart on the other"
)


def with_refusal(diverged: Finding, cause: Cause) -> Cause:
    """The cause with what keeps it from being observed, where the sides are laid out otherwise."""
    if diverged.stage.laid_out is None:
        return cause
    said = say(
        "the suspect is not looked at again: {why}. The cause is what records of whole stages "
        "show; to have it observed or reproduced, align once more with one layout on both sides",
        why=NO_COUNTERPART,
    )
    return msgspec.structs.replace(cause, evidence=[*cause.evidence, said])
