"""What an engineer meets who ports verl to a new device."""

import os
import sys

import torch
import torch.nn.functional as F

from rlprobe.faults.patching import attention_of, swapped
from rlprobe.selftest import Site, benign, fault


def fresh():
    """A generator that no seed reaches, as of a device whose random state is not seeded."""
    g = torch.Generator()
    g.manual_seed(int.from_bytes(os.urandom(7), "little"))
    return g


def repeated(module, key, value):
    n = module.num_key_value_groups
    return key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)


# ---------------------------------------------------------------- forward modules
@fault(
    stage="actor_compute_log_prob",
    module="model.rotary_emb",
    cause="position",
    needs={"model": "llama"},
)
def rope_scaled_linearly(site: Site):
    rotary = site.model.get_submodule("model.rotary_emb")
    with swapped(rotary, "inv_freq", rotary.inv_freq / (1 + site.strength)):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.self_attn",
    cause=("implementation", "position", "layout"),
)
def rope_interleaved(site: Site):
    file = sys.modules[type(site.model.get_submodule("model.layers.0.self_attn")).__module__]

    def turn(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        half = cos.shape[-1] // 2
        cos = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
        sin = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    with swapped(file, "apply_rotary_pos_emb", rotary):
        yield


@fault(stage="actor_compute_log_prob", module="model.layers.0.self_attn", cause="implementation")
def softmax_off_by_one(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, dropout=0.0, **kw):
        key, value = repeated(module, key, value)
        scores = query @ key.transpose(2, 3) * scaling
        if mask is not None:
            scores = scores + mask
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        e = torch.exp(scores - top)
        weights = e / (e.sum(-1, keepdim=True) + site.strength * torch.exp(-top))
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.post_attention_layernorm",
    cause="implementation",
    needs={"algorithm": "grpo", "precision": "bf16"},
)
def layernorm_for_rmsnorm(site: Site):
    norm = site.model.get_submodule("model.layers.0.post_attention_layernorm")

    def forward(x):
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * y.to(x.dtype)

    with swapped(norm, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.mlp.gate",
    cause="routing",
    needs={"model": "moe"},
)
def experts_not_normalised(site: Site):
    with swapped(
        site.model.get_submodule("model.layers.0.mlp.gate"),
        "norm_topk_prob",
        not site.model.get_submodule("model.layers.0.mlp.gate").norm_topk_prob,
    ):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.self_attn",
    cause="mask",
    needs={"model": "llama"},
)
def first_token_hidden(site: Site):
    def wrong(right, module, query, key, value, mask, *args, **kw):
        mask = mask.clone()
        mask[..., 1:, 0] = torch.finfo(mask.dtype).min
        return right(module, query, key, value, mask, *args, **kw)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(stage="reference_compute_log_prob", module="lm_head", cause="weights")
def head_tied_to_embedding(site: Site):
    local = lambda p: getattr(p, "_local_tensor", p)  # noqa: E731
    head = local(site.model.get_submodule("lm_head").weight).data
    table = local(site.model.get_submodule("model.embed_tokens").weight).data
    kept = head.clone()
    head.copy_(table)
    yield
    head.copy_(kept)


@fault(
    stage="critic_compute_values", module="model.layers.0.self_attn.q_proj", cause="rounding_order"
)
def values_under_autocast(site: Site):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


# ---------------------------------------------------------------- random
@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause="nondeterministic",
    needs={"algorithm": "grpo", "lora": True},
)
def dropout_left_on(site: Site):
    g = fresh()

    def wrong(right, module, query, key, value, mask, scaling, dropout=0.0, **kw):
        key, value = repeated(module, key, value)
        scores = query @ key.transpose(2, 3) * scaling
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        keep = (torch.rand(weights.shape, generator=g) >= 0.1).to(weights.dtype) / 0.9
        weights = weights * keep
        return (weights @ value).transpose(1, 2).contiguous(), weights

    name = next(n for n, _ in site.model.named_modules() if n.endswith("model.layers.0.self_attn"))
    with attention_of(site.model.get_submodule(name), wrong):
        yield


