"""What each stage of the first captured step shows: where it parts, or that it does not."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import polars as pl

from rlprobe import stages
from rlprobe.judge import execution, judged, keydata, origin, roundings
from rlprobe.judge.excuses import confined
from rlprobe.judge.excuses.confined import Outcome
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference
from rlprobe.judge.origin import Origin
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.store.read import Run

_ATTENTION = re.compile(r"attention|attn|softmax", re.IGNORECASE)
#: Kind of an origin that is a result of a stage while all its modules agree.
OUTCOME = "outcome"


@dataclass(frozen=True)
class Finding:
    """One stage, judged."""

    stage: judged.Stage
    #: Its key data on both sides.
    key_data: list[Difference]
    outcomes: list[Outcome]
    #: Where it parts first, and on which rank; None where it agrees.
    origin: Origin | None
    rank: int | None
    #: Judged records, and those beyond their floor.
    records: int
    beyond: int
    #: Records beyond their floor that reach no result (padding); they are not among those above.
    unused: int = 0

    @property
    def confined(self) -> bool:
        """Whether all that is beyond its floor reaches no result."""
        return self.unused > 0

    @property
    def held(self) -> pl.DataFrame:
        """The records that are held against their floor: not those that reach no result."""
        rows = _records(self.stage)
        return rows.filter(~pl.col("beyond")) if self.confined else rows

    @property
    def beyond_floor(self) -> pl.DataFrame:
        """The records beyond their floor, whether they reach a result or not."""
        return _records(self.stage).filter(pl.col("beyond"))


@dataclass
class Step:
    """The first captured step of the target's comparison."""

    number: int
    findings: dict[str, Finding] = field(default_factory=dict)
    #: Key data of every name on both sides.
    key_data: dict[str, Difference] = field(default_factory=dict)


def analyse(results: Results, step: int) -> Step:
    """Judge every planned stage of a step.

    Raises:
        DumpError, StoreError: a table or file is damaged.
    """
    found = Step(step)
    benchmark, target = results.run(BENCHMARK), results.run(TARGET)
    factors = roundings.products(benchmark, target)
    loaded = [
        stage
        for name in results.stages()
        if (stage := judged.load(results, name, step, factors)) is not None
    ]
    if benchmark is not None and target is not None:
        passes = {stage.name: stage.before_update for stage in loaded}
        found.key_data = _key_data(benchmark, target, step, passes)
    findings = [_judge(stage, found.key_data) for stage in loaded]
    findings = [confined_elsewhere(finding, findings) for finding in findings]
    found.findings = {finding.stage.name: finding for finding in findings}
    return found


def _key_data(
    benchmark: Run, target: Run, step: int, passes: dict[str, int | None]
) -> dict[str, Difference]:
    """Differences by name; of an update's results, what came before weights first changed."""
    shared = sorted(set(keydata.names(benchmark)) & set(keydata.names(target)))
    found = {}
    for name in shared:
        left, right = (keydata.load(run, name, step) for run in (benchmark, target))
        before = passes.get(keydata.OUTCOMES.get(name, ""))
        if before is not None:
            left, right = ([r for r in rows if r.micro_step < before] for rows in (left, right))
        if left and right:
            found[name] = keydata.compare(left, right, name, step)
    return found


def _judge(stage: judged.Stage, key_data: dict[str, Difference]) -> Finding:
    rows = stage.rows
    own = [d for d in key_data.values() if keydata.OUTCOMES.get(d.name) == stage.name]
    floor = _deepest(rows)
    produced = [Outcome(d.name, d.error, floor) for d in own if d.error is not None]
    outcomes = produced + confined.gradients(rows)
    judgeable = rows.filter(pl.col("judged") & pl.col("error").is_not_null())
    measured = judgeable.height + len(produced)
    beyond = _records(stage).filter(pl.col("beyond")).height
    first, rank = _first(stage, produced)
    hidden = first is not None and _attends(first) and confined.is_confined(rows, outcomes)
    if hidden:
        first, rank = None, None
    return Finding(
        stage,
        own,
        outcomes,
        first,
        rank,
        measured - beyond if hidden else measured,
        0 if hidden else beyond,
        beyond if hidden else 0,
    )


def _records(stage: judged.Stage) -> pl.DataFrame:
    """What a stage is judged by; parameters are the gate's."""
    return stage.rows.filter(pl.col("judged") & (pl.col("slot") != "parameters"))


def _attends(first: Origin) -> bool:
    """Whether a difference begins in attention, the only place that looks at padding at all."""
    return _ATTENTION.search(f"{first.module} {first.operator} {first.row.get('op')}") is not None


def _deepest(rows: pl.DataFrame) -> float:
    """The floor of what follows the deepest forward record."""
    forward = rows.filter(
        (pl.col("phase") == execution.FORWARD)
        & pl.col("floor").is_not_null()
        & (pl.col("slot") != "parameters")
    )
    largest = forward.get_column("floor").max()
    return float(largest) if isinstance(largest, float) else 0.0


def _first(stage: judged.Stage, produced: list[Outcome]) -> tuple[Origin | None, int | None]:
    """The earliest origin over all ranks; a result that differs comes after the forward records."""
    found = []
    for process in stage.processes:
        here = origin.find(process.rows, process.calls)
        if here is not None:
            row = here.row
            found.append(((row["passage"], row["phase"], row["place"]), process.rank, here))
    wrong = [outcome for outcome in produced if outcome.excess > 1]
    forward = [item for item in found if item[2].row["phase"] == execution.FORWARD]
    if wrong and not forward:
        worst = max(wrong, key=lambda outcome: outcome.excess)
        reason = f"all forward records agree within noise and {worst.name} does not"
        if stage.misplaced:
            reason = (
                f"{worst.name} differs, joined by sample; activations were not judged "
                f"({stage.misplaced}), so that no module can be named"
            )
        row = {"name": worst.name, "error": worst.error, "floor": worst.floor,
               "excess": worst.excess, "slot": "output"}  # fmt: skip
        return Origin(OUTCOME, None, worst.name, row, reason), stage.processes[0].rank
    if not found:
        return None, None
    _, rank, first = min(found, key=lambda item: (item[0], item[1]))
    return first, rank


def confined_elsewhere(finding: Finding, others: list[Finding]) -> Finding:
    """A stage without results of its own follows others where the same records differ likewise."""
    if finding.origin is None or finding.outcomes:
        return finding
    keys = ["name", "status"]
    elsewhere = [other.beyond_floor.select(*keys, "error") for other in others if other.confined]
    if not elsewhere:
        return finding
    known = pl.concat(elsewhere).group_by(keys).agg(theirs=pl.col("error").max())
    # All of them: a fault may come after padding that is filled differently.
    alike = finding.beyond_floor.join(known, on=keys, how="left").select(
        (pl.col("error") / pl.col("theirs")).is_between(0.5, 2.0).fill_null(False).all()
    )
    if not alike.item():
        return finding
    return dataclasses.replace(
        finding,
        origin=None,
        rank=None,
        records=finding.records - finding.beyond,
        beyond=0,
        unused=finding.beyond,
    )


def first_of(step: Step) -> Finding | None:
    """The first stage, in the order of a step, that parts."""
    for name in stages.STAGES:
        finding = step.findings.get(name)
        if finding is not None and finding.origin is not None:
            return finding
    return None
