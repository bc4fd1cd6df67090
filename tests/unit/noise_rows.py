"""Rows of a comparison that floors are computed from: a stack of linear modules."""

from __future__ import annotations

from typing import Any

FP32, BF16, FP16 = "torch.float32", "torch.bfloat16", "torch.float16"


def record(order: int, name: str, **values: Any) -> dict[str, Any]:
    """A matched row of a comparison; its error is 1e-9 unless said otherwise."""
    shape = values.pop("shape", [2, 8, 64])
    dtype = values.pop("dtype", FP32)
    row: dict[str, Any] = {
        "step": 0, "rank": 0, "order": order, "name": name, "module": None, "op": "Linear",
        "call": 0, "direction": "forward", "slot": "output", "index": "0", "status": "matched",
        "error": 1e-9, "error_kind": "tensor", "error_uncertainty": 0.0,
        "value_benchmark": None, "value_target": None,
    }  # fmt: skip
    for side in ("benchmark", "target"):
        row |= {f"dtype_{side}": dtype, f"shape_{side}": shape, f"norm_{side}": 1.0}
        row |= {f"{name}_{side}": 1.0 for name in ("max", "min", "mean")}
    row |= {f"{name}_diff": 1e-9 for name in ("max", "min", "mean", "norm")}
    return row | values


def chain(layers: int, width: int = 64, dtype: str = FP32) -> list[dict[str, Any]]:
    """A stack of linear modules: input, weight, output each."""
    rows: list[dict[str, Any]] = []
    for layer in range(layers):
        module = f"layers.{layer}"
        common = {"module": module, "dtype": dtype}
        shape = [2, 8, width]
        rows.append(record(len(rows), f"{module}.in", slot="input", shape=shape, **common))
        rows.append(
            record(len(rows), f"{module}.w", slot="parameters", index="weight",
                   shape=[width, width], error=0.0, **common)
        )  # fmt: skip
        rows.append(record(len(rows), f"{module}.out", shape=shape, **common))
    return rows
