"""Megatron's module names and those of the Hugging Face model.

Which layers and experts a pipeline or expert-parallel rank has is told by its modules
(:mod:`rlprobe.capture.megatron_names`); what a component is called does not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlprobe.logical.fused import GATE_UP, NORMS, QKV

#: Components outside the layers.
OUTER = {
    "embedding.word_embeddings": "model.embed_tokens",
    "embedding": "model.embedding",
    "rotary_pos_emb": "model.rotary_emb",
    "decoder.final_layernorm": "model.norm",
    "decoder": "model.decoder",
    "output_layer": "lm_head",
}
#: Components of a layer.
INNER = {
    # multi-head latent attention (DeepSeek)
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    # attention
    "self_attention.linear_qkv": f"self_attn.{QKV}",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention": "self_attn",
    # the norm after attention is the one before the MLP
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.linear_fc1": f"mlp.{GATE_UP}",
    "mlp.linear_fc2": "mlp.down_proj",
}
#: The projections of an MLP, wherever it stands (experts, shared experts).
LINEAR = {"linear_fc1": GATE_UP, "linear_fc2": "down_proj"}
#: Transformer Engine fuses a norm into the projection behind it; its weight is the norm's.
FUSED_NORM = {
    "self_attention.linear_qkv.layer_norm_": f"{NORMS[QKV]}.",
    "self_attention.linear_q_down_proj.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attn.q_a_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attn.kv_a_layernorm.",
    "mlp.linear_fc1.layer_norm_": f"{NORMS[GATE_UP]}.",
}

#: Containers that a Hugging Face model has not, or not as such.
_CONTAINERS = ("embedding", _STACK := "decoder")


def is_stack(module: str) -> bool:
    """Whether a module holds a rank's own layers and nothing else: under one name another part of
    the model on each pipeline rank, and in each of its chunks."""
    return module.rpartition(".")[2] == _STACK and ".layers." not in module


def rewritten() -> Iterator[tuple[str, str]]:
    """Regular expressions over whole module paths, and what each is replaced by, in order.

    For paths of a dump whose modules are not at hand; a language model's prefix is left out.
    """
    for component, name in OUTER.items():
        if component not in _CONTAINERS:
            yield rf"^(?:language_model\.)?{re.escape(component)}$", name
    yield r"^(?:language_model\.)?decoder\.layers\.", "model.layers."
    for component in sorted(INNER, key=len, reverse=True):
        last = component.rpartition(".")[2]
        if last not in LINEAR:
            yield rf"\.{re.escape(component)}\b", f".{INNER[component]}"
    for component, name in LINEAR.items():
        yield rf"\.{component}\b", f".{name}"
