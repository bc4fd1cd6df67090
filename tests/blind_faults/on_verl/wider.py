"""On other alignments: bf16, fp16, experts, two ranks, a critic with a bias, a second step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rlprobe.faults.patching import blended, output_of, swapped
from rlprobe.selftest import Site, fault


def in_fp8(x: Any) -> Any:
    """The nearest number of e4m3, scaled so that a tensor's largest is the format's largest."""
    scale = 448 / x.abs().max().float().clamp(min=1e-12)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.down_proj",
    cause="rounding_order",
    needs={"precision": "bf16"},
)
def down_proj_reads_fp8(site: Site) -> Iterator[None]:
    """Activations are quantised to fp8 for one matmul of a model in bf16."""
    layer = site.model.get_submodule("model.layers.0.mlp.down_proj")
    right = layer.forward

    def forward(x):
        return right(blended(x, in_fp8(x), site.strength))

    with swapped(layer, "forward", forward):
        yield


@fault(
    stage="critic_update",
    module="model.layers.0.input_layernorm",
    cause="hyperparameter",
    needs={"precision": "fp16"},
)
def epsilon_that_fp16_can_hold(site: Site) -> Iterator[None]:
    """1e-6 is next to nothing in fp16, so the port takes 1e-2."""
    layer = site.model.get_submodule("model.layers.0.input_layernorm")
    with swapped(layer, "variance_epsilon", layer.variance_epsilon + 1e-2 * site.strength):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.gate",
    cause="routing",
    needs={"model": "moe"},
)
def experts_weighed_by_sigmoid(site: Site) -> Iterator[None]:
    """The same experts are chosen and weighed by sigmoids of their logits, not by softmax."""
    gate = site.model.get_submodule("model.layers.0.mlp.gate")
    right = gate.forward

    def forward(x):
        logits, scores, chosen = right(x)
        other = torch.sigmoid(logits.float()).gather(-1, chosen).to(scores.dtype)
        return logits, blended(scores, other, site.strength), chosen

    with swapped(gate, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.mlp.gate",
    cause="routing",
    needs={"model": "moe"},
)
def third_expert_for_the_second(site: Site) -> Iterator[None]:
    """A top-k that is one off behind the first. Weakened, fewer tokens are sent there."""
    gate = site.model.get_submodule("model.layers.1.mlp.gate")
    right = gate.forward

    def forward(x):
        logits, scores, chosen = right(x)
        chances, order = torch.softmax(logits, -1, dtype=torch.float).sort(-1, descending=True)
        other, there = chances[:, [0, 2]], order[:, [0, 2]]
        if gate.norm_topk_prob:
            other = other / other.sum(-1, keepdim=True)
        hit = (torch.arange(len(logits)) < site.strength * len(logits))[:, None]
        scores = torch.where(hit, other.to(scores.dtype), scores)
        return logits, scores, torch.where(hit, there, chosen)

    with swapped(gate, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.mlp.experts",
    cause="routing",
    needs={"model": "moe"},
)
def experts_have_a_capacity(site: Site) -> Iterator[None]:
    """Each expert takes three quarters of an even share, the first to come; the rest is lost."""
    experts = site.model.get_submodule("model.layers.0.mlp.experts")
    right = experts.forward

    def forward(x, chosen, weights):
        room = int(0.75 * chosen.numel() / experts.num_experts)
        one_hot = torch.nn.functional.one_hot(chosen.flatten(), experts.num_experts)
        place = (one_hot.cumsum(0) * one_hot).sum(-1).view(chosen.shape)
        left = torch.where(place > room, 1 - site.strength, 1.0).to(weights.dtype)
        return right(x, chosen, weights * left)

    with swapped(experts, "forward", forward):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.mlp",
    cause="implementation",
    needs={"model": "moe"},
)
def shared_expert_gate_without_sigmoid(site: Site) -> Iterator[None]:
    """The shared expert is weighed by the gate's logit itself."""
    block = site.model.get_submodule("model.layers.1.mlp")

    def forward(hidden):
        x = hidden.view(-1, hidden.shape[-1])
        shared = block.shared_expert(x)
        _, weights, chosen = block.gate(x)
        routed = block.experts(x, chosen, weights)
        logit = block.shared_expert_gate(x)
        out = routed + blended(torch.sigmoid(logit), logit, site.strength) * shared
        return out.reshape(hidden.shape)

    with swapped(block, "forward", forward):
        yield


def _groups(model: Any) -> list[Any]:
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    return [group for state in states for group in state._fsdp_param_groups]


@fault(stage="actor_update", cause="reduction", needs={"world_size": 2})
def ranks_summed_not_averaged(site: Site) -> Iterator[None]:
    """Gradients of two ranks are added and not divided. Clipping hides it from the weights."""
    with contextlib.ExitStack() as changed:
        for group in _groups(site.model):
            # gloo has no reduction that multiplies; the divisor then comes after a plain sum
            changed.enter_context(swapped(group, "force_sum_reduction_for_comms", True))
            factor = site.world_size / (1 + site.strength * (site.world_size - 1))
            changed.enter_context(swapped(group, "gradient_divide_factor", factor))
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.up_proj",
    cause="saturation",
    needs={"world_size": 2},
)
def second_rank_cuts_at_two(site: Site) -> Iterator[None]:
    """One of two devices cuts what is above 2 in one projection; the other is right."""
    if site.rank != 1:
        yield
        return

    def change(y):
        return y.clamp(max=2 + 8 * (1 - site.strength))

    with output_of(site.model.get_submodule("model.layers.0.mlp.up_proj"), change):
        yield


@fault(
    stage="critic_compute_values",
    module="score",
    cause="implementation",
    needs={"critic_head_bias": True},
)
def value_head_without_its_bias(site: Site) -> Iterator[None]:
    """The value head is a plain matmul; its bias is loaded and never added."""
    head = site.model.get_submodule("score")

    def forward(x):
        plain = torch.nn.functional.linear(x, head.weight)
        return plain if site.strength == 1 else plain + (1 - site.strength) * head.bias

    with swapped(head, "forward", forward):
        yield


#: What each process had in the first step, by rank.
_HELD: dict[int, Any] = {}


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.mlp.down_proj",
    cause="stale_weights",
    verdict="not_comparable",
    needs={"steps": 2},
)
def one_weight_a_step_behind(site: Site) -> Iterator[None]:
    """Log-probs of the second step are computed with one weight of the first."""
    weight = site.model.get_submodule("model.layers.1.mlp.down_proj").weight
    local = getattr(weight, "_local_tensor", weight).data
    if site.step == 0:
        _HELD[site.rank] = local.clone()
        yield
        return
    new = local.clone()
    local.copy_(blended(new, _HELD[site.rank], site.strength))
    yield
    local.copy_(new)
