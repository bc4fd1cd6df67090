"""Stand-ins for two runs and a stage, of which the gate asks whether they were recorded alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl

from rlprobe.diagnose.gate import recorded
from rlprobe.dumps.key_data import KeyData

STATISTICS = ("max", "min", "mean", "norm")


def rows(**changes: Any) -> pl.DataFrame:
    """One record of two fp32 tensors that agree, and what a test changes of it."""
    row: dict[str, Any] = {
        "name": "Module.m.Linear.forward.0.output.0", "slot": "output", "status": "matched",
        "reason": None, "error": 0.0, "error_kind": "digest", "excess": 0.0, "floor": 1e-6,
        "direction": "forward", "op": "Linear", "index": "0", "module": "m",
        "unjudged_because": None, "rank": 0, "call": 0,
        "shape_benchmark": [4, 8], "phase": 0, "judged": True,
        "value_benchmark": None, "value_target": None, "digest_benchmark": "sha256:0",
        "digest_target": "sha256:0",
    }  # fmt: skip
    for side in ("benchmark", "target"):
        row |= {f"dtype_{side}": "torch.float32", f"max_{side}": 2.0, f"min_{side}": -2.0,
                f"mean_{side}": 0.1, f"norm_{side}": 10.0}  # fmt: skip
    row |= changes
    for name in STATISTICS:
        b, t = row[f"{name}_benchmark"], row[f"{name}_target"]
        row.setdefault(f"{name}_diff", None if None in (b, t) else t - b)
    numbers = {name: pl.Float64 for name in row if name.startswith((*STATISTICS, "excess"))}
    return pl.DataFrame(
        [row],
        schema_overrides={
            "reason": pl.String,
            "value_benchmark": pl.String,
            "value_target": pl.String,
            "unjudged_because": pl.String,
            **numbers,
        },
    )


def run(data: Path | None = None, proof: Any = (), ranks: int = 1, weights: Any = (),
        stages: Any = None, metrics: Any = None, declared: Any = None,
        sizes: Any = None, steps: Any = (0,), is_joined: bool = False) -> Any:  # fmt: skip
    laid_out = {"backend": None, "tp": 1, "tp_rank": None, "pp": 1, "ep": 1, **(sizes or {})}
    layout = [SimpleNamespace(rank=rank, role="actor", **laid_out) for rank in range(ranks)]
    kept = {"role": "actor", "dtype": "torch.float32", "digest": "sha256:0", "norm": 1.0,
            "sketch": [1.0]}  # fmt: skip
    schema: dict[str, Any] = {
        "name": pl.String,
        "stage": pl.String,
        "step": pl.Int32,
        "rank": pl.Int32,
        "role": pl.String,
        "dtype": pl.String,
        "digest": pl.String,
        "norm": pl.Float64,
        "sketch": pl.List(pl.Float32),
    }
    rows = [dict(zip(schema, row, strict=False)) | kept if len(row) == 4
            else dict(zip(schema, row, strict=False)) for row in weights]  # fmt: skip
    table = pl.DataFrame(rows, schema=schema)
    return SimpleNamespace(
        dump=data.parent if data else Path("/nowhere"),
        key_data=lambda: data,
        recorded=None if data is None else KeyData(data, proof),
        mock_proof=lambda: list(proof),
        weights=lambda: table,
        optimizers=list,
        buffers=list,
        gradients=lambda: None,
        logical=lambda stage: None,
        has=lambda name: False,
        is_joined=is_joined,
        metrics=lambda: [] if metrics is None else [{"step": 0, "metrics": metrics}],
        manifest=SimpleNamespace(
            layout=layout,
            steps=list(steps),
            declared=declared or {},
            stages={"actor_update": SimpleNamespace(state="captured"), **(stages or {})},
        ),
    )


def evidence(
    table: pl.DataFrame | None = None,
    left: Any = None,
    right: Any = None,
    one_precision: bool = True,
    key_data: Any = None,
    stage: str = "actor_update",
    tokens: pl.LazyFrame | None = None,
    summary: Any = None,
    compared: pl.LazyFrame | None = None,
) -> Any:
    """What the gate looks at: one stage of these rows, key data, and two runs."""
    judged = SimpleNamespace(
        rows=rows() if table is None else table, laid_out=None, misplaced=None, processes=[]
    )
    return SimpleNamespace(
        results=SimpleNamespace(
            plan=SimpleNamespace(one_precision=one_precision),
            run=lambda role: None,
            stages=lambda: [stage],
            compared=lambda pair, stage: Path("/nowhere"),
            table=lambda pair, stage, name=None: compared if name is None else tokens,
            summary=lambda pair, stage: summary,
        ),
        step=SimpleNamespace(
            number=0,
            findings={stage: SimpleNamespace(stage=judged)},
            key_data=key_data or {},
        ),
        benchmark=left or run(),
        target=right or run(),
    )


def found(table: pl.DataFrame | None = None, left: Any = None, right: Any = None,
          one_precision: bool = True, key_data: Any = None) -> str:  # fmt: skip
    """What the item says; empty where it says nothing."""
    item = recorded.check(evidence(table, left, right, one_precision, key_data))
    return "" if item is None else item.evidence
