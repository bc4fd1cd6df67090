"""Module paths without the wrappers that devices, back ends and adapters put around a model.

A record's ``module`` is the Hugging Face path (``model.layers.0.mlp.up_proj``), so that one module
has one name whether it ran bare, under DDP, FSDP, ``torch.compile``, activation checkpointing or
PEFT. Megatron's names are :mod:`rlprobe.logical.names`'s, fused projections
:mod:`rlprobe.logical.fused`'s.
"""

from __future__ import annotations

import re

#: Path components inserted by FSDP1, torch.compile and activation checkpointing, at any depth.
COMPONENTS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
#: DDP, Float16Module and Megatron's DDP each add one of these in front of the model.
_LEADING = "module"
#: PEFT's wrapper in front of the model, and the original layer inside a LoRA layer.
_PEFT_PREFIX = ("base_model", "model")
PEFT_LAYER = "base_layer"
#: FSDP2 renames classes: ``FSDPQwen2DecoderLayer``.
_FSDP2_CLASS = re.compile(r"^FSDP(?=[A-Z])")


def normalise_path(path: str) -> str:
    """The module (or parameter) path without wrapper components.

    A leading chunk number (``0.``, put there when a debugger watches a list of models) is kept.
    """
    if "." not in path and path not in COMPONENTS and path != _LEADING:
        return path
    parts = [part for part in path.split(".") if part not in COMPONENTS]
    chunk = [parts.pop(0)] if parts and parts[0].isdecimal() else []
    while parts and parts[0] == _LEADING:
        parts.pop(0)
    if tuple(parts[:2]) == _PEFT_PREFIX:
        # ``base_model.model.model.layers``: the second "model" is PEFT's, the third the model's own
        del parts[:2]
    return ".".join(chunk + [part for part in parts if part != PEFT_LAYER])


def normalise_class(name: str) -> str:
    """The class name without the prefix FSDP2 adds."""
    return _FSDP2_CLASS.sub("", name)
