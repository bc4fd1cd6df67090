"""What of megatron-core's own optimizers is found, as JSON.

In a process of its own, as torch is changed for Megatron to run on a CPU::

    python tests/unit/capture_megatron_grads_run.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from rlprobe.capture import megatron_grads, updates
from rlprobe.capture.optimizer_settings import OptimizerSettings
from rlprobe.frameworks.slime import running
from rlprobe.frameworks.slime import updates as slime_updates
from rlprobe.frameworks.verl.cpu import cuda

cuda.enable()

import megatron.core.optimizer as optimizers  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


class Aware(torch.optim.AdamW):
    """As Transformer Engine's Adam, which needs a GPU: it alone has fp32 copies of the weights, and
    reads gradients beside the parameters."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, lr=settings["lr"])

    def initialize_state(self, parameter: torch.Tensor) -> None:
        self.state[parameter]["master_param"] = parameter.detach().float()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                master = self.state[parameter]["master_param"]
                master -= group["lr"] * parameter.decoupled_grad.float()
                parameter.data.copy_(master)


def aware() -> dict[str, object]:
    """The distributed optimizer around such an Adam: gradients, norms, and what a step changes."""
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = Aware, False  # type: ignore[misc]
    optimizers.is_te_min_version = lambda *_, **__: True
    dtype = torch.bfloat16
    plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(2)))
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, bf16=True, params_dtype=dtype
    )
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), plain
    )
    options = OptimizerConfig(
        lr=1e-6, bf16=True, params_dtype=dtype, use_distributed_optimizer=True, clip_grad=0.0
    )
    # what it would set itself where Transformer Engine is installed
    options.use_precision_aware_optimizer = True
    options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(options, [model])
    model.zero_grad_buffer()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    model.finish_grad_sync()
    optimizer.prepare_grads()
    found = list(megatron_grads.gradients([model], optimizer))
    before = updates.snapshot([model], lambda _: True, optimizer=optimizer)
    told = {
        "names": sorted(item.name for item, _ in found),
        "norm": float(updates.group_norms(optimizer, [model]).square().sum().sqrt()),
        "own": float(optimizer.get_grad_norm()),
        "squares": sum(float(gradient.double().square().sum()) for _, gradient in found),
        "stepped": len(list(megatron_grads.stepped([model], optimizer))),
    }
    optimizer.step_with_ready_grads()
    records = updates.UpdateRecords(lambda name: name, with_sketch=False, wanted=lambda _: True)
    records.changes([model], before, optimizer)
    records.resolve()
    changes = {name: leaf["Norm"] for name, leaf in records.data.items()}
    return {**told, "changes": changes, "kept": sorted(records.places)}


def look(distributed: bool, dtype: torch.dtype) -> dict[str, object]:
    half = dtype == torch.bfloat16
    plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(2)))
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, bf16=half, params_dtype=dtype
    )
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, buffers, plain)
    options = OptimizerConfig(
        lr=1e-3, bf16=half, params_dtype=dtype, use_distributed_optimizer=distributed
    )
    optimizer = get_megatron_optimizer(options, [model])
    model.zero_grad_buffer()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    model.finish_grad_sync()
    optimizer.prepare_grads()
    found = list(megatron_grads.gradients([model], optimizer))
    squares = sum(float(gradient.double().square().sum()) for _, gradient in found)
    return {
        "distributed": distributed,
        "dtype": str(dtype),
        "names": sorted(item.name for item, _ in found),
        "dtypes": sorted({str(gradient.dtype) for _, gradient in found}),
        "norm": squares**0.5,
        "own": float(optimizer.get_grad_norm()),
        "stepped": len(list(megatron_grads.stepped([model], optimizer))),
        "settings": OptimizerSettings([model], optimizer).read(),
    }


class Scope:
    """What a stage's scope is told in one step, in order."""

    def __init__(self, model: Any) -> None:
        self.model, self.told = model, list[tuple[str, float]]()

    def gradients(self, kind: str, optimizer: Any) -> None:
        found = megatron_grads.gradients([self.model], optimizer)
        squares = sum(float(gradient.double().square().sum()) for _, gradient in found)
        self.told.append((kind, squares**0.5))

    def gradient_norms(self, optimizer: Any) -> None:
        norms = updates.group_norms(optimizer, [self.model])
        self.told.append(("groups", float(norms.square().sum().sqrt())))

    def total_norm(self, norm: Any) -> None:
        self.told.append(("total", float(norm)))

    def settings(self, optimizer: Any) -> None:
        self.told.append(("settings", optimizer.param_groups[0]["lr"]))


def slime(distributed: bool) -> list[tuple[str, float]]:
    """What slime's hooks see of a step that clips, and that the optimizer is left as it was."""
    plain = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, buffers, plain)
    options = OptimizerConfig(lr=0.25, clip_grad=0.5, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(options, [model])
    model.zero_grad_buffer()
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    scope: Any = Scope(model)
    before = dict(vars(optimizer))
    with patch.object(running, "scope", lambda: scope), slime_updates.watched(optimizer):
        result = optimizer.step()
    assert result[0] and vars(optimizer).keys() == before.keys()
    return [*scope.told, ("own", float(result[1]))]


def main(directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/met", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = [look(d, t) for d in (True, False) for t in (torch.bfloat16, torch.float32)]
    seen = [slime(distributed) for distributed in (True, False)]
    print(json.dumps([*found, seen, aware()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
