"""What operators of a loss or of an update are a cause of: its place, where a part is changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.optim.optimizer import Optimizer  # noqa: E402

from rlprobe.judge.origin import CLIPPING, GLUE, LOSS, MODULE, OPTIMIZER, SETTING  # noqa: E402
from rlprobe.judge.origin import REDUCTION as REDUCED  # noqa: E402
from rlprobe.refine import trace  # noqa: E402
from rlprobe.refine.difference import COLLECTIVE, Difference  # noqa: E402
from rlprobe.refine.observe import Observed, observe  # noqa: E402
from rlprobe.refine.seen import of_traces  # noqa: E402
from rlprobe.refine.suspects import Plan  # noqa: E402
from rlprobe.said import say  # noqa: E402
from rlprobe.spec import Suspects  # noqa: E402
from tests.unit.capture_helpers import UPDATE, rank_dir, recorder, tokens  # noqa: E402
from tests.unit.traced import model, plain_loss, run  # noqa: E402

pytestmark = pytest.mark.slow


def class_of(found: Observed, origin: str) -> str:
    plan = cast("Plan", SimpleNamespace(origin=origin, floor=1e-5))
    return of_traces(found, plan, Suspects("actor_update", 0, 0, (), (), "r")).cause


@pytest.mark.parametrize(
    ("cause", "kind", "origin", "found"),
    [
        ("constant_factor", "operators", LOSS, "loss"),
        ("saturation", "operators", LOSS, "loss"),
        ("layout", "operators", LOSS, "loss"),
        ("constant_factor", "operators", OPTIMIZER, "optimizer"),
        ("saturation", "operators", OPTIMIZER, "optimizer"),
        ("constant_factor", "operators", CLIPPING, "optimizer"),
        ("layout", "operators", SETTING, "optimizer"),
        ("implementation", "operators", LOSS, "loss"),
        ("implementation", "scalar", OPTIMIZER, "optimizer"),
        # a kernel of the same operator is no other loss
        ("implementation", "kernel", LOSS, "implementation"),
        # a module is all that it does, and what is cast or hidden is that anywhere
        ("constant_factor", "operators", MODULE, "constant_factor"),
        ("saturation", "operators", GLUE, "saturation"),
        ("rounding_order", "operators", OPTIMIZER, "rounding_order"),
        ("mask", "operators", LOSS, "mask"),
        ("data", "value", LOSS, "data"),
        # another number that both sides multiply by is a setting of theirs
        ("hyperparameter", "scalar", LOSS, "hyperparameter"),
        ("hyperparameter", "scalar", OPTIMIZER, "hyperparameter"),
        ("implementation", COLLECTIVE, REDUCED, "reduction"),
        ("implementation", "operators", REDUCED, "implementation"),
    ],
)
def test_what_is_done_to_a_part_of_a_loss_or_an_update_is_of_that(
    cause: str, kind: str, origin: str, found: str
) -> None:
    assert class_of(Observed([Difference(cause, say("x"), True, kind)]), origin) == found


class Descent(Optimizer):
    """A step with momentum, of which a part may be changed."""

    def __init__(self, parameters: Any, part: str, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.part, self.change = part, change

    def _of(self, part: str, value: Tensor) -> Tensor:
        return self.change(value) if part == self.part else value

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            kept.lerp_(self._of("gradient", parameter.grad), 0.1)
            parameter.sub_(self._of("change", kept.sqrt() if kept.min() >= 0 else kept * kept))
            self._of("parameter", parameter)


def stepped(root: Path, part: str, change: Callable[[Tensor], Tensor]) -> Any:
    made: nn.Module = model()
    optimizer = Descent(made.parameters(), part, change)
    chosen = recorder(root, tensors=True, micro_steps=(0,), trace="update", trace_module=None)
    with chosen.stage(UPDATE, 0, 1, made, optimizer=optimizer) as scope:
        scope.micro_step(0)
        plain_loss(made(tokens())).backward()
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        optimizer.step()
    return trace.read(rank_dir(root) / trace.NAME)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("gradient", lambda g: g * 0.9),
        ("gradient", lambda g: g / 3),
        ("gradient", lambda g: g.clamp(-1e-3, 1e-3)),
        ("change", lambda u: u * 2.0),
        ("change", lambda u: -u),
        ("parameter", lambda p: p.mul_(0.999)),
        ("parameter", lambda p: p.div_(1.5)),
    ],
)
def test_an_optimizer_that_multiplies_is_another_optimizer(
    tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    benchmark = stepped(tmp_path / "b", "", change)
    found = observe(benchmark, stepped(tmp_path / "t", part, change), 0.0, 1e-6)
    assert class_of(found, OPTIMIZER) == "optimizer", found.differences


def loss(
    logits: Tensor,
    before: Callable[[Tensor], Tensor] = lambda x: x,
    of_each: Callable[[Tensor], Tensor] = lambda x: x,
    after: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    chosen = torch.log_softmax(before(logits), -1).gather(-1, tokens()[..., None])
    return after(-of_each(chosen).mean())


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"after": lambda x: x * 2.0}, "loss"),
        ({"of_each": lambda x: x * 0.5}, "loss"),
        ({"of_each": lambda x: x.clamp(min=-3.0)}, "loss"),
        ({"before": lambda x: x.clamp(max=0.1)}, "loss"),
        ({"before": lambda x: x.flip(1)}, "loss"),
        # of logits a factor is a temperature
        ({"before": lambda x: x * 0.5}, "sampling_semantics"),
    ],
)
def test_a_loss_that_multiplies_cuts_off_or_moves_is_another_loss(
    tmp_path: Path, changed: dict[str, Callable[[Tensor], Tensor]], cause: str
) -> None:
    made = partial(run, kind="outputs", module=None)
    target = made(tmp_path / "t", loss=partial(loss, **changed))[0]
    found = observe(made(tmp_path / "b", loss=loss)[0], target, 0.0, 1e-6)
    assert class_of(found, LOSS) == cause, found.differences
    # around a model whose results part the same is not the loss
    assert class_of(found, GLUE) != "loss"
