"""What a comparison found, on a screen: where it parts first, the worst, what was not compared."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

import polars as pl

from rlprobe import stages
from rlprobe.compare import lacking, measures
from rlprobe.compare.writer import Summary
from rlprobe.dumps.results import KEY_DATA
from rlprobe.judge import (
    analysis,
    compared,
    equipped,
    generated,
    keydata,
    later,
    outlined,
    unsized,
)
from rlprobe.judge.analysis import HELD, Finding, Step
from rlprobe.judge.generated import Generated
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference
from rlprobe.judge.reasons import EXCUSES, NO_FLOOR, UNJUDGED
from rlprobe.judge.row import Row, columns_where, each
from rlprobe.roles import TARGET
from rlprobe.terminal import counted

#: Records listed.
WORST = 10
#: More records than these are compared in less time than it takes to judge them.
MOST = 100_000
#: The greediest beginning that names a call: arguments are not called so.
_OF_CALL = re.compile(r"(.*\.(?:forward|backward)(?:\.\d+)?)\.(?:input|output|parameters)\b")

#: A value that was saved by name: ``list`` does not choose it, and no call made it.
_SAVED = re.compile(r"\.\d+\.debug(?:\.|$)")


def first_step(results: Results) -> int:
    """The first step of which anything has a counterpart; 0 where nothing has.

    Raises:
        DumpError: a table is damaged.
    """
    alone = [measures.BENCHMARK_ONLY, measures.TARGET_ONLY]
    found = []
    for stage in results.stages():
        lazy = compared.scan(results, TARGET, stage, ["step", "status"])
        if lazy is None:
            continue
        for table in (lazy, results.table(TARGET, stage, KEY_DATA)):
            if table is not None:
                steps = table.filter(~pl.col("status").is_in(alone)).select(pl.col("step").min())
                step = compared.collect(steps, results.compared(TARGET, stage)).item()
                found += [] if step is None else [int(step)]
    return min(found, default=0)


def lines(
    step: Step, summaries: Sequence[Summary], out: str, stacks: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """The text, in the order in which it is wanted.

    Args:
        step: what judging found.
        summaries: of the stages compared.
        out: the results directory, as the user named it.
        stacks: lines about who called a record, by its name; empty where none are wanted.
    """
    diverged = analysis.first_of(step)
    rollouts = generated.found(step)
    if rollouts is None or diverged is not None:
        yield from _first(step, diverged, stacks, bool(later.steps(step.number, summaries)))
    if rollouts is not None:
        yield from [""] if diverged is not None else []
        yield from _rollouts(rollouts)
    yield from _key_data(step)
    yield from _worst(step, stacks)
    yield from _counts(summaries)
    yield from _not_compared(step, summaries)
    yield from _next(diverged, summaries, out, bool(stacks), _by_statistics(step))


def unjudged(summaries: Sequence[Summary], out: str) -> Iterator[str]:
    """The text where there are too many records to judge them on the side."""
    count = sum(sum(s.counts.values()) for s in summaries)
    yield f"{count:,} records, which are not judged here (more than {MOST:,}):"
    yield f"  rlprobe diagnose {shlex.quote(out)}   says where they part first, and the worst"
    yield from _counts(summaries)
    yield from _not_compared(Step(0), summaries)


def listed(step: Step) -> list[Row]:
    """The first record that parts, and the worst: whoever looks for their stacks."""
    diverged = analysis.first_of(step)
    own = [] if diverged is None or diverged.origin is None else [diverged.origin.row]
    return own + each(_once(_beyond(step)).head(WORST))


def _first(
    step: Step, diverged: Finding | None, stacks: Mapping[str, Sequence[str]], alone: bool
) -> Iterator[str]:
    if diverged is None or diverged.origin is None:
        held = sum(
            columns_where(finding.stage.rows, HELD, "judged").height
            for finding in step.findings.values()
        )
        said = list(_unsized(step))
        yield from said
        if held:
            nothing = "Nothing else" if said else "Nothing"
            where = f" in step {step.number}, which alone is judged" if alone else ""
            yield (
                f"{nothing} parts by more than round-off allows{where}: "
                f"{counted(held, 'record')} judged."
            )
        elif step.key_data and not step.findings:
            yield "No records of modules or functions were compared."
        else:
            yield "Nothing could be judged."
        yield from _given(step)
        yield from _formats(step)
        return
    origin, row = diverged.origin, diverged.origin.row
    what = f"{origin.module} ({origin.operator})" if origin.module else str(origin.operator)
    where = f"{diverged.stage.name}, step {step.number}, rank {diverged.rank or 0}"
    yield f"First to part: {_brief(what)}, in {where}"
    yield f"  {outlined.names(row)}"
    yield f"  {outlined.size(row)}"
    if origin.reason:
        yield f"  {_brief(origin.reason)}"
    yield from _given(step)
    yield from _formats(step)
    yield from _stack(row, stacks)
    yield from _unsized(step)


def _given(step: Step) -> Iterator[str]:
    """What the sides were given before they computed anything, where it is not the same."""
    if not step.findings:
        return
    # whatever updates weights comes after the first stage, or within it
    rows = step.findings[min(step.findings, key=stages.order)].stage.rows
    for what, own, remedy in (
        (("record of token ids", "records of token ids"), equipped.ids(rows), "the same samples"),
        (
            ("recorded parameter", "recorded parameters"),
            equipped.parameters(rows),
            "the same checkpoint",
        ),
    ):
        different = equipped.differing(own)
        if different.height:
            yield (
                f"  they were not given the same: {different.height:,} of "
                f"{counted(own.height, *what)} "
                f"{'differs' if different.height == 1 else 'differ'}, first "
                f"{lacking.short(different.item(0, 'name'))}; give both {remedy}, then dump again"
            )


def _formats(step: Step) -> Iterator[str]:
    """Records that are of one format on either side: what is allowed is the coarser one's."""
    found = [f.stage.rows.filter(equipped.two_formats()) for f in step.findings.values()]
    count = sum(rows.height for rows in found)
    if count:
        row = next(rows for rows in found if rows.height).row(0, named=True)
        yield (
            f"  they are of other formats: {counted(count, 'record')}, first "
            f"{lacking.short(row['name'])} ({row['dtype_benchmark']} against "
            f"{row['dtype_target']}); round-off is allowed as of the coarser"
        )


