"""Numbers that both sides have alike and that no computation has: they agree, and prove nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl

from rlprobe.judge import keydata
from rlprobe.judge.analysis import Step
from rlprobe.judge.keydata import Difference
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import columns_where
from rlprobe.said import Said, listed, say

#: Fewer values may be equal by chance.
_SEVERAL = 3
_LOG_PROBS, _ENTROPIES = re.compile(r"log_probs?(_|$| )"), re.compile(r"entropys?(_|$| )")
#: Logarithms of probabilities that were rounded to 16 bits on the way may come out above 0.
_ROUNDED_TO = 0.1
_SIDES = ("benchmark", "target")


def check(step: Step) -> list[Said]:
    """What is one number throughout on both sides: no result is, and its agreement proves nothing.

    A single record may be zero (an adapter that begins there, an expert without tokens); all that a
    stage computes may not.
    """
    found = []
    for name, finding in step.findings.items():
        outputs = columns_where(
            finding.stage.rows,
            (pl.col("slot") == "output")
            & (pl.col("direction") == "forward")
            & pl.col("dtype_benchmark").is_in(list(UNIT)),
            *(f"norm_{side}" for side in _SIDES),
        )
        zero = pl.all_horizontal(pl.col(f"norm_{side}") == 0 for side in _SIDES)
        if outputs.height > 1 and outputs.select(zero.fill_null(False).all()).item():
            found.append(say("{name}: every output is 0 on both sides", name=name))
    alike = [
        name
        for name, difference in sorted(step.key_data.items())
        if keydata.result_of(name) and _is_constant(difference)
    ]
    if alike:
        found.append(say("key data are one number throughout: {names}", names=listed(alike, 4)))
    for name, difference in sorted(step.key_data.items()):
        if difference.both_nonfinite:
            found.append(
                say(
                    "{name} are not finite on both sides at {nonfinite:,} of {count:,} values",
                    name=name,
                    nonfinite=difference.both_nonfinite,
                    count=difference.count,
                )
            )
        if name in alike or not keydata.result_of(name):
            continue
        samples = [key for key, *sides in difference.pairs if _is_one_number(sides)]
        if samples:
            found.append(
                say(
                    "{name} of {count} samples are one number throughout on both sides, first in "
                    "sample {sample}",
                    name=name,
                    count=len(samples),
                    sample=samples[0],
                )
            )
        if _is_impossible(name, difference):
            found.append(say("{name} are not what they can be on either side", name=name))
    return found


def _is_one_number(sides: Sequence[keydata.Array]) -> bool:
    """Whether a sample's values, of both sides, are one and the same number."""
    return all(len(side) >= _SEVERAL for side in sides) and all(
        bool(np.all(side == sides[0][0])) for side in sides
    )


def _is_impossible(name: str, difference: Difference) -> bool:
    """Whether both sides have logarithms of probabilities above 0, or entropies below it."""
    above = _LOG_PROBS.search(name) is not None
    if not above and _ENTROPIES.search(name) is None:
        return False
    values = [np.concatenate(side) for side in zip(*(v for _, *v in difference.pairs), strict=True)]
    wrong = [(side if above else -side) > _ROUNDED_TO for side in values]
    return bool(wrong) and all(bool(np.any(side)) for side in wrong)


def _is_constant(difference: Difference) -> bool:
    """Whether all values of both sides are one and the same number."""
    values = [side for _, *sides in difference.pairs for side in sides]
    whole = np.concatenate(values) if values else np.empty(0)
    return whole.size > len(_SIDES) and bool(np.all(whole == whole[0]))
