"""With the benchmark's outputs in the suspect's place: does everything after it agree?

If it does, the suspect is all that is wrong in its stage. If not, what parts first then is a second
difference, which the first one hid.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import polars as pl

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.diagnosis import current
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.errors import DumpError
from rlprobe.judge import execution
from rlprobe.judge.forced import AFTER_PREFILL
from rlprobe.judge.inputs import NAME as PLAN
from rlprobe.judge.inputs import PlannedPair, PlannedRun, Results, write
from rlprobe.judge.judge import besides, judge
from rlprobe.refine import answers, exchange
from rlprobe.refine.suspects import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import NOTHING_SAID, Message, Said, restored, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "substituted.json"
FORMAT = 1
#: Below ``RESULTS_DIR/refine``: the comparison of the run with what it was put beside.
DIRECTORY = "substituted"
#: What a run reports of itself has some hundred bytes an entry of its stage.
_MAX_BYTES = 16 << 20


class Substituted(msgspec.Struct, frozen=True):
    """What is left of the difference when the suspect's outputs are the benchmark's."""

    module: str
    stage: str
    #: Calls whose outputs were put in place, and why others were not.
    calls: int
    failed: list[str]
    #: Whether everything that was judged of the stage agrees then; None where nothing was put in.
    agrees: bool | None
    said: str
    #: What parts next, and by how many times its floor.
    next_module: str | None = None
    next_record: str | None = None
    excess: float | None = None
    #: Class of that module.
    next_operator: str | None = None
    #: What the suspect makes of what the benchmark's was given; empty where that was not tried.
    exchanged: str = ""
    #: Numbers that the suspect was told otherwise, where these make the difference.
    setting: str = ""
    #: How its sentences were made (:mod:`rlprobe.said`).
    messages: dict[str, Message] = {}
    format: int = FORMAT

    @property
    def sentence(self) -> Said:
        """What was found, in either language."""
        return restored(self.said, self.messages)

    @property
    def told(self) -> Said | None:
        """The numbers that the suspect was told otherwise, where these make the difference."""
        return restored(self.setting, self.messages) if self.setting else None

    @property
    def sentences(self) -> list[Said]:
        """Likewise, with what the suspect makes of what the benchmark's was given."""
        more = [restored(self.exchanged, self.messages)] if self.exchanged else []
        return [self.sentence, *more]


def look(directory: Path, plan: Plan, suspects: Suspects, target: Run) -> Substituted:
    """Compare and judge the stage of a run that was given the benchmark's outputs.

    Args:
        directory: RESULTS_DIR; the comparison goes below ``refine/substituted``.
        plan: what was diagnosed.
        suspects: what was looked at.
        target: the run, of the same store as the diagnosed ones.

    Raises:
        DumpError, StoreError: a run or file is missing or damaged.
        OSError: the comparison cannot be written.
    """
    found = _judged(directory, plan, suspects, target)
    entry = exchange.read(target, suspects)
    if entry is None:
        return found
    asked = entry, suspects.trace_module or "", plan.floor
    first = current(directory).first
    later = first is not None and first.phase in AFTER_PREFILL
    said, setting = exchange.said(*asked, later=later), exchange.setting(*asked)
    return msgspec.structs.replace(found, exchanged=said or "", setting=setting or "")


