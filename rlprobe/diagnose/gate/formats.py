"""Formats of two dumps: records that are floating-point numbers of one format on either side alone.

Nobody says of a dump which precision was asked for. Of a few records that are of another format it
can only be said that they are; where a comparison counts too few as compared because of them, there
is no telling a fault from what rounding to the coarser format makes of all that follows.
"""

from __future__ import annotations

from rlprobe.compare import measures
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import settings
from rlprobe.diagnose.gate.evidence import caveat, rows_of, shut
from rlprobe.judge import equipped
from rlprobe.judge.analysis import Step
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET
from rlprobe.said import SEMICOLON, joined, say


def of_dumps(results: Results, step: Step) -> GateItem | None:
    """The item ``precision``; None where no record is of two formats."""
    said = [
        say(
            "{name}: {count:,} records have another format, first {first} "
            "({dtype_benchmark} against {dtype_target})",
            name=name,
            count=rows.height,
            first=rows.item(0, "name"),
            dtype_benchmark=rows.item(0, "dtype_benchmark"),
            dtype_target=rows.item(0, "dtype_target"),
        )
        for name, rows in rows_of(step, equipped.two_formats())
    ]
    if not said:
        return None
    action = say("run both sides in the same precision, or call the pair --pair high_precision")
    item = shut if any(_too_many(results, stage) for stage in step.findings) else caveat
    return item(settings.PRECISION, joined(said, SEMICOLON), action)


def _too_many(results: Results, stage: str) -> bool:
    """Whether so many records of a stage are of two formats that too few count as compared."""
    summary = results.summary(TARGET, stage)
    if summary is None:
        return False
    others = summary.counts.get(measures.DTYPE, 0)
    return others > (1.0 - results.plan.coverage) * (summary.compared + others)
