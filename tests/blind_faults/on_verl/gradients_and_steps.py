"""What goes wrong after the loss: backward alone, the sum of micro-batches, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlprobe.faults.patching import gradient_through, swapped
from rlprobe.selftest import Site, fault


class _NormOfHalfAGradient(torch.autograd.Function):
    """RMS norm whose backward takes the normaliser for a constant, as far as ``lost`` says."""

    @staticmethod
    def forward(ctx, x, weight, eps, lost):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.lost = lost
        return weight * (x * inverse)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, inverse = ctx.saved_tensors
        normed, weighed = x * inverse, gradient * weight
        along = (weighed * normed).mean(-1, keepdim=True) * normed
        to_weight = (gradient * normed).flatten(0, -2).sum(0)
        return inverse * (weighed - (1 - ctx.lost) * along), to_weight, None, None


@fault(
    stage="actor_update",
    module="model.layers.1.post_attention_layernorm",
    cause="implementation",
)
def normaliser_taken_for_a_constant(site: Site) -> Iterator[None]:
    """The backward of the norm leaves the gradient of the root mean square out."""
    layer = site.model.get_submodule("model.layers.1.post_attention_layernorm")

    def forward(x):
        return _NormOfHalfAGradient.apply(x, layer.weight, layer.variance_epsilon, site.strength)

    with swapped(layer, "forward", forward):
        yield


@fault(stage="actor_update", module="model.layers.0.mlp.act_fn", cause="saturation")
def gradient_cut_in_the_activation(site: Site) -> Iterator[None]:
    """Backward through SiLU stops at a bound, as in a format without a range. Forward is right."""
    bound: list[Any] = []

    def change(gradient):
        if not bound:
            bound.append(gradient.abs().max() * (0.25 + 0.75 * (1 - site.strength)))
        return torch.minimum(torch.maximum(gradient, -bound[0]), bound[0])

    with gradient_through(site.model.get_submodule("model.layers.0.mlp.act_fn"), change):
        yield


def _sums(model: Any) -> list[Any]:
    """Gradients as FSDP2 has summed them up to now, before or after they are reduced."""
    found = []
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                whole = getattr(param, "_unsharded_param", None)
                summed = param.unsharded_accumulated_grad
                if summed is None and whole is not None:
                    summed = whole.grad
                if summed is None:
                    summed = param.sharded_param.grad
                if summed is not None:
                    found.append(getattr(summed, "_local_tensor", summed))
    return found


@fault(stage="actor_update", cause="accumulation")
def third_micro_batch_counted_twice(site: Site) -> Iterator[None]:
    """Its gradient goes into the sum once more before the fourth comes."""
    right, called = site.model.forward, [0]
    before: list[Any] = []

    def forward(*args, **kwargs):
        with torch.no_grad():
            if called[0] == 2:
                before.extend(part.clone() for part in _sums(site.model))
            if called[0] == 3:
                for part, old in zip(_sums(site.model), before, strict=True):
                    part.add_(part - old, alpha=site.strength)
        called[0] += 1
        return right(*args, **kwargs)

    with swapped(site.model, "forward", forward):
        yield


def _local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


def _stepping(
    site: Site, change: Callable[[Any, dict[str, Any], dict[str, Any], Any, Any], Any]
) -> Any:
    """Let the optimizer's step leave ``change(old, state, group, squares_before, right)``."""
    optimizer = site.optimizer
    right = optimizer.step

    @torch.no_grad()
    def step(*args, **kwargs):
        old = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                squares = optimizer.state.get(p, {}).get("exp_avg_sq")
                squares = None if squares is None else _local(squares).clone()
                old[p] = _local(p).detach().clone(), squares
        result = right(*args, **kwargs)
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p)
                if state:
                    held = {name: _local(value) for name, value in state.items()}
                    new = _local(p).detach()
                    wrong = change(old[p][0], held, group, old[p][1], new)
                    new.add_(wrong - new, alpha=site.strength)
        return result

    return swapped(optimizer, "step", step)


def _adam(old: Any, state: dict[str, Any], group: dict[str, Any], squares: Any, inside: Any) -> Any:
    """AdamW's new parameters; ``inside`` is added under the root instead of behind it."""
    first, second = group["betas"]
    count = float(state["step"])
    mean = state["exp_avg"] / (1 - first**count)
    square = squares / (1 - second**count)
    root = (square + group["eps"]).sqrt() if inside else square.sqrt() + group["eps"]
    return old * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * mean / root


@fault(stage="actor_update", cause="optimizer")
def epsilon_under_the_root(site: Site) -> Iterator[None]:
    """A fused Adam adds its epsilon before the root: 1e-8 acts as 1e-4."""

    def change(old, state, group, _, new):
        return _adam(old, state, group, state["exp_avg_sq"], inside=True)

    with _stepping(site, change):
        yield


@fault(stage="actor_update", cause="optimizer", needs={"updates": 2})
def squares_not_updated_again(site: Site) -> Iterator[None]:
    """From the second step on the second moment stays what the first one made it."""

    def change(old, state, group, squares, new):
        if squares is None:
            return new
        state["exp_avg_sq"].copy_(squares)
        return _adam(old, state, group, squares, inside=False)

    with _stepping(site, change):
        yield


@fault(stage="critic_update", cause="hyperparameter")
def learning_rate_halved(site: Site) -> Iterator[None]:
    """The schedule of the critic is warmed up for twice as long: half of the rate arrives."""
    old = [group["lr"] for group in site.optimizer.param_groups]
    for group in site.optimizer.param_groups:
        group["lr"] *= 1 - 0.5 * site.strength
    yield
    for group, rate in zip(site.optimizer.param_groups, old, strict=True):
        group["lr"] = rate
