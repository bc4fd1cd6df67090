"""What happens to gradients that agree: sums, reduction, clipping, the optimizer, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.workers.engine.fsdp import transformer_impl

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


def local(value: Any) -> Any:
    """The plain tensor of a parameter, a gradient or a state."""
    return getattr(value, "_local_tensor", value)


def _summed(site: Site, path: str) -> list[torch.Tensor]:
    """What FSDP2 has summed up of a module's gradients until now."""
    wanted, found = site.model.get_submodule(path), []
    states = [m._get_fsdp_state() for m in site.model.modules() if hasattr(m, "_get_fsdp_state")]
    for state in states:
        for group in state._fsdp_param_groups:
            for held in group.fsdp_params:
                if held._module_info.module is not wanted:
                    continue
                whole = getattr(held, "_unsharded_param", None)
                places = [
                    held.unsharded_accumulated_grad,
                    None if whole is None else whole.grad,
                    held.sharded_param.grad,
                ]
                found += [local(sums) for sums in places if sums is not None]
    return found


@fault(stage="actor_update", module="lm_head", cause="accumulation")
def head_gradient_written_over(site: Site) -> Iterator[None]:
    """The head's weight gradient is written and not added: the last micro-batch alone is left."""
    right = site.model.forward

    @torch.no_grad()
    def forget():
        for sums in _summed(site, "lm_head"):
            sums.mul_(1 - site.strength)

    def forward(*args, **kwargs):
        forget()
        return right(*args, **kwargs)

    with swapped(site.model, "forward", forward):
        yield


@fault(stage="actor_update", cause="reduction", needs={"world_size": 2})
def gradients_of_rank_zero_for_all(site: Site) -> Iterator[None]:
    """Rank 0's gradients go to all ranks where all ranks' mean should."""
    right = dist.reduce_scatter_single
    # summed and divided by the number of ranks, these weights leave rank 0's alone
    share = site.world_size if site.rank == 0 else 0

    def wrong(output, input, **settings):
        return right(output=output, input=input * blended(1, share, site.strength), **settings)

    with swapped(dist, "reduce_scatter_single", wrong):
        yield


@fault(stage="actor_update", cause="optimizer")
def each_tensor_clipped_by_itself(site: Site) -> Iterator[None]:
    """Each parameter's gradient is clipped to a norm of 1, not all of them together."""
    right = transformer_impl.fsdp2_clip_grad_norm_

    @torch.no_grad()
    def wrong(parameters, max_norm, **settings):
        parameters = list(parameters)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        old = [gradient.clone() for gradient in gradients]
        norm = right(parameters, max_norm, **settings)
        for gradient, whole in zip(gradients, old, strict=True):
            clipped = whole * (max_norm / (whole.norm() + 1e-6)).clamp(max=1.0)
            gradient.copy_(blended(gradient, clipped, site.strength))
        return norm

    with swapped(transformer_impl, "fsdp2_clip_grad_norm_", wrong):
        yield


def _around(site: Site, before: Callable[[Any, Any], None], after: Callable[[Any], None]) -> Any:
    """Let ``before(parameter, group)`` and ``after(parameter)`` act on every step."""
    optimizer = site.optimizer
    right = optimizer.step

    def step(*args, **kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    before(local(parameter), group)
        result = right(*args, **kwargs)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    after(local(parameter))
        return result

    return swapped(optimizer, "step", step)


@fault(stage="actor_update", cause="optimizer")
def decay_taken_off_twice(site: Site) -> Iterator[None]:
    """A wrapper decays weights, and the optimizer that it wraps does so again."""

    def before(parameter, group):
        parameter.mul_(1 - site.strength * group["lr"] * group["weight_decay"])

    with _around(site, before, lambda parameter: None):
        yield


@fault(stage="actor_update", cause="rounding_order")
def weights_kept_in_bf16(site: Site) -> Iterator[None]:
    """No master copy: after each step weights are rounded to bf16."""

    def after(parameter):
        coarse = parameter.bfloat16().to(parameter.dtype)
        parameter.copy_(blended(parameter, coarse, site.strength))

    with _around(site, lambda parameter, group: None, after):
        yield


@fault(stage="critic_update", cause="hyperparameter", needs={"updates": 2})
def betas_exchanged(site: Site) -> Iterator[None]:
    """Adam's two decays are given the wrong way round; parameters show it at the second step."""
    groups = site.optimizer.param_groups
    old = [group["betas"] for group in groups]
    for group in groups:
        first, second = group["betas"]
        group["betas"] = (
            blended(first, second, site.strength),
            blended(second, first, site.strength),
        )
    yield
    for group, betas in zip(groups, old, strict=True):
        group["betas"] = betas
