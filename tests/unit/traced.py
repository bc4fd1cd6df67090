"""A small model's training step with a trace of its operators, for tests of what traces show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rlprobe.refine import trace
from rlprobe.refine.difference import Difference
from rlprobe.refine.observe import Observed, observe
from tests.unit.capture_helpers import UPDATE, Tiny, rank_dir, recorder, tokens

Make = Callable[[Tensor], Tensor]
LAYER = "layers.1"
NORM = f"{LAYER}.norm"


class RmsNorm(nn.Module):
    """As transformers write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = Tiny()
    for layer in made.layers:
        layer.norm = RmsNorm(24)
    return made


def run(
    root: Path,
    change: Callable[[nn.Module], None] = lambda _: None,
    kind: str | None = "module",
    module: str | None = NORM,
    loss: Callable[[Tensor], Tensor] | None = None,
    lr: float = 1e-2,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Two micro-batches and a step; the trace and the weights after it."""
    made = model()
    change(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=lr)
    chosen = recorder(
        root, tensors=True, modules=(LAYER,), micro_steps=(0,), trace=kind, trace_module=module,
        **options,
    )  # fmt: skip
    picked = tokens()
    with chosen.stage(UPDATE, 0, 1, made, optimizer=optimizer) as scope:
        for index in range(2):
            scope.micro_step(index)
            logits = made(picked)
            made_loss = (loss or plain_loss)(logits)
            made_loss.backward()
            scope.loss("loss", made_loss)
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in made.named_parameters()}
    return trace.read(rank_dir(root) / trace.NAME), weights


def plain_loss(logits: Tensor) -> Tensor:
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens()[..., None])
    return -chosen.mean()


def observed(tmp_path: Path, change: Callable[[nn.Module], None], **options: Any) -> Observed:
    benchmark, _ = run(tmp_path / "b", **{k: v for k, v in options.items() if k != "loss"})
    target, _ = run(tmp_path / "t", change, **options)
    return observe(benchmark, target)


def first(found: Observed) -> Difference:
    assert found.first is not None, found
    return found.first


def wrapped(make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Let the norm return something made of what it returns."""

    def change(made: Any) -> None:
        norm = made.layers[1].norm
        right = norm.forward
        norm.forward = lambda x: make(right(x))

    return change


def of_masked(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        picked = tokens()
        chosen = torch.log_softmax(logits, -1).gather(-1, picked[..., None])[..., 0]
        mask = make(picked > 3)
        return -(chosen * mask).sum() / 10

    return loss


class Backwards(Function):
    """The identity, whose gradients are what ``change`` makes of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def backward(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A norm whose weight alone is given other gradients."""

    def change_of(made: Any) -> None:
        norm = made.layers[1].norm

        def forward(x: Tensor) -> Tensor:
            wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
            return Backwards.apply(norm.weight, change) * wide

        norm.forward = forward

    return change_of


#: Traces of the benchmark's modules, which many tests share.
_BENCHMARKS: dict[str, Any] = {}


def seen(tmp_path: Path, right: Make, wrong: Make, name: str) -> Difference:
    """The first difference between two modules; ``name`` is of the right one."""
    if name not in _BENCHMARKS:
        _BENCHMARKS[name] = run(tmp_path / "b", wrapped(right))[0]
    return first(observe(_BENCHMARKS[name], run(tmp_path / "t", wrapped(wrong))[0]))
