"""What a run recorded of one thing twice, and does not say the same of.

A digest, a sketch, statistics and a format are of one tensor: where two of them cannot be of the
same, one was not recorded of what was computed, and the agreement of the other proves nothing.
"""

from __future__ import annotations

import polars as pl

from rlprobe import sketch_floors
from rlprobe.diagnose.gate.evidence import Evidence, rows_of
from rlprobe.judge import routed, tokens
from rlprobe.judge.reasons import INHERITED
from rlprobe.judge.roundoff import UNIT, unit
from rlprobe.judge.row import columns_where
from rlprobe.said import Said, listed, of_side, say
from rlprobe.store.read import Run

#: Statistics of one tensor, computed by two devices, differ by their summing: by a few roundings of
#: fp32, however long the sums.
_SUMMED = 1e-6
#: Two numbers that are equal before they are rounded to a format differ by no more roundings.
_ROUNDED = 2.0
#: A sketch estimates the length of a difference to 9 %. Five times that is never reached: what it
#: says is no less than 0.55 of the difference.
_ESTIMATED = 1.0 / 0.55
#: Floors that a single token is never apart by: the largest of thousands, from a sketch of 17.
OF_TOKENS = 20.0
_SIDES = ("benchmark", "target")
_STATISTICS = ("max", "min", "mean", "norm")
#: What says which parameter of which process and stage.
_PART = ["step", "stage", "role", "rank", "name"]
#: From here on numbers overflow a sketch, which is then left out.
_OVERFLOWS = 1e18


def check(evidence: Evidence) -> list[Said]:
    """What contradicts itself, a sentence each."""
    return [
        *_records(evidence),
        *_without_sketches(evidence),
        *_tokens(evidence),
        *_choices(evidence),
        *_weights(evidence),
        *_key_data(evidence),
    ]


def _records(evidence: Evidence) -> list[Said]:
    """Records whose statistics differ by more than their elements are said to.

    Of two tensors no largest or smallest element, mean or norm differs by more than the length of
    their difference; so digests that agree with other statistics, or a sketch that saw less,
    contradict them.
    """
    size = pl.max_horizontal(
        *(pl.col(f"{one}_{side}").abs() for one in ("max", "min") for side in _SIDES)
    )
    norm = pl.max_horizontal(*(pl.col(f"norm_{side}").abs() for side in _SIDES))
    seen = pl.col("error") > sketch_floors.DEVICES
    apart = pl.when(seen).then(_ESTIMATED * pl.col("error") * norm).otherwise(0.0)
    # Means and norms are recorded in the tensor's own format: rounded once on either side.
    units = [unit(f"dtype_{side}").fill_null(0.0) for side in _SIDES]
    rounded = _SUMMED + _ROUNDED * pl.max_horizontal(*units)
    more = pl.any_horizontal(
        *(
            (
                pl.col(f"{one}_diff").abs() > rounded * (norm if one == "norm" else size) + apart
            ).fill_null(False)
            for one in _STATISTICS
        )
    )
    known = pl.col("error_kind").is_in(["digest", "sketch", "tensor"])
    return [
        say(
            "{name}: {count:,} records have other statistics than their digests or sketches "
            "allow, first {first}",
            name=name,
            count=rows.height,
            first=rows.item(0, "name"),
        )
        for name, rows in rows_of(evidence.step, known & more)
    ]


def _without_sketches(evidence: Evidence) -> list[Said]:
    """Records that have statistics alone where both sides were to sketch every tensor.

    Statistics are judged, and see no permutation and little of what cancels.
    """
    runs = (evidence.benchmark, evidence.target)
    if not all((run.manifest.declared.get("capture") or {}).get("sketch") for run in runs):
        return []
    kinds = [pl.col(f"dtype_{side}") for side in _SIDES]
    floats = pl.all_horizontal(kind.is_in(list(UNIT)) for kind in kinds)
    normed = pl.all_horizontal(pl.col(f"norm_{side}").is_finite() for side in _SIDES)
    # whole numbers and truth values are sketched as well; a plain scalar is its value
    whole = (kinds[0] == kinds[1]) & kinds[0].str.starts_with("torch.")
    sizes = [pl.col(f"{end}_{side}").abs() for end in ("max", "min") for side in _SIDES]
    plain = pl.all_horizontal(
        (floats & normed) | (whole & ~floats),
        pl.col("error_kind") == "statistics",
        # what is not finite has no sketch that means anything; whole numbers have no norm
        *(pl.col(f"max_{side}").is_finite() for side in _SIDES),
        pl.col("shape_benchmark").list.len() > 0,
        pl.max_horizontal(*sizes) < _OVERFLOWS,
    ).fill_null(False)
    return [
        say(
            "{name}: {count:,} records have no sketch on a side that was to have them, and were "
            "judged by statistics alone, first {first}",
            name=name,
            count=rows.height,
            first=rows.item(0, "name"),
        )
        for name, rows in rows_of(evidence.step, plain)
    ]