class RacingLinear(torch.autograd.Function):
    """Of the weight's gradient some rows are overwritten by another thread's zeros."""

    @staticmethod
    def forward(ctx, x, weight, g):
        ctx.save_for_backward(x, weight)
        ctx.g = g
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        dw = d.flatten(0, -2).T @ x.flatten(0, -2)
        rows = torch.rand(dw.shape[0], generator=ctx.g) < 0.1
        dw[rows] = 0
        return d @ weight, dw, None


@fault(stage="critic_update", module="model.layers.1.mlp.down_proj", cause="nondeterministic")
def weight_gradient_races(site: Site):
    g = fresh()
    linear = site.model.get_submodule("model.layers.1.mlp.down_proj")
    with swapped(linear, "forward", lambda x: RacingLinear.apply(x, linear.weight, g)):
        yield


# ---------------------------------------------------------------- backward only
class HalfSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        p = F.softmax(scores, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, d):
        (p,) = ctx.saved_tensors
        return p * d  # without the row's sum


@fault(
    stage="actor_update",
    module="model.layers.1.self_attn",
    cause="implementation",
    needs={"model": "llama"},
)
def softmax_backward_lacks_sum(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, dropout=0.0, **kw):
        key, value = repeated(module, key, value)
        scores = query @ key.transpose(2, 3) * scaling
        if mask is not None:
            scores = scores + mask
        weights = HalfSoftmax.apply(scores).to(query.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


class CrudeSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d * torch.sigmoid(x)  # lacks x * s * (1 - s)


@fault(stage="critic_update", module="model.layers.0.mlp.act_fn", cause="implementation")
def silu_backward_crude(site: Site):
    act = site.model.get_submodule("model.layers.0.mlp.act_fn")
    with swapped(act, "forward", CrudeSilu.apply):
        yield


class MeanBiasLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        flat = d.flatten(0, -2)
        return d @ weight, flat.T @ x.flatten(0, -2), flat.mean(0)


@fault(
    stage="actor_update",
    module="model.layers.0.self_attn.q_proj",
    cause="constant_factor",
    needs={"algorithm": "grpo"},
)
def bias_gradient_averaged(site: Site):
    linear = site.model.get_submodule("model.layers.0.self_attn.q_proj")
    with swapped(linear, "forward", lambda x: MeanBiasLinear.apply(x, linear.weight, linear.bias)):
        yield


# ---------------------------------------------------------------- optimizer
def optimizer_kernel(change):
    import importlib

    file = importlib.import_module("torch.optim.adam")
    right = file.adam
    return swapped(file, "adam", lambda *a, **kw: change(right, *a, **kw))


@fault(stage="critic_update", cause="optimizer")
def decay_coupled(site: Site):
    """A fused kernel that implements Adam's L2 where AdamW's decay is meant."""

    def wrong(right, *a, **kw):
        kw["decoupled_weight_decay"] = False
        return right(*a, **kw)

    with optimizer_kernel(wrong):
        yield


@fault(stage="actor_update", cause=("optimizer", "hyperparameter"), needs={"updates": 2})
def other_beta2(site: Site):
    groups = site.optimizer.param_groups
    kept = [g["betas"] for g in groups]
    for g in groups:
        g["betas"] = (g["betas"][0], 0.95)
    yield
    for g, b in zip(groups, kept, strict=True):
        g["betas"] = b


@fault(
    stage="critic_update",
    cause=("optimizer", "hyperparameter", "constant_factor"),
    needs={"updates": 2},
)
def schedule_per_mini_batch(site: Site):
    groups = site.optimizer.param_groups
    kept = [g["lr"] for g in groups]
    right = site.optimizer.step

    def step(*a, **kw):
        result = right(*a, **kw)
        for g in groups:
            g["lr"] = g["lr"] * 0.5
        return result

    with swapped(site.optimizer, "step", step):
        yield
    for g, lr in zip(groups, kept, strict=True):
        g["lr"] = lr


@fault(stage="actor_update", module="lm_head", cause="optimizer", needs={"model": "moe"})
def head_not_stepped(site: Site):
    head = site.model.get_submodule("lm_head")

    def wrong(right, params, *lists, **kw):
        at = [i for i, p in enumerate(params) if p is not head.weight]
        kept = [[v[i] for i in at] if isinstance(v, list) and v else v for v in lists]
        return right([params[i] for i in at], *kept, **kw)

    with optimizer_kernel(wrong):
        yield


# ---------------------------------------------------------------- loss, advantages, key data
def for_good(owner, name, change):
    """Patch what the trainer calls between two stages; each trial is a process of its own."""
    right = getattr(owner, name)
    if not getattr(right, "_planted", False):
        patched = change(right)
        patched._planted = True
        setattr(owner, name, patched)


# shows in actor_update (what it is given); planted before, as the trainer computes advantages
@fault(stage="actor_compute_log_prob", cause="data", needs={"algorithm": "grpo"})
def advantages_without_std(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(*a, **kw):
            kw["norm_adv_by_std_in_grpo"] = False
            return right(*a, **kw)

        return wrong

    for_good(core_algos, "compute_grpo_outcome_advantage", change)
    yield


# shows in actor_update (what it is given); planted before
@fault(stage="critic_compute_values", cause="data")
def advantages_not_whitened(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(*a, **kw):
            with swapped(core_algos.verl_F, "masked_whiten", lambda v, m, **k: v):
                return right(*a, **kw)

        return wrong

    for_good(core_algos, "compute_gae_advantage_return", change)
    yield


@fault(stage="critic_update", cause="loss")
def huber_value_loss(site: Site):
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.workers.utils import losses

    right = losses.compute_value_loss

    def wrong(vpreds, returns, values, response_mask, cliprange_value, **kw):
        _, clipped = right(
            vpreds=vpreds,
            returns=returns,
            values=values,
            response_mask=response_mask,
            cliprange_value=cliprange_value,
            **kw,
        )
        each = F.smooth_l1_loss(vpreds, returns, reduction="none", beta=0.1)
        return agg_loss(loss_mat=each, loss_mask=response_mask, **kw), clipped

    with swapped(losses, "compute_value_loss", wrong):
        yield


@fault(
    stage="reference_compute_log_prob",
    cause="sampling_semantics",
    needs={"algorithm": "grpo", "temperature": 0.7},
)
def temperature_twice(site: Site):
    from verl.workers.engine.fsdp import transformer_impl as impl

    right = impl._scale_logits_by_temperature

    def wrong(logits, temperature, **kw):
        return right(right(logits, temperature, **kw), temperature, **kw)

    with swapped(impl, "_scale_logits_by_temperature", wrong):
        yield


@fault(stage="actor_update", cause=("accumulation",), needs={"updates": 2})
def gradients_not_zeroed(site: Site):
    right = site.optimizer.zero_grad
    calls = []

    def once(*a, **kw):
        calls.append(1)
        return right(*a, **kw) if len(calls) == 1 else None

    with swapped(site.optimizer, "zero_grad", once):
        yield
    right()


# ---------------------------------------------------------------- benign
@benign(needs={"model": "llama"})
def other_silu_and_root(site: Site):
    def silu(x, inplace=False):
        return x / (1 + torch.exp(-x))

    def forward(self, x):
        y = x.float()
        y = y / torch.sqrt(y.square().sum(-1, keepdim=True) / y.shape[-1] + self.variance_epsilon)
        return self.weight * y.to(x.dtype)

    norms = {type(m) for m in site.model.modules() if type(m).__name__.endswith("RMSNorm")}
    from contextlib import ExitStack

    with ExitStack() as stack:
        stack.enter_context(swapped(F, "silu", silu))
        for kind in norms:
            stack.enter_context(swapped(kind, "forward", forward))
        yield


@benign(needs={"model": "moe"})
def other_softmax_and_log_probs(site: Site):
    from verl.workers.engine.fsdp import transformer_impl as impl

    def log_probs(logits, labels, inplace_backward=True):
        picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        top = logits.amax(-1, keepdim=True).detach()
        return picked - top.squeeze(-1) - torch.log(torch.exp(logits - top).sum(-1))

    def attention(module, query, key, value, mask, scaling, dropout=0.0, **kw):
        key, value = repeated(module, key, value)
        scores = (query * scaling) @ key.transpose(2, 3)
        if mask is not None:
            scores = scores + mask
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = e / e.sum(-1, keepdim=True)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    first = next(m for n, m in site.model.named_modules() if n.endswith("self_attn"))
    file = sys.modules[type(first).__module__]
    with (
        swapped(impl, "logprobs_from_logits", log_probs),
        swapped(file, "eager_attention_forward", attention),
    ):
        yield