def _brief(text: str) -> str:
    """A sentence whose names fit a line."""
    return " ".join(lacking.short(word) for word in text.split(" "))


def _unsized(step: Step) -> Iterator[str]:
    """Records that differ, of which nothing says by how much."""
    for one in unsized.found(step):
        yield (
            f"Known to differ, by how much nothing says: {counted(one.records, 'record')} of "
            f"{one.stage}, the first:"
        )
        yield f"  {lacking.short(one.first)}: {one.why}"


def _rollouts(found: Generated) -> Iterator[str]:
    """Which samples are the same, and where the first other one parts."""
    yield (
        f"Rollouts: {counted(found.samples, 'sample')} on both sides, {found.same:,} with the same "
        "response"
    )
    if found.benchmark_only or found.target_only:
        yield (
            f"  without partner: {found.benchmark_only:,} of the benchmark, "
            f"{found.target_only:,} of the target"
        )
    if found.first is not None:
        where, *texts = found.first
        yield f"  the first that parts: {lacking.short(where)}"
        for side, text in zip(("benchmark", "target"), texts, strict=True):
            yield f"    {side + ':':<11}{text!r}"
    for name, (count, first) in found.fields.items():
        yield (
            f"  of equal responses, {name} differs in {counted(count, 'sample')}, first "
            f"{lacking.short(first)}"
        )


def _key_data(step: Step) -> Iterator[str]:
    """Key data that part, of whatever stage, and rows that found no partner."""
    said = []
    for stage, finding in sorted(step.findings.items(), key=lambda item: stages.order(item[0])):
        for outcome in (*finding.given, *finding.produced):
            if outcome.excess > 1:
                far = (
                    f"not finite at {outcome.lopsided:,} of {counted(outcome.count, 'value')} on "
                    f"the {outcome.side} only"
                    if outcome.lopsided
                    else f"error {outcome.error:.3g}, round-off allows {outcome.floor:.2g}"
                )
                said.append(f"{stage}: {outcome.name}: {far}")
        judged = {outcome.name for outcome in finding.produced}
        said += [
            f"{stage}: {difference.name}: differs by {difference.error:.3g} (relative L2), not "
            f"judged: {UNJUDGED[NO_FLOOR]}"
            for difference in finding.key_data
            if difference.error and difference.name not in judged
        ]
    said += [
        f"{keydata.stage_of(name)}: {name}: {_far(difference)}, not judged: no records of the stage"
        for name, difference in sorted(step.key_data.items())
        if keydata.stage_of(name) not in step.findings
        and (difference.error or any(difference.lopsided))
    ]
    for name, found in sorted(step.key_data.items()):
        if found.benchmark_only or found.target_only:
            said.append(
                f"{name}: {counted(found.joined, 'row')} joined by sample, "
                f"{found.benchmark_only} on the benchmark only, {found.target_only} on the target "
                "only"
            )
    if said:
        yield ""
        yield "Key data that part:"
        yield from (f"  {line}" for line in said)
    agree = [
        name + _both_not_finite(found)
        for name, found in sorted(step.key_data.items())
        if found.error == 0
        and not (found.benchmark_only or found.target_only)
        and not any(found.lopsided)
    ]
    if agree:
        yield ""
        yield f"Key data that agree, by sample: {', '.join(agree)}"


