"""Rollouts as verl writes a line each, and what comparing them finds, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tests.unit.compare_helpers import Result, compared


def line(number: int, **more: Any) -> dict[str, Any]:
    """A sample as verl writes it, two of each prompt."""
    return {
        "input": f"question {number // 2}",
        "output": f"the answer is {number}",
        "gts": str(number),
        "score": number / 4,
        "step": 1,
        "acc": number % 2 == 0,
    } | more


def put(directory: Path, lines: Sequence[Any], step: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in lines]
    (directory / f"{step}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return directory


def both(tmp: Path, benchmark: Sequence[Any], target: Sequence[Any], **options: Any) -> Result:
    return compared(put(tmp / "b", benchmark), put(tmp / "t", target), tmp / "out", **options)


def differing(result: Result) -> dict[str, list[float | None]]:
    """Errors of the records that are not equal, by field."""
    rows = result.records.filter(~((pl.col("error") == 0) | pl.col("error_kind").is_null()))
    return {
        str(name): part.get_column("error").to_list()
        for (name,), part in rows.group_by("index", maintain_order=True)
    }


def one(result: Result, index: str) -> str:
    return str(result.records.filter(index=index).get_column("name").item())
