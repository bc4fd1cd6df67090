"""Experts and their router, adapters, the reduction over two ranks."""

import torch

from rlprobe.faults.patching import output_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."

MOE = {"model": "moe"}
LORA = {"lora": True}
TWO = {"world_size": 2}


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.gate",
    needs={"model": "moe"},
    cause=("routing", "hyperparameter", "implementation"),
)
def router_renormalises(site: Site):
    # norm_topk_prob is False; the port's fused top-k always divides by the sum
    m = site.model.get_submodule("model.layers.0.mlp.gate")
    with swapped(m, "norm_topk_prob", not m.norm_topk_prob):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.mlp.gate",
    needs={"model": "moe"},
    cause=("rounding_order", "routing", "implementation"),
)
def router_softmax_in_fp16(site: Site):
    import torch.nn.functional as F

    m = site.model.get_submodule("model.layers.1.mlp.gate")

    def forward(x):
        x = x.reshape(-1, m.hidden_dim)
        logits = F.linear(x, m.weight)
        probs = torch.softmax(logits.to(torch.float16), dim=-1).to(torch.float32)
        top, index = torch.topk(probs, m.top_k, dim=-1)
        return logits, top.to(logits.dtype), index

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.mlp.experts",
    needs={"model": "moe"},
    cause=("layout",),
)
def experts_gate_and_up_swapped(site: Site):
    m = site.model.get_submodule("model.layers.1.mlp.experts")

    def gate(both):
        up, gate = both.chunk(2, dim=-1)
        return m.act_fn(gate) * up

    with swapped(m, "_apply_gate", gate):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.experts",
    needs={"model": "moe"},
    cause=("routing", "implementation"),
)
def expert_boundaries_one_late(site: Site):
    # each group takes the first token of the next
    import torch.nn.functional as F

    right = F.grouped_mm

    def wrong(a, b, *, offs=None, **kw):
        moved = offs.clone()
        moved[:-1] = torch.minimum(offs[:-1] + 1, offs[-1])
        return right(a, b, offs=moved, **kw)

    with swapped(F, "grouped_mm", wrong):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.mlp.gate",
    needs={"model": "moe"},
    cause=("implementation",),
)
def router_weights_without_gradient(site: Site):
    # a fused top-k has no backward; the port detaches its result
    m = site.model.get_submodule("model.layers.1.mlp.gate")
    right = m.forward

    def forward(x):
        logits, scores, index = right(x)
        return logits, scores.detach(), index

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.self_attn.q_proj",
    needs={"lora": True},
    cause=("hyperparameter", "constant_factor"),
)
def lora_scaled_by_root_of_rank(site: Site):
    m = next(x for n, x in site.model.named_modules() if n.endswith("layers.1.self_attn.q_proj"))
    old = dict(m.scaling)
    for k in old:
        m.scaling[k] = 16 / 8**0.5
    yield
    for k in old:
        m.scaling[k] = old[k]


@fault(
    stage="actor_update",
    module="model.layers.0.mlp.up_proj",
    needs={"lora": True},
    cause=("rounding_order", "implementation"),
)
def lora_a_returns_bf16(site: Site):
    a = next(
        x
        for n, x in site.model.named_modules()
        if n.endswith("layers.0.mlp.up_proj.lora_A.default")
    )

    def short(x):
        return x.to(torch.bfloat16).to(x.dtype)

    with output_of(a, short):
        yield


def _reduce(name, change):
    import torch.distributed as dist

    right = dist.reduce_scatter_single

    def wrong(*a, **kw):
        return change(right, *a, **kw)

    return swapped(dist, "reduce_scatter_single", wrong)


@fault(
    stage="actor_update",
    module=None,
    needs={"world_size": 2},
    cause=("reduction", "constant_factor"),
)
def ranks_summed_not_averaged(site: Site):
    import torch.distributed as dist

    def change(right, output, input, group=None, op=None, async_op=False):
        if op == dist.ReduceOp.AVG:
            return right(
                output=output, input=input, group=group, op=dist.ReduceOp.SUM, async_op=async_op
            )
        done = right(output=output, input=input, group=group, op=op, async_op=async_op)
        output.mul_(2.0)
        return done

    with _reduce("ranks_summed_not_averaged", change):
        yield


@fault(
    stage="critic_update",
    module=None,
    needs={"world_size": 2},
    cause=("reduction", "rounding_order"),
)
def ranks_reduced_in_bf16(site: Site):
    def change(right, output, input, group=None, op=None, async_op=False):
        input.copy_(input.to(torch.bfloat16))
        done = right(output=output, input=input, group=group, op=op, async_op=async_op)
        output.copy_(output.to(torch.bfloat16))
        return done

    with _reduce("ranks_reduced_in_bf16", change):
        yield


@fault(stage="critic_update", module=None, needs={"world_size": 2}, cause=("reduction",))
def ranks_not_reduced(site: Site):
    # the collective does nothing for groups that the port does not know: each rank keeps its own
    rank = site.rank

    def change(right, output, input, group=None, op=None, async_op=False):
        own = input.view(2, -1)[rank].clone()
        done = right(output=output, input=input, group=group, op=op, async_op=async_op)
        output.copy_(own.view_as(output))
        return done

    with _reduce("ranks_not_reduced", change):
        yield
