"""An optimizer's setting that is 0 on one side: what does not run for it follows from that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rlprobe.refine import trace  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.capture_helpers import UPDATE, rank_dir, recorder, tokens  # noqa: E402
from tests.unit.traced import model, plain_loss  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[[Any], Any]


def update(root: Path, make: Make, before: Callable[[nn.Module], None] | None = None) -> Any:
    made = model()
    optimizer = make(made.parameters())
    chosen = recorder(root, tensors=True, micro_steps=(0,), trace="update", trace_module=None)
    with chosen.stage(UPDATE, 0, 1, made, optimizer=optimizer) as scope:
        scope.micro_step(0)
        plain_loss(made(tokens())).backward()
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        if before is not None:
            before(made)
        optimizer.step()
    return trace.read(rank_dir(root) / trace.NAME)


def adam(decay: float, **options: Any) -> Make:
    return lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=decay, **options)


def sgd(**options: Any) -> Make:
    return lambda p: torch.optim.SGD(p, lr=1e-2, **options)


def _decayed(made: nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.5)


@pytest.mark.parametrize(
    ("benchmark", "target", "before", "cause"),
    [
        (adam(0.5), adam(0.0), None, "hyperparameter"),
        (adam(0.0), adam(0.5), None, "hyperparameter"),
        (adam(0.5), adam(0.4), None, "hyperparameter"),
        (sgd(), sgd(momentum=0.9), None, "hyperparameter"),
        (sgd(weight_decay=0.5), sgd(), None, "hyperparameter"),
        (adam(0.5), adam(0.0), _decayed, "optimizer"),
        (adam(0.5), adam(0.0, amsgrad=True), None, "optimizer"),
        (sgd(momentum=0.9), sgd(momentum=0.9, nesterov=True), None, "optimizer"),
    ],
    ids=[
        "no decay", "a decay", "another decay", "momentum", "no decay of gradients",
        "decays by other code", "a switch besides", "a switch",
    ],
)  # fmt: skip
def test_a_setting_of_nothing_is_a_setting(
    tmp_path: Path, benchmark: Make, target: Make, before: Any, cause: str
) -> None:
    found = observe(update(tmp_path / "b", benchmark), update(tmp_path / "t", target, before))
    assert found.first is not None and found.first.cause == cause, found.differences
