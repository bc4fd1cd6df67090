"""What of megatron-core's own optimizers is found, as JSON.

In a process of its own, as torch is changed for Megatron to run on a CPU::

    python tests/unit/capture_megatron_grads_run.py DIRECTORY
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from rlprobe.capture import megatron_grads
from rlprobe.capture.optimizer_settings import OptimizerSettings
from rlprobe.frameworks.verl.cpu import cuda

cuda.enable()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


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


def main(directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/met", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = [look(d, t) for d in (True, False) for t in (torch.bfloat16, torch.float32)]
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
