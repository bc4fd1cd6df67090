"""The engine, weights that are loaded wrongly, and log-probs made of right logits."""

import contextlib

import torch
from _shared import log_probs, other_numbers

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


@fault(
    stage="forced_generation",
    module="model.rotary_emb",
    cause="position",
    needs={"generation": "compare"},
)
def engine_decodes_one_position_ahead(site: Site):
    m = site.model.get_submodule("model.rotary_emb")
    right, answer = m.forward, len(site.batch.response)

    def forward(x, position_ids):
        prompt = position_ids.shape[-1] - answer
        return right(x, position_ids + (position_ids >= prompt))

    with swapped(m, "forward", forward):
        yield


@fault(stage="forced_generation", cause="sampling_semantics", needs={"generation": "compare"})
def engine_penalises_repetition(site: Site):
    from rlprobe.frameworks.verl.engine import cpu_rollout

    right, response = cpu_rollout._distribution, site.batch.response

    def penalised(logits, sampling):
        logits = logits.clone()
        for row in range(1, len(logits)):
            seen = list(set(response[:row]))
            known = logits[row, seen]
            logits[row, seen] = torch.where(known > 0, known / 1.1, known * 1.1)
        return right(logits, sampling)

    with swapped(cpu_rollout, "_distribution", penalised):
        yield


@fault(
    stage="forced_generation",
    module=L + "1.self_attn.v_proj",
    cause=("weights", "layout"),
    verdict="not_comparable",
    needs={"generation": "compare"},
)
def engine_loads_kv_heads_exchanged(site: Site):
    m = site.model.get_submodule(L + "1.self_attn.v_proj")
    with other_numbers(m.weight, lambda w: w.roll(w.shape[0] // 2, 0)):
        yield


@fault(
    stage="reference_compute_log_prob",
    module=L + "1.mlp.up_proj",
    cause="weights",
    verdict="not_comparable",
)
def up_proj_of_the_layer_before(site: Site):
    first = site.model.get_submodule(L + "0.mlp.up_proj").weight
    second = site.model.get_submodule(L + "1.mlp.up_proj").weight
    earlier = getattr(first, "_local_tensor", first).detach().clone()
    with other_numbers(second, lambda w: earlier):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "0.mlp.experts",
    cause=("weights", "layout", "routing"),
    verdict="not_comparable",
    needs={"model": "moe"},
)
def experts_loaded_in_another_order(site: Site):
    m = site.model.get_submodule(L + "0.mlp.experts")
    with contextlib.ExitStack() as stack:
        for weight in (m.gate_up_proj, m.down_proj):
            stack.enter_context(other_numbers(weight, lambda w: w.flip(0)))
        yield


@fault(
    stage="actor_compute_log_prob",
    cause=("sampling_semantics", "implementation"),
    needs={"temperature": 0.7},
)
def temperature_divides_the_log_probs(site: Site):
    def change(right, logits, labels):
        return right(logits * 0.7, labels) / 0.7

    with log_probs(change):
        yield


@fault(stage="actor_compute_log_prob", cause=("label_or_mask_shift", "layout", "implementation"))
def chunk_edges_read_the_token_before(site: Site):
    def change(right, logits, labels):
        edge = torch.arange(len(logits)) % 8 == 0
        return right(torch.where(edge[:, None], logits.roll(1, 0), logits), labels)

    with log_probs(change):
        yield
