"""Operators of hooks that a suspect's code sets on gradients are in its trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.overrides import _get_current_function_mode_stack  # noqa: E402

from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.traced import LAYER, first, run  # noqa: E402

pytestmark = pytest.mark.slow

Change = Callable[[Any], None]


def through(hook: Callable[[Tensor], Tensor], at: str = "input") -> Change:
    """A norm that sets a hook on what it is given, on its result, or on what is between."""

    def change(made: Any) -> None:
        norm = made.layers[1].norm
        right = norm.forward

        def forward(x: Tensor) -> Tensor:
            if at == "input" and x.requires_grad:
                x = x.view_as(x)
                x.register_hook(hook)
            y = right(x)
            if at == "output":
                y = y.view_as(y)
                y.register_hook(hook=hook)
            if at == "between":
                y = 2 * y
                y.register_hook(hook)
                y = y / 2
            return y

        norm.forward = forward

    return change


def _short(g: Tensor) -> Tensor:
    scale = g.abs().max() / 40000.0
    return (g / scale).to(torch.float8_e5m2).to(g.dtype) * scale


@pytest.mark.parametrize("at", ["input", "output", "between"])
@pytest.mark.parametrize(
    ("hook", "said"),
    [(_short, "torch.float8_e5m2"), (lambda g: g.clamp(-1e-3, 1e-3), "aten::clamp")],
)
def test_what_a_hook_does_to_a_gradient_is_observed(
    tmp_path: Path, at: str, hook: Any, said: str
) -> None:
    benchmark = run(tmp_path / "b", through(lambda g: g, at))[0]
    target = run(tmp_path / "t", through(hook, at))[0]
    found = first(observe(benchmark, target))
    assert said in found.said and "on the benchmark" not in found.said, found
    assert _get_current_function_mode_stack() == []


def test_hooks_of_modules_within_and_of_others_are_not_traced(tmp_path: Path) -> None:
    trace = run(tmp_path, through(torch.sinh), module=LAYER)[0]
    assert not any("sinh" in op.name for op in trace.operators)


@pytest.mark.parametrize("traced", [None, "module"])
def test_hooks_run_as_they_would(tmp_path: Path, traced: str | None) -> None:
    plain = run(tmp_path / "b", through(_short), kind=None, module=None)[1]
    module: dict[str, Any] = {} if traced else {"module": None}
    own = run(tmp_path / "t", through(_short), kind=traced, **module)[1]
    assert all(torch.equal(own[name], plain[name]) for name in plain)


def test_a_call_that_raises_leaves_nothing_entered(tmp_path: Path) -> None:
    def change(made: nn.Module) -> None:
        def forward(_: Tensor) -> Tensor:
            raise ValueError("no")

        made.layers[1].norm.forward = forward  # type: ignore[union-attr,index]

    with pytest.raises(ValueError, match="no"):
        run(tmp_path, change)
    assert _get_current_function_mode_stack() == []
