"""Whether enough of what was recorded could be judged: agreement of nothing is none.

Counted is the judged step alone, and what stands for a stage is what counts: where the sides lie
otherwise, one record by coordinates stands for all calls of a module, and single calls (and the
losses of single micro-batches, which have no counterpart in others, nor on the other ranks of
another pipeline) are neither judged nor lacking.
Where there are no such records, or a module's have no partner, nothing stands for its calls, and
they are lacking.

Left out of the count is what is excused, what gate and cause look at elsewhere (``given``,
``generated``), and modules that a model of another back end has not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, shut
from rlprobe.diagnose.gate.extent import is_lone_generation
from rlprobe.judge import analysis, execution, reasons
from rlprobe.judge.analysis import Step
from rlprobe.judge.excuses import positions
from rlprobe.judge.extent import TRAINER, Extent, Extents
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical import layout
from rlprobe.judge.stage import Stage
from rlprobe.logical.names import is_stack
from rlprobe.roles import TARGET
from rlprobe.said import Said, listed, say

ITEM = "judged"
_ELSEWHERE = (
    reasons.GIVEN,
    reasons.AS_CHANGES,
    reasons.LATER_STEP,
    reasons.OTHER_MODULES,
    reasons.GENERATED,
    reasons.AFTER_UPDATE,
    reasons.ALL_ZERO,
)
#: Why calls of a module have no partner; records by coordinates stand for them.
_OTHER_ROWS = (
    positions.SPREAD,
    positions.SPLIT,
    positions.SHAPED,
    positions.UNTOLD,
    positions.SHUFFLED,
    positions.REORDERED,
)
_ACTION = say(
    "see `extent` in diagnosis.json and docs/diagnosis.md for each reason; capture both sides alike"
)
_BY_COORDINATES = say(
    "capture.coordinate_sketch: true on both sides (engine light) has records that stand for all "
    "calls of a stage; or use the same micro-batch sizes, order and data-parallel ranks"
)
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass
class _Count:
    """What of the judged step was judged, and what was not."""

    judged: int = 0
    after: int = 0
    #: Records that are zero on both sides throughout, by stage.
    zero: list[Said] = field(default_factory=list)
    #: Why the rest was not judged; and of stages of which nothing stands for single calls.
    why: Counter[str] = field(default_factory=Counter)
    scattered: Counter[str] = field(default_factory=Counter)

    @property
    def lacking(self) -> Counter[str]:
        return self.why + self.scattered

    def share(self, lacking: Counter[str]) -> float:
        """What was judged of that and of what is lacking."""
        return self.judged / (self.judged + lacking.total())


def check(evidence: Evidence) -> GateItem | None:
    """Item ``judged``; None where enough was, and nothing ran after a first update."""
    return item(evidence.results, evidence.step, evidence.extent)


def item(results: Results, step: Step, extents: Extents) -> GateItem | None:
    """The same of what was judged, whatever else is known."""
    count = _count(results, step, extents)
    said = listed([f"{number:,} {reason}" for reason, number in count.lacking.most_common()], 4)
    if not count.judged:
        return shut(
            ITEM,
            say(
                "nothing that was recorded could be judged ({said})", said=said or say("no records")
            ),
            _ACTION,
        )
    wanted = results.plan.coverage
    if count.share(count.lacking) < wanted:
        # what parts in the little that was judged is a divergence all the same
        of_places = count.share(count.why) >= wanted
        state = caveat if of_places and analysis.first_of(step) is not None else shut
        return state(
            ITEM,
            say(
                "{judged:,} of {recorded:,} recorded quantities were judged ({share:.1%}; "
                "at least {coverage:.0%} is asked for): {said}",
                judged=count.judged,
                recorded=count.judged + count.lacking.total(),
                share=count.share(count.lacking),
                coverage=wanted,
                said=said,
            ),
            _BY_COORDINATES if of_places else _ACTION,
        )
    if count.zero:
        return caveat(
            ITEM,
            say(
                "gradients or changes are zero on both sides throughout ({zero}): their "
                "agreement says nothing and was not judged",
                zero=listed(count.zero),
            ),
            say("align a step whose rewards differ within a group, so that something is learnt"),
        )
    if count.after:
        return caveat(
            ITEM,
            say(
                "only the first of several updates was judged in some stage: {after:,} "
                "records ran after it, on weights that differ by what it left",
                after=count.after,
            ),
            say("to have later updates judged, capture gradients and changes of parameters"),
        )
    return None


def _count(results: Results, step: Step, extents: Extents) -> _Count:
    found = _Count()
    for name, steps in extents.items():
        extent = steps.get(step.number)
        if extent is None or name == TRAINER or _is_lone_generation(results, name):
            continue
        finding = step.findings.get(name)
        stage = None if finding is None else finding.stage
        found.judged += extent.judged
        found.after += extent.unjudged.get(reasons.AFTER_UPDATE, 0)
        if zero := extent.unjudged.get(reasons.ALL_ZERO, 0):
            found.zero.append(say("{count:,} records of {name}", count=zero, name=name))
        if stage is not None and stage.misplaced is not None:
            found.scattered.update(_lacking(extent))
        else:
            of_stage = _lacking(extent) if stage is None else _of_wholes(results, stage, extent)
            if stage is not None and stage.laid_out is not None:
                # whose tokens went to other experts behind what parts, for one
                found.scattered[reasons.OTHER_SHAPE] += of_stage.pop(reasons.OTHER_SHAPE, 0)
            found.why.update(of_stage)
    return found


def _lacking(extent: Extent) -> Counter[str]:
    return Counter({r: n for r, n in extent.unjudged.items() if r not in _ELSEWHERE})


def _of_wholes(results: Results, stage: Stage, extent: Extent) -> Counter[str]:
    """What is lacking of a stage whose records stand for all calls, where the sides lie
    otherwise."""
    lacking = _lacking(extent)
    if stage.laid_out is None or stage.logical is None:
        return lacking
    rows = stage.rows.select("phase", "module", "unjudged_because")
    if stage.laid_out in _OTHER_ROWS or layout.divides_layers(results, stage.name):
        losses = rows.filter(pl.col("phase") == execution.LOSS).get_column("unjudged_because")
        alone = losses.is_in([reasons.NO_PARTNER, reasons.OTHER_PLACES])
        lacking -= Counter(losses.filter(alone).to_list())
    lost = rows.filter(
        pl.col("unjudged_because") == reasons.OTHER_MODULES,
        pl.col("module").is_in(_lost(results, stage)),
    )
    return lacking + Counter({reasons.OTHER_MODULES: lost.height})


def _lost(results: Results, stage: Stage) -> list[str]:
    """Modules of one side alone that the other side's model has as well: it is of the same back
    end, or has the module in another layer."""
    assert stage.logical is not None
    lone = {module for own in stage.logical.alone.values() for module in own}
    alone = sorted(module for module in lone if not is_stack(module))
    if layout.of_one_back_end(results, stage.name):
        return alone
    modules = stage.rows.get_column("module").drop_nulls().unique()
    shared = {_kind(module) for module in modules if module not in set(alone)}
    return [module for module in alone if _kind(module) in shared]


def _kind(module: str) -> str:
    """A module's path without the numbers of layers and experts."""
    return _NUMBER.sub(".*", module)


def _is_lone_generation(results: Results, stage: str) -> bool:
    summary = results.summary(TARGET, stage)
    return summary is not None and is_lone_generation(stage, summary)
