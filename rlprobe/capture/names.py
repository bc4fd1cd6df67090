"""Names of modules and parameters as the Hugging Face model spells them, without wrappers.

FSDP, DDP, activation checkpointing, torch.compile and PEFT put modules of their own around the
model's. A name that carries them matches nothing on a device that wraps differently.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rlprobe.capture.megatron_names import MegatronNames
from rlprobe.logical.wrappers import COMPONENTS, PEFT_LAYER

#: Wrapper classes and the attribute under which each keeps what it wraps.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "Float16Module": "module",
    "DeepSpeedEngine": "module",
    "LoraModel": "model",
}


def _wrapped_attribute(module: nn.Module) -> str | None:
    name = class_name(module)  # FSDP2 makes a class of its own of a wrapper too
    if name.startswith("PeftModel"):
        return "base_model"
    return _WRAPPERS.get(name)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module only wraps another one (its calls are the other's calls)."""
    attribute = _wrapped_attribute(module)
    return attribute is not None and isinstance(getattr(module, attribute, None), nn.Module)


def unwrap(model: nn.Module) -> tuple[str, nn.Module]:
    """The innermost model and the prefix its parameters carry in the outermost one.

    ``DDP(PeftModel(LoraModel(Qwen2)))`` gives ``("module.base_model.model.", Qwen2)``.
    """
    prefix = ""
    while is_wrapper(model):
        attribute = str(_wrapped_attribute(model))
        prefix += attribute + "."
        model = getattr(model, attribute)
    return prefix, model


def strip(path: str, prefix: str = "") -> str:
    """A module's path without the outer prefix and without wrapper components."""
    path = path[len(prefix) :] if path.startswith(prefix) else path
    return ".".join(part for part in path.split(".") if part not in COMPONENTS)


def parameter_name(path: str, prefix: str = "") -> str:
    """A parameter's Hugging Face path: as :func:`strip`, and PEFT's ``base_layer`` taken out.

    ``base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight`` becomes
    ``model.layers.0.self_attn.q_proj.weight``; adapters keep their own names.
    """
    return ".".join(part for part in strip(path, prefix).split(".") if part != PEFT_LAYER)


def class_name(module: nn.Module) -> str:
    """The class a module had before FSDP2 replaced it (``FSDPQwen2Model`` is ``Qwen2Model``).

    ``fully_shard`` makes a class ``FSDP<Name>`` with the bases ``FSDPModule`` and ``<Name>``;
    a class of the model's own that merely begins with FSDP keeps its name.
    """
    cls = type(module)
    bases = cls.__bases__
    if len(bases) == 2 and bases[0].__name__ in ("FSDPModule", "UnshardedFSDPModule"):
        return bases[1].__name__
    return cls.__name__


def named_modules(models: list[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """``(record prefix, path, module)`` of every module that is neither a root nor a wrapper.

    The record prefix is msprobe's: ``Module.{path}.{class}``, and with several model chunks
    ``Module.{chunk}.{path}.{class}``. A module reachable by two paths appears under the first.
    Megatron's modules have their Hugging Face names and global layers, which need no chunk.
    """
    seen: set[str] = set()
    megatron = MegatronNames.of([unwrap(model)[1] for model in models])
    for index, model in enumerate(models):
        outer, root = unwrap(model)
        chunk = f"{index}." if len(models) > 1 and megatron is None else ""
        for raw, module in model.named_modules():
            if module is model or module is root or is_wrapper(module):
                continue
            path = strip(raw, outer)
            if megatron is not None:
                path = megatron.module(index, path)
            record = f"Module.{chunk}{path}.{class_name(module)}"
            if record in seen:  # two modules under one stripped path: keep the wrappers apart
                path = raw
                record = f"Module.{chunk}{raw}.{class_name(module)}"
            seen.add(record)
            yield record, path, module