def _both_not_finite(found: Difference) -> str:
    if not found.both_nonfinite:
        return ""
    count = counted(found.count, "value")
    return f" (not finite on both sides at {found.both_nonfinite:,} of {count})"


def _far(difference: Difference) -> str:
    if any(difference.lopsided):
        count = counted(difference.count, "value")
        return f"finite on one side only at {sum(difference.lopsided):,} of {count}"
    return f"differs by {difference.error:.3g} (relative L2)"


def _beyond(step: Step) -> pl.DataFrame:
    """Records beyond their floor, the furthest first."""
    found = [
        finding.stage.rows.filter(HELD & pl.col("beyond")).with_columns(stage=pl.lit(name))
        for name, finding in sorted(step.findings.items(), key=lambda item: stages.order(item[0]))
    ]
    if not found:
        return pl.DataFrame(schema={"excess": pl.Float64})
    return pl.concat(found, how="diagonal").sort(
        "excess", descending=True, nulls_last=True, maintain_order=True
    )


def _once(beyond: pl.DataFrame) -> pl.DataFrame:
    """Each record once, of its worst rank; ``ranks``: on how many it is beyond."""
    if not beyond.height:
        return beyond
    ranks = pl.col("rank").n_unique().over("stage", "name")
    return beyond.with_columns(ranks=ranks).unique(
        ["stage", "name"], keep="first", maintain_order=True
    )


def _worst(step: Step, stacks: Mapping[str, Sequence[str]]) -> Iterator[str]:
    beyond = _once(_beyond(step))
    if not beyond.height:
        return
    shown = min(WORST, beyond.height)
    on = beyond.get_column("ranks").to_list()
    of_each = ", each of its worst rank" if any(n > 1 for n in on) else ""
    yield ""
    if beyond.height > shown:
        yield f"The worst {shown} of {beyond.height:,} beyond round-off{of_each}:"
    elif shown > 1:
        yield f"All {shown} beyond round-off{of_each}, the worst first:"
    else:
        yield f"The only one beyond round-off{of_each}:"
    yield f"  {'times round-off':>15}  {'error':>9}  record"
    many = beyond.get_column("stage").n_unique() > 1
    ranks = len({p.rank for finding in step.findings.values() for p in finding.stage.processes}) > 1
    told: set[tuple[str, ...]] = set()
    for row, count in zip(each(beyond.head(shown)), on[:shown], strict=True):
        excess, error = row["excess"], row["error"]
        times = (
            "-" if excess is None else "no round-off" if math.isinf(excess) else f"{excess:,.1f}"
        )
        size = "-" if error is None else f"{error:.2g}"
        where = f"{row['stage']}: " if many else ""
        others = f" and {count - 1} more" if count > 1 else ""
        where += f"rank {row['rank']}{others}: " if ranks else ""
        yield f"  {times:>15}  {size:>9}  {where}{outlined.names(row)}"
        # records of one call, and often its neighbours', have one stack
        called = tuple(_stack(row, stacks))
        yield from ["      called as one above"] if called and called in told else called
        told.add(called)


