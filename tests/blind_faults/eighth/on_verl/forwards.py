"""Forward passes: attention, rotations, norms, products, experts."""

import torch
from _shared import bf16, rotary_of, scores_of, summed

from rlprobe.faults.patching import attention_of, output_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


def _norm(module, squares_of):
    """A norm whose mean squares are ``squares_of(x)``."""

    def forward(x):
        wide = x.float()
        root = torch.rsqrt(squares_of(wide) + module.variance_epsilon)
        return module.weight * (wide * root).to(x.dtype)

    return swapped(module, "forward", forward)


@fault(
    stage="reference_compute_log_prob",
    module=L + "0.post_attention_layernorm",
    cause="implementation",
)
def one_root_for_four_tokens(site: Site):
    def squares(x):
        first = torch.arange(x.shape[1]) // 4 * 4
        return x.pow(2).mean(-1, keepdim=True)[:, first]

    with _norm(site.model.get_submodule(L + "0.post_attention_layernorm"), squares):
        yield


@fault(
    stage="critic_compute_values",
    module=L + "1.input_layernorm",
    cause="implementation",
    needs={"model": "llama"},
)
def mean_square_over_all_tokens(site: Site):
    def squares(x):
        return x.pow(2).mean((-2, -1), keepdim=True)

    with _norm(site.model.get_submodule(L + "1.input_layernorm"), squares):
        yield


@fault(
    stage="reference_compute_log_prob",
    module=L + "0.input_layernorm",
    cause=("hyperparameter", "nonfinite", "implementation"),
    needs={"response_lengths": "varied"},
)
def epsilon_flushed_to_zero(site: Site):
    m = site.model.get_submodule(L + "0.input_layernorm")
    smallest = torch.finfo(torch.float16).tiny
    with swapped(m, "variance_epsilon", m.variance_epsilon if m.variance_epsilon > smallest else 0):
        yield


@fault(
    stage="reference_compute_log_prob",
    module=L + "1.mlp.down_proj",
    cause=("rounding_order", "implementation"),
)
def operands_chopped_to_bf16(site: Site):
    m = site.model.get_submodule(L + "1.mlp.down_proj")

    def chopped(x):
        return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)

    def forward(x):
        return torch.nn.functional.linear(chopped(x), chopped(m.weight.detach()))

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="reference_compute_log_prob",
    module=L + "1.self_attn",
    cause=("implementation", "position"),
    needs={"model": "llama"},
)
def rotation_reads_what_it_has_written(site: Site):
    def turned(x, cos, sin):
        half = x.shape[-1] // 2
        first = x[..., :half] * cos[..., :half] - x[..., half:] * sin[..., :half]
        second = x[..., half:] * cos[..., half:] + first * sin[..., half:]
        return torch.cat((first, second), -1)

    def rotate(q, k, cos, sin, *args, **kwargs):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return turned(q, cos, sin), turned(k, cos, sin)

    with rotary_of(site.model.get_submodule(L + "1.self_attn"), rotate):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "0.self_attn",
    cause=("implementation", "hyperparameter", "constant_factor"),
    needs={"model": "llama"},
)
def shared_key_tile_scaled_in_place(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        turn = torch.arange(query.shape[1]) % module.num_key_value_groups
        scale = (scaling ** (turn + 1).to(query.dtype))[:, None, None]
        s = scores_of(module, query * scale, key, mask, 1.0)
        return summed(module, torch.softmax(s, -1), value)

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "1.self_attn",
    cause=("mask", "implementation"),
    needs={"precision": "bf16"},
)
def tokens_do_not_see_themselves(site: Site):
    def wrong(right, module, query, key, value, mask, *args, **kwargs):
        own = torch.eye(query.shape[2], dtype=torch.bool)
        own[0, 0] = False
        mask = mask.masked_fill(own, torch.finfo(mask.dtype).min)
        return right(module, query, key, value, mask, *args, **kwargs)

    with attention_of(site.model.get_submodule(L + "1.self_attn"), wrong):
        yield


@fault(
    stage="critic_compute_values",
    module=L + "0.self_attn",
    cause="implementation",
    needs={"precision": "bf16"},
)
def attention_normalised_over_queries(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        s = scores_of(module, query, key, mask, scaling)
        return summed(module, torch.softmax(s, -2, dtype=torch.float32).to(s.dtype), value)

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0",
    cause=("rounding_order", "implementation"),
)
def residual_stream_in_bf16(site: Site):
    with output_of(site.model.get_submodule("model.layers.0"), bf16):
        yield


@fault(stage="critic_compute_values", module="score", cause=("saturation", "implementation"))
def values_stay_within_two(site: Site):
    with output_of(site.model.get_submodule("score"), lambda y: y.clamp(-2.0, 2.0)):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "1.mlp.experts",
    cause=("routing", "implementation"),
    needs={"model": "moe"},
)
def expert_offsets_of_the_call_before(site: Site):
    import torch.nn.functional as functional

    m = site.model.get_submodule(L + "1.mlp.experts")
    inside, product = m.forward, functional.grouped_mm
    before: list[torch.Tensor] = []
    now: list[torch.Tensor] = []

    def stale(a, b, *, offs=None, **kwargs):
        now[:] = [offs.clone()]
        known = before and before[0][-1] == offs[-1]
        return product(a, b, offs=before[0] if known else offs, **kwargs)

    def forward(*args, **kwargs):
        with swapped(functional, "grouped_mm", stale):
            found = inside(*args, **kwargs)
        before[:] = now
        return found

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "0.mlp.experts",
    cause=("routing", "implementation"),
    needs={"model": "moe"},
)
def both_experts_take_the_first_weight(site: Site):
    m = site.model.get_submodule(L + "0.mlp.experts")
    right = m.forward

    def forward(x, chosen, weights):
        return right(x, chosen, weights[:, :1].expand_as(weights).contiguous())

    with swapped(m, "forward", forward):
        yield
