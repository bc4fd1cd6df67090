"""Differences at positions that nothing depends on.

Two attention kernels may fill fully masked rows (padding) differently: 0 in one, the mean of all
values in the other. Whole tensors then differ by tens of per cent although every log-probability,
loss and gradient agrees. What a stage computes *for* others tells: a relative error that reaches
the results arrives there at about its own size, so one that is a thousand times larger than what
the results could show, while they agree within noise, stays where no result looks. Only attention
makes such rows: a difference that begins elsewhere (a constant added to all logits, which softmax
takes out again) is a difference. So is any where the masks of the key data show no padding, or none
is known; and every record must be that large, so that nothing small hides behind another's padding.
Where one is not, sketches of tokens may show the same
(:mod:`rlprobe.judge.excuses.padding_shown`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.excuses import padding_shown
from rlprobe.judge.origin import Origin
from rlprobe.judge.outcomes import Outcome
from rlprobe.judge.reasons import PADDING_ONLY
from rlprobe.judge.roundoff import UNIT

#: How much larger than the results' floor a relative error must be to have missed them all.
FACTOR = 1000.0
_ATTENTION = re.compile(r"attention|attn|softmax", re.IGNORECASE)
_EXCUSE = Excuse(PADDING_ONLY, pl.col("beyond") & (pl.col("slot") != "parameters"))


def excuses(
    rows: pl.DataFrame,
    first: Origin | None,
    outcomes: Sequence[Outcome],
    padded: bool,
    tokens: Callable[[], pl.DataFrame | None] = lambda: None,
) -> list[Excuse]:
    """Excuse everything that is beyond its floor, or nothing.

    Args:
        rows: all ranks' rows of a stage.
        first: where they part first.
        outcomes: what the stage hands on.
        padded: whether there is any padding on both sides (:func:`keydata.pads`).
        tokens: what is known of the stage's tokens (:func:`rlprobe.judge.tokens.of_calls`).
    """
    if not padded or first is None or not _attends(first) or not _may_be_unused(rows, outcomes):
        return []
    if is_confined(rows, outcomes):
        return [_EXCUSE]
    return padding_shown.excuses(rows, tokens())


def elsewhere(rows: pl.DataFrame, excused: Sequence[pl.DataFrame]) -> list[Excuse]:
    """Excuse a stage without results of its own where the same records differ likewise elsewhere.

    Args:
        rows: of the stage; nothing follows from its outcomes, as it has none.
        excused: rows of other stages that :func:`excuses` took.
    """
    if not excused:
        return []
    columns = ["name", "status", "error", "beyond", "slot"]
    beyond = rows.select(columns).filter(pl.col("beyond") & (pl.col("slot") != "parameters"))
    if beyond.is_empty():
        return []
    keys = ["name", "status"]
    known = pl.concat([other.select(*keys, "error") for other in excused])
    known = known.group_by(keys).agg(theirs=pl.col("error").max())
    # All of them: a fault may come after padding that is filled differently.
    alike = beyond.join(known, on=keys, how="left").select(
        (pl.col("error") / pl.col("theirs")).is_between(0.5, 2.0).fill_null(False).all()
    )
    return [_EXCUSE] if alike.item() else []


def _attends(first: Origin) -> bool:
    """Whether a difference begins in attention, the only place that looks at padding at all."""
    return _ATTENTION.search(f"{first.module} {first.operator} {first.row.get('op')}") is not None


def is_confined(rows: pl.DataFrame, outcomes: Sequence[Outcome]) -> bool:
    """Whether everything beyond its floor stays where no result looks.

    False without outcomes: then nothing says so.
    """
    if not _may_be_unused(rows, outcomes):
        return False
    # Row by row: one that is not as large may have been missed by the results for its size.
    floor = max(outcome.floor for outcome in outcomes)
    beyond = rows.filter(pl.col("judged") & pl.col("beyond"))
    smallest = beyond.get_column("error").fill_null(0.0).min()
    return isinstance(smallest, float) and smallest > FACTOR * floor


def _may_be_unused(rows: pl.DataFrame, outcomes: Sequence[Outcome]) -> bool:
    """Whether what is beyond its floor is finite, of floats and forward alone, and all results
    agree."""
    columns = ["judged", "beyond", "phase", "status", "dtype_benchmark"]
    beyond = rows.select(columns).filter(pl.col("judged") & pl.col("beyond"))
    if beyond.is_empty() or not outcomes or any(outcome.excess > 1 for outcome in outcomes):
        return False
    return bool(
        beyond.select(
            (pl.col("phase") == execution.FORWARD).all()
            & (pl.col("status") != "nonfinite").all()
            # Other tokens, positions or masks are no rounding of unused rows.
            & pl.col("dtype_benchmark").is_in(list(UNIT)).fill_null(False).all()
        ).item()
    )
