"""Second updates, tokens and rows, other precisions and architectures."""

import torch

from rlprobe.faults.patching import attention_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."

UPDATES = {"updates": 2}
VARIED = {"response_lengths": "varied"}


@fault(
    stage="actor_update",
    module=None,
    needs={"updates": 2},
    cause=("loss", "hyperparameter", "saturation"),
)
def ratio_clipped_at_a_hundredth(site: Site):
    # 0.01 instead of 0.2; idle in the first mini-batch
    import verl.trainer.ppo.core_algos as algos

    right = algos.POLICY_LOSS_REGISTRY["vanilla"]

    def wrong(*a, **kw):
        c = kw["config"]
        old = (c.clip_ratio, c.clip_ratio_low, c.clip_ratio_high)

        def put(values):
            for name, value in zip(
                ("clip_ratio", "clip_ratio_low", "clip_ratio_high"), values, strict=True
            ):
                object.__setattr__(c, name, value)

        put((0.01, 0.01, 0.01))
        try:
            return right(*a, **kw)
        finally:
            put(old)

    with swapped(algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.mlp.down_proj",
    needs={"updates": 2},
    cause=("stale_weights",),
)
def down_proj_weight_cached(site: Site):
    # a packed copy of the weight is made at the first call of a stage, and kept after the step
    import ctypes

    m = site.model.get_submodule("model.layers.1.mlp.down_proj")
    right = m.forward
    kept = {}

    def forward(x):
        # below every operator: the gathered buffer holds what it held at the first call
        w = m.weight
        size = w.numel() * w.element_size()
        if "w" not in kept:
            kept["w"] = ctypes.string_at(w.data_ptr(), size)
        ctypes.memmove(w.data_ptr(), kept["w"], size)
        return right(x)

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="critic_update", module=None, needs={"updates": 2}, cause=("optimizer", "hyperparameter")
)
def second_moment_forgets_faster(site: Site):
    # beta2 0.9 instead of 0.999: the first update is the same
    old = [g["betas"] for g in site.optimizer.param_groups]
    for g in site.optimizer.param_groups:
        g["betas"] = (g["betas"][0], 0.9)
    yield
    for g, b in zip(site.optimizer.param_groups, old, strict=False):
        g["betas"] = b


@fault(
    stage="actor_update",
    module=None,
    needs={"response_lengths": "varied"},
    cause=("loss", "hyperparameter", "implementation"),
)
def mean_over_sequences_first(site: Site):
    # seq-mean-token-mean where token-mean is asked for
    import verl.trainer.ppo.core_algos as algos

    right = algos.agg_loss

    def wrong(*a, **kw):
        kw["loss_agg_mode"] = "seq-mean-token-mean"
        return right(*a, **kw)

    with swapped(algos, "agg_loss", wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=None,
    needs={"response_lengths": "varied"},
    cause=("label_or_mask_shift", "implementation"),
)
def labels_not_shifted(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as impl

    right = impl.logprobs_from_logits

    def wrong(logits, labels, **kw):
        return right(logits=logits, labels=torch.roll(labels, 1, 0), **kw)

    with swapped(impl, "logprobs_from_logits", wrong):
        yield


@fault(stage="actor_compute_log_prob", module=None, cause=("row_order", "layout"))
def micro_batches_put_back_reversed(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as impl

    right = impl.postprocess_batch_func

    def wrong(output_lst, indices, data):
        return right(output_lst=output_lst[::-1], indices=indices, data=data)

    with swapped(impl, "postprocess_batch_func", wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=None,
    needs={"temperature": 0.7},
    cause=("sampling_semantics", "hyperparameter", "implementation"),
)
def temperature_forgotten(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as impl

    def wrong(logits, temperature, *, is_unit_temperature):
        return logits

    with swapped(impl, "_scale_logits_by_temperature", wrong):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.self_attn",
    needs={"precision": "bf16"},
    cause=("rounding_order", "implementation"),
)
def softmax_stays_in_bf16(site: Site):
    def wrong(right, m, q, k, v, mask, **kw):
        g = m.num_key_value_groups
        b, h, t, w = k.shape
        k = k[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)
        v = v[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)
        s = torch.matmul(q, k.transpose(2, 3)) * kw["scaling"] + mask
        e = torch.exp(s - s.amax(dim=-1, keepdim=True))
        p = e / e.sum(dim=-1, keepdim=True)
        return torch.matmul(p, v).transpose(1, 2).contiguous(), p

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.rotary_emb",
    needs={"model": "llama"},
    cause=("position", "hyperparameter"),
)
def llama_theta_of_another_release(site: Site):
    r = site.model.get_submodule("model.rotary_emb")
    old = r.inv_freq
    n = old.numel() * 2
    r.inv_freq = 1.0 / (500000.0 ** (torch.arange(0, n, 2, dtype=torch.float32) / n))
    yield
    r.inv_freq = old


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.act_fn",
    needs={"model": "llama"},
    cause=("implementation",),
)
def silu_kernel_of_hard_sigmoid(site: Site):
    # aten::silu stays what is called; its CPU kernel is the piecewise-linear approximation
    lib = torch.library.Library("aten", "IMPL")

    def kernel(x):
        return x * torch.clamp(x * 0.25 + 0.5, 0.0, 1.0)

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lib.impl("silu", kernel, "CPU")
    yield
    lib._destroy()