def _stack(row: Row, stacks: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for line in stacks.get(str(row.get("name")), ()):
        yield f"      {line}"


def _counts(summaries: Iterable[Summary]) -> Iterator[str]:
    yield ""
    yield "By status:"
    for s in summaries:
        if s.of_key_data_alone:
            yield f"  {s.stage}: key data alone"
            continue
        counts = ", ".join(
            f"{status} {s.counts[status]:,}" for status in measures.STATUSES if s.counts[status]
        )
        shares = " / ".join(f"{100 * s.coverage(side):.1f} %" for side in s.ranks)
        yield f"  {s.stage}: {counts or 'no records'}; measured {shares} of benchmark / target"
        used = ", ".join(f"{rule} {count:,}" for rule, count in s.rules.most_common())
        if used:
            yield f"  {s.stage}: joined by rules, not by name: {used}"


def _not_compared(step: Step, summaries: Sequence[Summary]) -> Iterator[str]:
    found: list[str] = []
    for s in summaries:
        found += [f"{s.stage}: {line}" for line in lacking.said(s.lacking.items())]
    for stage, finding in step.findings.items():
        rows = finding.stage.rows
        found += [f"{stage}: {line}" for line in _not_finite(rows)]
        for column, said, words in (
            ("unjudged_because", "compared, not judged", UNJUDGED),
            ("excused_by", "excused", EXCUSES),
        ):
            # what was not compared is told above, in the comparison's words
            compared = pl.col("error_kind").is_not_null()
            own = columns_where(finding.stage.rows, compared, column, "name", "reason", "error")
            counts = own.get_column(column).drop_nulls().value_counts(sort=True)
            for reason, count in counts.iter_rows():
                first = _unmeasured(own.filter(pl.col(column) == reason))
                found.append(f"{stage}: {count:,} {said}: {words.get(reason, reason)}{first}")
    if (after := later.steps(step.number, summaries)) and step.findings:
        worst = later.largest(after, summaries)
        found.append(
            f"steps after {step.number} were compared and not judged: they inherit what updates "
            f"differ by (the largest errors: {worst}); one that began from equal weights is judged "
            "by itself when its directories (STAGE/stepN) are given"
        )
    if found:
        yield ""
        yield "Not compared or not judged, and why:"
        yield from (f"  {line}" for line in found)
    notes = [f"{s.stage}: {note}" for s in summaries for note in (*s.notes, *_ambiguous(s))]
    if notes:
        yield ""
        yield "Notes:"
        yield from (f"  {note}" for note in notes)


def _unmeasured(rows: pl.DataFrame) -> str:
    """The first record that nothing was measured of, with what comparing said of it."""
    first = rows.filter(pl.col("error").is_null() & pl.col("reason").is_not_null()).head(1)
    return "".join(
        f"; first: {lacking.short(name)} ({reason})"
        for name, reason in first.select("name", "reason").iter_rows()
    )


def _not_finite(rows: pl.DataFrame) -> list[str]:
    """Records that are not finite on either side, and of which nothing else is known."""
    both = (pl.col("status") == measures.NONFINITE) & (pl.col("reason") == "both")
    own = rows.filter(both & pl.col("error_kind").is_null())
    if own.is_empty():
        return []
    return [
        f"{counted(own.height, 'record')} not finite on both sides: of what is finite in them "
        f"statistics say nothing; first: {lacking.short(own.item(0, 'name'))}"
    ]


def _ambiguous(summary: Summary) -> list[str]:
    count = summary.rules["ambiguous_call"]
    if not count:
        return []
    return [
        f"{counted(count, 'record')} of calls that were paired in order and could as well be the "
        "neighbour's, which stayed alone (rule ambiguous_call)"
    ]


def _call(name: str) -> str:
    """The call that a record is of, however deep within its arguments or results."""
    found = _OF_CALL.match(name)
    return name.rsplit(".", 2)[0] if found is None else found[1]


def _by_statistics(step: Step) -> bool:
    """Whether anything agrees as far as statistics, or a sketch, can see."""
    seen = (pl.col("error") == 0) & pl.col("shape_benchmark").is_not_null()
    kind = pl.col("error_kind").is_in([measures.STATISTIC, measures.SKETCH])
    return any(
        not columns_where(finding.stage.rows, seen & kind, "name").is_empty()
        for finding in step.findings.values()
    )


#: Characters of a name that is to be copied; a line of more is not read.
_COPIED = 200


def _listed(call: str) -> str:
    """A call as msprobe's configuration takes it: whole, since part of a name names nothing."""
    if len(call) > _COPIED:
        return "that call, by its whole name in records.parquet"
    return f"[{json.dumps(call, ensure_ascii=False)}]"


def _next(
    diverged: Finding | None, summaries: Sequence[Summary], out: str, stacks: bool, blind: bool
) -> Iterator[str]:
    yield ""
    yield "Next:"
    kinds = {kind for s in summaries for kind in s.tables}
    if diverged is not None and diverged.origin is not None:
        row = diverged.origin.row
        call = _call(str(row.get("name_benchmark") or row.get("name")))
        saved = bool(_SAVED.search(str(row.get("name"))))
        if outlined.is_bound(row) and saved:
            yield "  see which elements differ: save it again on both sides with task tensor"
        elif outlined.is_bound(row):
            yield (
                "  see which elements differ: dump both sides again with task tensor and list "
                f"{_listed(call)}"
            )
        if not stacks and not saved:
            yield "  see who calls it on either side: the same command with --stacks"
    elif blind:
        yield (
            "  statistics cannot see a permutation or single elements: dump with task tensor to be "
            "sure"
        )
    own = shlex.quote(out)
    yield f"  rlprobe diagnose {own}   the verdict with its gate; rlprobe report {own}   the page"
    stage = summaries[0].stage if len(summaries) == 1 else "STAGE"
    if summaries and all(s.of_key_data_alone for s in summaries):
        yield f"  every sample: {out}/{stage}/key_data.parquet"
    elif "records.parquet" in kinds:
        yield f"  every record: {out}/{stage}/records.parquet (docs/compare.md says its columns)"
