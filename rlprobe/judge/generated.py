"""Rollouts of both sides: which samples are the same, and where the first other one parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rlprobe.dumps.schema import ROLLOUT
from rlprobe.judge.analysis import Step

#: What of a sample is shown around the place where it parts, in characters or ids.
_AROUND = 24
#: Fields that are what a sample was worth.
_REWARDS = ("score", "reward", "rm_scores", "token_level_scores", "token_level_rewards")


@dataclass(frozen=True)
class Generated:
    """What the rollouts of one stage have in common."""

    stage: str
    #: Samples that both sides have, and those of equal responses.
    samples: int
    same: int
    #: Samples of each side that the other has no partner for.
    benchmark_only: int
    target_only: int
    #: The first response that differs: its name, and both sides around the place; None: none does.
    first: tuple[str, str, str] | None = None
    #: Of samples whose responses are the same: other fields, how many samples, and the first.
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def rewards(self) -> dict[str, tuple[int, str]]:
        """Those of :attr:`fields` that are what a sample was worth."""
        return {name: f for name, f in self.fields.items() if name.split(".")[0] in _REWARDS}


def found(step: Step) -> Generated | None:
    """What the rollouts of a step have in common; None where none were compared."""
    for name, finding in step.findings.items():
        rows = finding.stage.rows.filter(pl.col("op") == ROLLOUT)
        if rows.height:
            return _of(name, rows)
    return None


def _of(stage: str, rows: pl.DataFrame) -> Generated:
    rows = rows.sort("order").with_columns(
        sample=pl.col("name").str.extract(r"^([^.]*\.[^.]*\.[^.]*)\.")
    )
    responses = rows.filter(pl.col("slot") == "response")
    per_sample = responses.group_by("sample", maintain_order=True).agg(
        alone=pl.col("status").is_in(["benchmark_only", "target_only"]).all(),
        side=pl.col("status").first(),
        same=(pl.col("error") == 0).fill_null(False).all(),
    )
    both = per_sample.filter(~pl.col("alone"))
    equal = both.filter("same").get_column("sample")
    other = responses.filter(
        ~pl.col("sample").is_in(equal.implode())
        & pl.col("sample").is_in(both.get_column("sample").implode())
        & ~(pl.col("error") == 0).fill_null(False)
    )
    moved = rows.filter(
        (pl.col("slot") == "field")
        & pl.col("sample").is_in(equal.implode())
        & ~(
            (pl.col("error") == 0)
            | pl.col("error_kind").is_null() & (pl.col("status") == "matched")
        ).fill_null(False)
    )
    fields = {
        str(index): (count, str(first))
        for index, count, first in moved.group_by("index", maintain_order=True)
        .agg(pl.col("sample").n_unique(), first=pl.col("sample").first())
        .iter_rows()
    }
    sides = per_sample.filter("alone").get_column("side").to_list()
    return Generated(
        stage, both.height, len(equal),
        sides.count("benchmark_only"), sides.count("target_only"),
        _parting(other.row(0, named=True)) if other.height else None, fields,
    )  # fmt: skip


def _parting(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A response's name, and what both sides have around the place where they part."""
    texts = [row.get(f"value_{side}") for side in ("benchmark", "target")]
    if None in texts:
        return str(row["name"]), "?", "?"
    ids = row.get("dtype_benchmark") == "ids"
    parts = [str(text).split(" ") if ids else list(str(text)) for text in texts]
    at = next(
        (n for n, pair in enumerate(zip(*parts, strict=False)) if pair[0] != pair[1]),
        min(map(len, parts)),
    )
    shown = [
        (" " if ids else "").join(part[max(0, at - _AROUND // 3) : at + _AROUND]) for part in parts
    ]
    what = "token" if ids else "character"
    return f"{row['name']}, {what} {at}", shown[0], shown[1]