def _judged(directory: Path, plan: Plan, suspects: Suspects, target: Run) -> Substituted:
    module = suspects.trace_module or ""
    calls, failed = _reported(target, suspects)
    if not calls or failed:
        said = say(
            "the benchmark's outputs of {module} could not be put in the target's place: {why}",
            module=module,
            why=failed[0] if failed else say("the module was not called"),
        )
        return Substituted(module, suspects.stage, calls, failed, None, said)
    place = directory / "refine" / DIRECTORY
    shutil.rmtree(place, ignore_errors=True)
    step = judge(_compared(place, plan, suspects, target), suspects.step)
    finding = step.findings.get(suspects.stage)
    begins = say(
        "with the benchmark's outputs of {module} in place of the target's own ({calls} calls), ",
        module=module,
        calls=calls,
    )
    if finding is None or not finding.records:
        said = begins + say("nothing could be judged")
        return Substituted(module, suspects.stage, calls, failed, None, said)
    # what the suspect computes inside is as wrong as it was, and nothing uses it
    origin = besides(finding, _inside(module)).origin
    if origin is None:
        said = begins + say(
            "all {count} judged quantities of {stage} agree: nothing else is wrong in this stage",
            count=finding.records,
            stage=suspects.stage,
        )
        return Substituted(module, suspects.stage, calls, failed, True, said)
    backward = origin.row.get("direction") == "backward"
    if backward and f"{origin.module}.".startswith(f"{module}."):
        said = begins + say(
            "what {module} makes in its own backward pass still differs, so that nothing is known "
            "of what comes after",
            module=module,
        )
        return Substituted(module, suspects.stage, calls, failed, None, said)
    where = (
        say("at {module} ({operator})", module=origin.module, operator=origin.operator)
        if origin.module
        else say("in the {operator}", operator=origin.operator)
    )
    said = begins + say(
        "{stage} parts next {where}{again}",
        stage=suspects.stage,
        where=where,
        again=say(" in its backward pass") if backward else NOTHING_SAID,
    )
    return Substituted(
        module, suspects.stage, calls, failed, False, said,
        origin.module, str(origin.row.get("name")), _finite(origin.row.get("excess")),
        origin.operator if origin.module else None,
    )  # fmt: skip


def _inside(module: str) -> pl.Expr:
    """Forward records of what runs inside a module's call."""
    below = f"{module}."
    own = pl.col("module").fill_null("").str.starts_with(below)
    ran = pl.col("within").fill_null("") + "."
    within = pl.col("module").is_null() & ran.str.starts_with(below)
    return (pl.col("phase") == execution.FORWARD) & (own | within)


def _finite(value: object) -> float | None:
    number = float(value) if isinstance(value, (int, float)) else None
    return number if number is not None and abs(number) < float("inf") else None


def _reported(target: Run, suspects: Suspects) -> tuple[int, list[str]]:
    """How many calls were given other outputs, and why not more."""
    entries = reported(target, suspects, "")
    return sum(entry.calls for entry in entries), [why for e in entries for why in e.failed]


def reported(target: Run, suspects: Suspects, below: str) -> list[Entry]:
    """What a run reports of the outputs that were put in place.

    Args:
        target: the run.
        suspects: what was looked at.
        below: directory of one of several modules below the rank's.

    Raises:
        DumpError: it is damaged.
    """
    written = target.written(suspects.stage, suspects.step, suspects.rank)
    path = written / below / "outputs" / "substituted.jsonl"
    if not path.is_file():
        return []
    try:
        lines = read_bytes(path, _MAX_BYTES).splitlines()
        return [msgspec.json.decode(line, type=Entry) for line in lines]
    except (DocumentError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not readable: {error}; refine again") from error


class Entry(msgspec.Struct):
    """An entry of a stage in which outputs were put in place."""

    calls: int
    failed: list[str]
    #: Largest relative difference of what was replaced; a word where it is not finite.
    apart: float | str = 0.0


def _compared(place: Path, plan: Plan, suspects: Suspects, target: Run) -> Results:
    """The diagnosed benchmark's stage against the run's."""
    keys = {BENCHMARK: plan.benchmark, TARGET: target.key}
    stages = [suspects.stage]
    first = Run.open(target.store, plan.benchmark).manifest.declared
    devices = {BENCHMARK: first, TARGET: target.manifest.declared}
    write(
        place / PLAN, name=DIRECTORY, store=target.store,
        runs={
            role: PlannedRun(
                key, str(devices[role].get("device")), str(devices[role].get("precision")), stages
            )
            for role, key in keys.items()
        },
        pairs={TARGET: PlannedPair(BENCHMARK, TARGET, stages)},
    )  # fmt: skip
    left, right = (sides.resolve(str(target.store / "runs" / key)) for key in keys.values())
    compare(left, right, place / "compare" / TARGET, Options(TARGET, tuple(stages), told=False))
    return Results.open(place)


def write_found(directory: Path, found: Substituted) -> Path:
    """Write ``RESULTS_DIR/refine/substituted.json``."""
    return answers.write(directory / "refine" / NAME, found)


def read(directory: Path) -> Substituted | None:
    """What was written; None where nothing was.

    Raises:
        DumpError: it is damaged, or was changed.
    """
    return answers.read(directory / "refine" / NAME, Substituted, FORMAT)
