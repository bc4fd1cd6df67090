"""Forward passes: attention, rotations, norms, products, formats below the dispatcher."""

import contextlib
import sys
import warnings

import numpy
import torch

from rlprobe.faults.patching import attention_of, output_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


@contextlib.contextmanager
def _rotary_of(module, wrong):
    """Let one attention module rotate by ``wrong(right, q, k, cos, sin)``."""
    file = sys.modules[type(module).__module__]
    forward, right = module.forward, file.apply_rotary_pos_emb

    def rotate(q, k, cos, sin, *args, **kwargs):
        return wrong(right, q, k, cos, sin)

    def called(*args, **kwargs):
        with swapped(file, "apply_rotary_pos_emb", rotate):
            return forward(*args, **kwargs)

    with swapped(module, "forward", called):
        yield


@contextlib.contextmanager
def _kernel(name, function):
    """Replace a CPU kernel of aten by ``function``."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _scores(module, query, key, value, mask, scaling):
    n = module.num_key_value_groups
    k, v = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
    scores = query @ k.transpose(2, 3) * scaling
    return (scores if mask is None else scores + mask), v


@fault(stage="actor_compute_log_prob", module=L + "1.self_attn", cause="position")
def keys_rotated_in_half_their_width(site: Site):
    m = site.model.get_submodule(L + "1.self_attn")

    def wrong(right, q, k, cos, sin):
        turned, keys = right(q, k, cos, sin)
        half = k.shape[-1] // 2
        keep = torch.arange(k.shape[-1]) % half >= half // 2
        return turned, torch.where(keep, k, keys)

    with _rotary_of(m, wrong):
        yield


@fault(stage="reference_compute_log_prob", module=L + "1.input_layernorm", cause="implementation")
def norm_takes_the_mean_off(site: Site):
    m = site.model.get_submodule(L + "1.input_layernorm")

    def forward(x):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weight=m.weight, eps=m.variance_epsilon
        )

    with swapped(m, "forward", forward):
        yield


@fault(stage="critic_compute_values", module=L + "1.mlp", cause="layout")
def swiglu_takes_the_other_half(site: Site):
    m = site.model.get_submodule(L + "1.mlp")

    def forward(x):
        fused = torch.cat((m.up_proj(x), m.gate_proj(x)), -1)
        gate, up = fused.chunk(2, -1)
        return m.down_proj(torch.nn.functional.silu(gate) * up)

    with swapped(m, "forward", forward):
        yield


@fault(stage="actor_compute_log_prob", module=L + "0.mlp.down_proj", cause="saturation")
def inputs_cut_at_three_deviations(site: Site):
    m = site.model.get_submodule(L + "0.mlp.down_proj")
    right = m.forward

    def forward(x):
        bound = 3 * x.std()
        return right(x.clamp(-bound, bound))

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "0.self_attn",
    cause=("rounding_order", "implementation"),
)
def softmax_sum_in_bf16(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        scores, v = _scores(module, query, key, value, mask, scaling)
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        p = e / e.sum(-1, keepdim=True).bfloat16().float()
        return (p @ v).transpose(1, 2).contiguous(), p

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(stage="critic_compute_values", module=L + "0.self_attn", cause="implementation")
def blocks_keep_their_own_maximum(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        scores, v = _scores(module, query, key, value, mask, scaling)
        running, shifted = None, []
        for block in scores.split(16, -1):
            top = block.amax(-1, keepdim=True)
            running = top if running is None else torch.maximum(running, top)
            shifted.append(block - running)
        e = torch.exp(torch.cat(shifted, -1))
        p = e / e.sum(-1, keepdim=True)
        return (p @ v).transpose(1, 2).contiguous(), p

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(stage="reference_compute_log_prob", module=L + "0.self_attn", cause="mask")
def causal_by_tiles_of_sixteen(site: Site):
    def wrong(right, module, query, key, value, mask, *args, **kwargs):
        tile = torch.arange(query.shape[2]) // 16
        mask = mask.masked_fill(tile[:, None] == tile[None, :], 0.0)
        return right(module, query, key, value, mask, *args, **kwargs)

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(stage="actor_compute_log_prob", module=L + "1.self_attn", cause="mask")
def masked_scores_are_minus_eight(site: Site):
    def wrong(right, module, query, key, value, mask, *args, **kwargs):
        return right(module, query, key, value, mask.clamp(min=-8.0), *args, **kwargs)

    with attention_of(site.model.get_submodule(L + "1.self_attn"), wrong):
        yield


@fault(stage="actor_compute_log_prob", module=L + "0.mlp.down_proj", cause="rounding_order")
def wide_products_in_fp16(site: Site):
    def mm(a, b):
        if a.shape[1] == 128 and b.shape[1] == 64:
            a, b = a.half().float(), b.half().float()
        return torch.bmm(a[None], b[None])[0]

    with _kernel("mm", mm):
        yield


@fault(stage="critic_compute_values", module=L + "0.input_layernorm", cause="rounding_order")
def reciprocal_roots_in_bf16(site: Site):
    def rsqrt(x):
        return torch.sqrt(x).reciprocal().bfloat16().to(x.dtype)

    with _kernel("rsqrt", rsqrt):
        yield


@fault(stage="reference_compute_log_prob", module=L + "1.mlp.up_proj", cause="nondeterministic")
def tail_of_a_tile_never_written(site: Site):
    draw = numpy.random.default_rng()

    def change(y):
        y = y.clone()
        rows = y.view(-1, y.shape[-1])
        left = len(rows) % 16
        rest = rows[len(rows) - left :, -16:]
        rest.copy_(torch.from_numpy(draw.standard_normal(tuple(rest.shape))) * y.std())
        return y

    with output_of(site.model.get_submodule(L + "1.mlp.up_proj"), change):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "0.self_attn",
    cause="nonfinite",
    needs={"response_lengths": "varied"},
)
def padding_queries_are_nan(site: Site):
    def wrong(right, module, query, key, value, mask, *args, **kwargs):
        out, weights = right(module, query, key, value, mask, *args, **kwargs)
        padding = mask[:, 0, -1, :] < -1
        return out.masked_fill(padding[:, :, None, None], torch.nan), weights

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield
