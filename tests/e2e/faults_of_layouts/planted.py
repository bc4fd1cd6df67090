"""Faults that are planted in every layout, under the Hugging Face names of what they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture import megatron_grads
from rlprobe.capture.light.pieces import Undivided
from rlprobe.capture.megatron_places import MegatronPlaces
from rlprobe.capture.names import named_modules
from rlprobe.capture.parameters import held
from rlprobe.selftest import fault

REFERENCE, LOG_PROB = "reference_compute_log_prob", "actor_compute_log_prob"
ACTOR = "actor_update"


def chunks(site: Any) -> list[nn.Module]:
    return list(site.model) if isinstance(site.model, list) else [site.model]


def changed(site: Any, name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """Change what a module gives, its own part of it where it is fused with others."""
    models = chunks(site)
    places = MegatronPlaces.of(models) or Undivided()
    stack = ExitStack()
    for _, path, module in named_modules(models):

        def hook(module: nn.Module, args: Any, output: Any, path: str = path) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, Tensor):
                return None
            width = tensor.shape[-1]
            for piece in places.pieces(path, module, "forward", "output", width):
                if piece.module != name:
                    continue
                if piece.features is None:
                    found = change(tensor)
                else:
                    own = torch.tensor(piece.features)
                    found = tensor.index_copy(-1, own, change(tensor.index_select(-1, own)))
                return (found, *output[1:]) if isinstance(output, tuple) else found
            return None

        stem = name.rpartition(".")[0]
        if path == name or path in (f"{stem}.qkv_proj", f"{stem}.gate_up_proj"):
            stack.callback(module.register_forward_hook(hook).remove)
    return stack


def scaled(site: Any, name: str, factor: float) -> Iterator[None]:
    with changed(site, name, lambda tensor: tensor * factor):
        yield


@contextmanager
def epsilon(site: Any, name: str) -> Iterator[None]:
    norms = [module for _, path, module in named_modules(chunks(site)) if path == name]
    attribute = ["variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
                 for norm in norms]  # fmt: skip
    old = [getattr(norm, key) for norm, key in zip(norms, attribute, strict=True)]
    for norm, key in zip(norms, attribute, strict=True):
        setattr(norm, key, 1e-2)
    yield
    for norm, key, value in zip(norms, attribute, old, strict=True):
        setattr(norm, key, value)


@fault(stage=LOG_PROB, module="model.layers.2.input_layernorm", cause="hyperparameter")
def norm_epsilon(site: Any) -> Iterator[None]:
    with epsilon(site, "model.layers.2.input_layernorm"):
        yield


@fault(stage=LOG_PROB, module="model.norm", cause="hyperparameter")
def last_epsilon(site: Any) -> Iterator[None]:
    with epsilon(site, "model.norm"):
        yield


@fault(stage=REFERENCE, module="model.embed_tokens", cause="constant_factor")
def embedding(site: Any) -> Iterator[None]:
    yield from scaled(site, "model.embed_tokens", 1.001)


@fault(stage=LOG_PROB, module="model.rotary_emb", cause="hyperparameter")
def angles(site: Any) -> Iterator[None]:
    """Positions are turned by the angles of a base twice as large."""
    tables = [module for _, path, module in named_modules(chunks(site))
              if path == "model.rotary_emb"]  # fmt: skip
    right = [table.inv_freq for table in tables]
    for table, old in zip(tables, right, strict=True):
        share = torch.arange(len(old), dtype=old.dtype, device=old.device) / len(old)
        table.inv_freq = old * 2.0**-share
        _forget(table)
    yield
    for table, old in zip(tables, right, strict=True):
        table.inv_freq = old
        _forget(table)


@fault(stage=REFERENCE, module="model.rotary_emb", cause="rounding_order")
def short_frequencies(site: Any) -> Iterator[None]:
    """The frequencies that positions are turned by are held in bf16."""
    tables = [module for _, path, module in named_modules(chunks(site))
              if path == "model.rotary_emb"]  # fmt: skip
    right = [table.inv_freq for table in tables]
    for table, old in zip(tables, right, strict=True):
        table.inv_freq = old.bfloat16()
        _forget(table)
    yield
    for table, old in zip(tables, right, strict=True):
        table.inv_freq = old
        _forget(table)


def _forget(table: nn.Module) -> None:
    """Megatron keeps the angles of each length."""
    for kept in (type(table).forward, getattr(type(table), "get_emb", None)):
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


@fault(stage=LOG_PROB, module="model.layers.0.self_attn.o_proj", cause="constant_factor")
def attention_output(site: Any) -> Iterator[None]:
    yield from scaled(site, "model.layers.0.self_attn.o_proj", 1.01)


@fault(stage=LOG_PROB, module="model.layers.3.self_attn.q_proj", cause="constant_factor")
def queries(site: Any) -> Iterator[None]:
    yield from scaled(site, "model.layers.3.self_attn.q_proj", 1.01)


@fault(stage=REFERENCE, module="model.layers.1.mlp.up_proj", cause="constant_factor")
def up(site: Any) -> Iterator[None]:
    yield from scaled(site, "model.layers.1.mlp.up_proj", 1.01)


@fault(stage=LOG_PROB, module="model.layers.1.mlp.down_proj", cause="constant_factor")
def down(site: Any) -> Iterator[None]:
    yield from scaled(site, "model.layers.1.mlp.down_proj", 1.01)


@fault(stage=LOG_PROB, module="lm_head", cause=("constant_factor", "sampling_semantics"))
def logits(site: Any) -> Iterator[None]:
    yield from scaled(site, "lm_head", 1.001)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.05


@fault(stage=ACTOR, module="model.layers.1.mlp.down_proj", cause="constant_factor")
def sent_back(site: Any) -> Iterator[None]:
    with changed(site, "model.layers.1.mlp.down_proj", _Scaled.apply):
        yield


@fault(stage=ACTOR, cause="hyperparameter")
def learning_rate(site: Any) -> Iterator[None]:
    parts = getattr(site.optimizer, "chained_optimizers", [site.optimizer])
    groups = [group for part in parts for group in part.param_groups]
    for group in groups:
        group["lr"] *= 1.02
    yield
    for group in groups:
        group["lr"] /= 1.02


def stepped(site: Any, name: str) -> Iterator[tuple[Tensor, Any]]:
    """What of a parameter this rank steps, and the torch optimizer that steps it."""
    if megatron_grads.is_megatron(site.optimizer):
        found = megatron_grads.stepped(chunks(site), site.optimizer)
    else:
        found = ((item, site.optimizer) for item in held(chunks(site)))
    for item, optimizer in found:
        if item.name == name:
            # FSDP1's flat parameter holds those of other modules as well
            flat = hasattr(item.parameter, "_fqns")
            main = item.local if flat else getattr(item.parameter, "_local_tensor", item.parameter)
            yield main, optimizer


@fault(stage=ACTOR, module="model.layers.2.self_attn.o_proj", cause="optimizer")
def one_step(site: Any) -> Iterator[None]:
    """The optimizer moves one module's weights half as far again."""
    with ExitStack() as stack:
        for main, optimizer in list(stepped(site, "model.layers.2.self_attn.o_proj.weight")):
            before: list[Tensor] = []

            def keep(*_: Any, main: Tensor = main, before: list[Tensor] = before) -> None:
                before[:] = [main.detach().clone()]

            def further(*_: Any, main: Tensor = main, before: list[Tensor] = before) -> None:
                with torch.no_grad():
                    main.add_(main - before[0], alpha=0.5)

            stack.callback(optimizer.register_step_pre_hook(keep).remove)
            stack.callback(optimizer.register_step_post_hook(further).remove)
        yield


@fault(stage=LOG_PROB, module="model.layers.1.mlp.gate_proj", cause="constant_factor")
def one_shard(site: Any) -> Iterator[None]:
    """On the last rank alone."""
    if site.rank == site.world_size - 1:
        yield from scaled(site, "model.layers.1.mlp.gate_proj", 1.02)
    else:
        yield