def _tokens(evidence: Evidence) -> list[Said]:
    """Records that agree while one of their tokens, sketched apart, does not.

    Tokens of one record have the round-off of the same operations: what one of them differs by is
    of the size of the floor, however small a part of the record it is.
    """
    found = []
    for name, finding in evidence.step.findings.items():
        apart = tokens.errors(evidence.results, name, evidence.step.number)
        if apart is None:
            continue
        found += _lacking(evidence, name)
        agree = columns_where(
            finding.stage.rows,
            pl.col("judged")
            & ~pl.col("beyond")
            & (pl.col("excused_by").is_null() | (pl.col("excused_by") == INHERITED)),
            *("name", "floor", "rank_target", "rank", "norm_benchmark", "norm_target"),
        ).select(
            *("name", "floor"),
            rank=pl.coalesce("rank_target", "rank"),
            finite=pl.col("norm_benchmark").is_finite() & pl.col("norm_target").is_finite(),
        )
        both = agree.join(apart, on=["name", "rank"], maintain_order="left")
        hidden = both.filter(pl.col("finite") & (pl.col("odd") > 0))
        if hidden.height:
            found.append(
                say(
                    "{name}: finite, while tokens of theirs are not: {count:,} records, first "
                    "{first}",
                    name=name,
                    count=hidden.height,
                    first=hidden.item(0, "name"),
                )
            )
        odd = both.filter(
            pl.col("error") > OF_TOKENS * pl.max_horizontal("floor", pl.lit(sketch_floors.DEVICES))
        )
        if odd.height:
            found.append(
                say(
                    "{name}: {count:,} records agree while a token of theirs does not, first "
                    "{first} ({error:.3g}, floor {floor:.2g})",
                    name=name,
                    count=odd.height,
                    first=odd.item(0, "name"),
                    error=odd.item(0, "error"),
                    floor=odd.item(0, "floor"),
                )
            )
    return found


def _lacking(evidence: Evidence, stage: str) -> list[Said]:
    """Tokens that one side has not sketched in a record, or in none of a stage."""
    own = evidence.step.findings[stage].stage
    alike = own.laid_out is None and own.misplaced is None
    alone = tokens.alone(evidence.results, stage, evidence.step.number, alike=alike)
    of_all = [
        say("{name}: on one side only: {count:,} tokens, in every record", name=stage, count=alone)
    ]
    lost = tokens.lacking(evidence.results, stage, evidence.step.number)
    if lost is None or lost.is_empty():
        return of_all if alone else []
    return [
        *(of_all if alone else []),
        say(
            "{name}: on one side only: {count:,} tokens of records, first of {first}",
            name=stage,
            count=int(lost.get_column("lost").sum()),
            first=lost.item(0, "name"),
        ),
    ]


def _choices(evidence: Evidence) -> list[Said]:
    """Experts that tokens were sent to, which differ though nothing that they compute does.

    A token that falls the other way at a near tie is seen in what its experts make of it
    (:mod:`rlprobe.judge.excuses.near_ties`), where calls are judged.
    """
    found = []
    for name, finding in evidence.step.findings.items():
        stage = finding.stage
        if stage.misplaced is not None or stage.laid_out is not None:
            continue
        lost = routed.lacking(evidence.results, name, evidence.step.number)
        if lost:
            found.append(
                say(
                    "{name}: on one side only: chosen experts of {count:,} tokens, first of "
                    "{first}",
                    name=name,
                    count=sum(lost.values()),
                    first=next(iter(lost)),
                )
            )
        own = routed.of_stage(evidence.results, name, evidence.step.number)
        sized = routed.sized_otherwise(evidence.results, name, evidence.step.number)
        if sized:
            found.append(
                say(
                    "{name}: routers of another number of experts: {routers}",
                    name=name,
                    routers=listed(sized, 4),
                )
            )
        moved = [one for one in own if one.otherwise]
        replayed = evidence.target.manifest.declared.get("routing") == "replay"
        seen = any(process.near_ties for process in stage.processes) or replayed
        if moved and not seen and finding.origin is None:
            found.append(
                say(
                    "{name}: other experts were chosen for {count:,} tokens, and what experts "
                    "compute agrees, first in {first}",
                    name=name,
                    count=sum(one.otherwise for one in moved),
                    first=moved[0].module,
                )
            )
    return found


def _weights(evidence: Evidence) -> list[Said]:
    """Parameters of one digest whose norms differ, and those that are kept in another format."""
    tables = [_own(run, evidence.step.number) for run in (evidence.benchmark, evidence.target)]
    if any(table is None for table in tables):
        return []
    left, right = (table for table in tables if table is not None)
    both = left.join(right, on=_PART, suffix="_target", maintain_order="left")
    apart = (pl.col("norm") - pl.col("norm_target")).abs()
    same = pl.col("digest") == pl.col("digest_target")
    odd = both.filter(same & (apart > _SUMMED * pl.col("norm")))
    other = both.filter(pl.col("dtype") != pl.col("dtype_target"))
    found = []
    if odd.height:
        found.append(
            say(
                "{count:,} parameters have other norms than their digests allow, first {first}",
                count=odd.height,
                first=_called(odd),
            )
        )
    if other.height and evidence.results.plan.one_precision:
        found.append(
            say(
                "{count:,} parameters are kept in another format, first {first} ({benchmark} "
                "against {target})",
                count=other.height,
                first=_called(other),
                benchmark=other.item(0, "dtype"),
                target=other.item(0, "dtype_target"),
            )
        )
    return found


def _own(run: Run, step: int) -> pl.DataFrame | None:
    """A step's weights, each as its process first read it."""
    table = run.weights()
    if table is None:
        return None
    here = table.filter(pl.col("step") == step)
    return here.select(*_PART, "dtype", "digest", "norm").unique(
        _PART, keep="first", maintain_order=True
    )


def _called(table: pl.DataFrame) -> Said:
    return say("{name} ({stage})", name=table.item(0, "name"), stage=table.item(0, "stage"))


def _key_data(evidence: Evidence) -> list[Said]:
    """Arrays whose values are not those that the statistics beside them are of."""
    found = []
    for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target)):
        data = run.recorded
        wrong = {} if data is None else data.contradicted(evidence.step.number)
        if wrong:
            found.append(
                say(
                    "key data of the {side} have other values than the statistics beside them: "
                    "{names}",
                    side=of_side(side),
                    names=listed([f"{name} ({which})" for name, which in wrong.items()], 4),
                )
            )
    return found
