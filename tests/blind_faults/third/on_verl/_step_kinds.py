"""Kinds of fault between the gradients of micro-batches and the new weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from _layer_kinds import plain

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site


def gradients_kept(site: Site, at: None) -> Iterator[None]:
    """Gradients are not set to zero between two mini-batches. On or off."""
    with swapped(site.optimizer, "zero_grad", lambda *args, **settings: None):
        yield
    site.optimizer.zero_grad()


def reduced_in(site: Site, at: None, dtype: str) -> Iterator[None]:
    """Each rank's gradients are rounded before they are reduced."""
    right, short = dist.reduce_scatter_single, getattr(torch, dtype)

    def wrong(output, input, **settings):
        input.copy_(blended(input, input.to(short).to(input.dtype), site.strength))
        return right(output=output, input=input, **settings)

    with swapped(dist, "reduce_scatter_single", wrong):
        yield


def averaged_over(site: Site, at: None, ranks: int) -> Iterator[None]:
    """Summed gradients are divided by another number of ranks than there are."""
    states = [m._get_fsdp_state() for m in site.model.modules() if hasattr(m, "_get_fsdp_state")]
    with contextlib.ExitStack() as changed:
        for group in (group for state in states for group in state._fsdp_param_groups):
            # gloo has no reduction that multiplies; the divisor then comes after a plain sum
            changed.enter_context(swapped(group, "force_sum_reduction_for_comms", True))
            divisor = blended(float(site.world_size), ranks, site.strength)
            changed.enter_context(swapped(group, "gradient_divide_factor", divisor))
        yield


def clipped_by_own_norm(site: Site, at: None) -> Iterator[None]:
    """Each rank clips by the norm of what lies on it."""
    from verl.workers.engine.fsdp import transformer_impl

    right = transformer_impl.fsdp2_clip_grad_norm_

    def wrong(parameters, max_norm, **settings):
        parameters = [p for p in parameters if p.grad is not None]
        own = torch.stack([plain(p.grad).norm() for p in parameters]).norm()
        whole = right(parameters, torch.inf, **settings)
        whole = getattr(whole, "full_tensor", lambda: whole)()
        norm = blended(whole, own, site.strength)
        for parameter in parameters:
            plain(parameter.grad).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    with swapped(transformer_impl, "fsdp2_clip_grad_norm_", wrong):
        yield


def decay_in_the_gradient(site: Site, at: None) -> Iterator[None]:
    """Adam with the decay added to the gradient, not AdamW. On or off."""
    with contextlib.ExitStack() as changed:
        for group in site.optimizer.param_groups:
            changed.enter_context(swapped(group, "decoupled_weight_decay", False))
        yield


def steps_counted_from(site: Site, at: None, start: int) -> Iterator[None]:
    """Moments of zero come with a count of steps that were made before. On or off."""
    for group in site.optimizer.param_groups:
        for parameter in group["params"]:
            if not site.optimizer.state[parameter]:
                site.optimizer.state[parameter] = {
                    "step": torch.tensor(float(start)),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    yield


def _rounded_by_chance(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A bf16 number on either side, the nearer one the more often."""
    bits = x.contiguous().view(torch.int32)
    drawn = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + drawn) & ~0xFFFF).view(torch.float32)


def changes_rounded_by_chance(site: Site, at: None) -> Iterator[None]:
    """What a step adds to the weights is rounded to bf16, up or down as chance has it."""
    right = site.optimizer.step
    generator = torch.Generator()
    generator.seed()

    def step(*args, **settings):
        parameters = [p for group in site.optimizer.param_groups for p in group["params"]]
        before = [plain(p).clone() for p in parameters]
        result = right(*args, **settings)
        for parameter, old in zip(parameters, before, strict=True):
            new = plain(parameter)
            rounded = old + _rounded_by_chance(new - old, generator)
            new.copy_(blended(new, rounded, site.strength))
        return result

    with swapped(site.optimizer, "step", step):
        yield
