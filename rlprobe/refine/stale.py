"""Weights of a module that are older on one side than on the other.

What a later update of a step computes with are weights that the updates before it have changed. A
trace has the digest of every parameter that its operators are given, and a run those of all
parameters as the stage began (:mod:`rlprobe.capture.weights`), of the same bytes: where one side's
are still these and the other's are not, an update did not reach it.
"""

from __future__ import annotations

import polars as pl

from rlprobe.refine.trace import Trace
from rlprobe.said import Said, of_side, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

_SIDES = ("benchmark", "target")


def found(traces: tuple[Trace, Trace], runs: tuple[Run, Run], suspects: Suspects) -> Said | None:
    """The first parameter of the suspect that one side alone still has as its stage began.

    Of what ran after the first update. A rank's part of a divided parameter has another digest than
    the whole, and is not told.

    Raises:
        StoreError: a run's weights are damaged.
    """
    if suspects.trace_module is None:
        return None
    given = [_given(one) for one in traces]
    begun = [_begun(run, suspects) for run in runs]
    for name in given[0].keys() & given[1].keys():
        whole = f"{suspects.trace_module}.{name}"
        old = [_is(now[name], then.get(whole)) for now, then in zip(given, begun, strict=True)]
        if old[0] != old[1]:
            return say(
                "{name} is still what it was as the stage began, before its first update, on the "
                "{side} alone",
                name=name,
                side=of_side(_SIDES[old[1]]),
            )
    return None


def _given(traced: Trace) -> dict[str, str]:
    """The last digest of each named value that no operator made."""
    return {
        value.origin: value.digest
        for op in traced.operators
        for value in op.inputs
        if value.origin is not None and value.digest is not None
    }


def _begun(run: Run, suspects: Suspects) -> dict[str, str]:
    table = run.weights()
    if table is None:
        return {}
    own = table.filter(
        pl.col("stage") == suspects.stage,
        pl.col("step") == suspects.step,
        pl.col("rank") == suspects.rank,
    )
    return dict(own.select("name", "digest").iter_rows())


def _is(digest: str, begun: str | None) -> bool:
    """Whether a digest of a trace, which is cut short, is of the bytes of another."""
    return begun is not None and begun.removeprefix("sha256:").startswith(digest)
