"""What both sides recorded, and one of them not in full: a statistic, a digest or a sketch alone.

Judging takes the best that both have. Whatever else one side lacks would go unlooked at, and a
recording that loses parts of itself is not to be relied on.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.diagnose.gate import placed
from rlprobe.diagnose.gate.evidence import Evidence, rows_of
from rlprobe.judge import compared
from rlprobe.judge.reasons import NO_NUMBERS
from rlprobe.roles import TARGET
from rlprobe.said import Said, listed, say
from rlprobe.store.read import Run

#: Columns of records that each side has, or both lack.
_OF_RECORDS = ("max", "min", "mean", "norm", "digest", "value")
_OF_WEIGHTS = ("digest", "norm", "sketch")
#: Tables of a stage, and what is recorded of all of them together.
_TABLES = ("token_sketches", "routing", "logical")
_DOCUMENTS = ("buffers.json", "optimizers.json")
_SIDES = ("benchmark", "target")
#: What both sides were to capture alike.
_CAPTURE = (
    *("engine", "level", "task", "summary_mode", "sketch", "token_sketch", "token_range"),
    "coordinate_sketch",
)
_PART = ["step", "stage", "rank", "name", "reading"]
#: Stage, role and rank, and what else is held of each.
_Processes = set[tuple[str, str, int, str]]


def check(evidence: Evidence) -> list[Said]:
    """What one side lacks of what both have, a sentence each; nothing where capture differs, or
    where models are laid out otherwise and one record stands for several."""
    asked = [
        [(run.manifest.declared.get("capture") or {}).get(key) for key in _CAPTURE]
        for run in (evidence.benchmark, evidence.target)
    ]
    if asked[0] != asked[1] or not placed.is_alike(evidence):
        return []
    return [
        *_tables(evidence),
        *_processes(evidence),
        *_records(evidence),
        *_requiring(evidence),
        *_weights(evidence),
    ]


def _tables(evidence: Evidence) -> list[Said]:
    """What of the stages that both captured one side alone has a table of, or a document."""
    runs = (evidence.benchmark, evidence.target)
    ran = [
        {name for name, one in run.manifest.stages.items() if one.state == "captured"}
        for run in runs
    ]
    known = [
        *(f"{kind}/{stage}.parquet" for kind in _TABLES for stage in sorted(ran[0] & ran[1])),
        *_DOCUMENTS,
    ]
    lone = [name for name in known if runs[0].has(name) != runs[1].has(name)]
    return [say("on one side only: {lone}", lone=listed(lone, 4))] if lone else []


def _processes(evidence: Evidence) -> list[Said]:
    """Samples, optimizers and buffers that are said of other processes, or of other roles."""
    runs = (evidence.benchmark, evidence.target)
    number = evidence.step.number
    each = {
        say("samples"): [_of_proof(run, number) for run in runs],
        say("settings of optimizers"): [_of_lines(run.optimizers(), number) for run in runs],
        say("buffers"): [_of_lines(run.buffers(), number) for run in runs],
    }
    return [
        say(
            "{what} are said of other processes, first of {role}, rank {rank}, in {stage}",
            what=what,
            role=odd[0][1],
            rank=odd[0][2],
            stage=odd[0][0],
        )
        for what, (left, right) in each.items()
        # what one side alone says of a stage is said where it is judged
        if (odd := sorted(_of_shared(left, right)))
    ]


def _of_shared(left: _Processes, right: _Processes) -> _Processes:
    shared = {stage for stage, *_ in left} & {stage for stage, *_ in right}
    return {one for one in left ^ right if one[0] in shared}


def _of_proof(run: Run, step: int) -> _Processes:
    return {
        (entry["stage"], str(entry.get("role")), entry["rank"], "")
        for entry in run.mock_proof() or []
        if entry["step"] == step
    }


def _of_lines(lines: list[dict[str, Any]], step: int) -> _Processes:
    """What lines of a document are of, and whether each buffer is called as the model's paths."""
    return {
        (line["stage"], str(line.get("role")), rank, called)
        for line in lines
        if line["step"] == step
        for rank in line["ranks"]
        for called in [
            "",
            *(f"{kept['name']} {kept.get('logical')}" for kept in line.get("buffers", ())),
        ]
    }


def _records(evidence: Evidence) -> list[Said]:
    found = []
    paired = pl.col("status") == "matched"
    # what has no norm on one side, and is not judged for it, is said already
    known = pl.col("unjudged_because").ne_missing(NO_NUMBERS)
    for column in _OF_RECORDS:
        there = [pl.col(f"{column}_{side}").is_null() for side in _SIDES]
        found += [
            say(
                "{name}: {count:,} records have their {column} on one side only, first {first}",
                name=name,
                count=rows.height,
                column=column,
                first=rows.item(0, "name"),
            )
            for name, rows in rows_of(evidence.step, paired & known & (there[0] != there[1]))
        ]
    return found


def _requiring(evidence: Evidence) -> list[Said]:
    """Tensors through which gradients pass on one side only."""
    found = []
    columns = [f"requires_grad_{side}" for side in _SIDES]
    for name, finding in evidence.step.findings.items():
        if finding.stage.laid_out is not None or finding.stage.misplaced is not None:
            continue
        lazy = compared.scan(evidence.results, TARGET, name, ["step", "name", "status", *columns])
        if lazy is None:
            continue
        here = (pl.col("step") == evidence.step.number) & (pl.col("status") == "matched")
        odd = compared.collect(
            lazy.filter(here & pl.col(columns[0]).ne_missing(pl.col(columns[1]))),
            evidence.results.compared(TARGET, name),
        )
        if odd.height:
            found.append(
                say(
                    "{name}: gradients pass on one side only through {count:,} records, first "
                    "{first}",
                    name=name,
                    count=odd.height,
                    first=odd.item(0, "name"),
                )
            )
    return found


def _weights(evidence: Evidence) -> list[Said]:
    """Parameters that one side has not digested, measured or sketched."""
    tables = [run.weights() for run in (evidence.benchmark, evidence.target)]
    if tables[0] is None or tables[1] is None:
        return []
    left, right = (
        table.with_columns(reading=pl.int_range(pl.len()).over(_PART[:-1]))
        for table in tables
        if table is not None
    )
    both = left.join(right, on=_PART, suffix="_target", maintain_order="left")
    found = []
    for column in _OF_WEIGHTS:
        odd = both.filter(pl.col(column).is_null() != pl.col(f"{column}_target").is_null())
        if odd.height:
            found.append(
                say(
                    "{count:,} parameters have their {column} on one side only, first {name} "
                    "({stage})",
                    count=odd.height,
                    column=column,
                    name=odd.item(0, "name"),
                    stage=odd.item(0, "stage"),
                )
            )
    return found
