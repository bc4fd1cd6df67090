"""Rules of causes that need a shape of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose import execution, origin
from rlprobe.diagnose.cause import results
from rlprobe.diagnose.cause.shape import of

RANDOM = np.random.default_rng(0)
GRADIENT = RANDOM.standard_normal((64, 32))


def row(target: np.ndarray) -> dict[str, Any]:
    """A record of GRADIENT against ``target``, measured by a sketch."""
    found: dict[str, Any] = {
        "error": float(np.linalg.norm(target - GRADIENT) / np.linalg.norm(GRADIENT)),
        "error_kind": "sketch", "error_uncertainty": 0.09, "dtype_benchmark": "torch.float32",
        "shape_benchmark": list(GRADIENT.shape),
        "mean_diff": float(target.mean() - GRADIENT.mean()),
    }  # fmt: skip
    for side, values in (("benchmark", GRADIENT), ("target", target)):
        found[f"norm_{side}"] = float(np.linalg.norm(values))
        found[f"max_{side}"], found[f"min_{side}"] = float(values.max()), float(values.min())
    return found


def lacks(target: np.ndarray) -> bool:
    measured = row(target)
    return results._lacks(of(measured), measured)


@pytest.mark.parametrize("rows", [[3], list(range(8)), list(range(0, 64, 4))])
def test_rows_that_are_left_out(rows: list[int]) -> None:
    target = GRADIENT.copy()
    target[rows] = 0.0
    assert lacks(target)


@pytest.mark.parametrize(
    "target",
    [
        0.9 * GRADIENT,
        GRADIENT + 0.3 * RANDOM.standard_normal(GRADIENT.shape),
        np.abs(GRADIENT) ** 0.5 * np.sign(GRADIENT),
        np.roll(GRADIENT, 1, axis=0),
        -GRADIENT,
        0.7 * GRADIENT + 0.2 * RANDOM.standard_normal(GRADIENT.shape),
    ],
)
def test_what_is_left_out_is_no_factor_noise_or_other_law(target: np.ndarray) -> None:
    assert not lacks(target)


def gradients(wrong: list[str], names: list[str]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "name": [f"{name}.weight.grad_reduced.0.debug" for name in names],
            "module": names,
            "slot": "grad_reduced",
            "phase": execution.GRADIENTS,
            "passage": 4,
            "judged": True,
            "beyond": [name in wrong for name in names],
        }
    )


@pytest.mark.parametrize(
    ("wrong", "count", "module"), [(["m2"], 6, "m2"), (["m1", "m2"], 6, None), (["m2"], 3, None)]
)
def test_one_module_whose_gradients_alone_differ_is_named(
    wrong: list[str], count: int, module: str | None
) -> None:
    rows = gradients(wrong, [f"m{i}" for i in range(count)])
    found = origin.find(rows, [])
    assert found is not None
    assert (found.kind, found.module) == (origin.REDUCTION, module)


def test_a_parameters_gradient_comes_after_what_arrives_at_its_module() -> None:
    """msprobe lists it first, so that the module would be blamed for what the loss sends back."""
    listed = [
        ("Module.head.Linear.forward.0.output.0", "forward", "output"),
        ("Module.head.Linear.parameters_grad.0.weight", "backward", "grad"),
        ("Module.head.Linear.backward.0.input.0", "backward", "input"),
        ("Module.head.Linear.backward.0.output.0", "backward", "output"),
    ]
    table = pl.DataFrame(
        [
            {"order": order, "name": name, "module": "head", "op": "Linear", "call": 0,
             "direction": direction, "slot": slot}
            for order, (name, direction, slot) in enumerate(listed)
        ]
    )  # fmt: skip
    ordered, _ = execution.timeline(table)
    assert ordered.get_column("slot").to_list() == ["output", "input", "grad", "output"]
