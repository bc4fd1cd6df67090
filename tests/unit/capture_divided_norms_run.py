"""Gradient norms of two tensor-parallel ranks of megatron-core over gloo, as JSON.

In processes of their own, as torch is changed for Megatron to run on a CPU::

    python tests/unit/capture_divided_norms_run.py RANK DIRECTORY
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlprobe.capture import updates
from rlprobe.frameworks.verl.cpu import cuda

cuda.enable()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import MegatronModule, TransformerConfig  # noqa: E402

RANKS, WIDTH = 2, 8


class Model(MegatronModule):
    """A table, a projection out and one back, divided between ranks; a norm that both have."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        plain = {"config": config, "init_method": nn.init.normal_}
        self.table = tensor_parallel.VocabParallelEmbedding(12, WIDTH, **plain)
        self.norm = nn.LayerNorm(WIDTH, dtype=config.params_dtype)
        self.out = tensor_parallel.ColumnParallelLinear(
            WIDTH, 2 * WIDTH, bias=True, gather_output=False, **plain
        )
        self.back = tensor_parallel.RowParallelLinear(
            2 * WIDTH, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **plain
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.out(self.norm(self.table(tokens)))
        back: Tensor = self.back(torch.tanh(out))[0]
        return back


def look(marked: bool, distributed: bool, dtype: torch.dtype) -> dict[str, Any]:
    half = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, tensor_model_parallel_size=RANKS,
        bf16=half, params_dtype=dtype, use_cpu_initialization=True, perform_initialization=marked,
    )  # fmt: skip
    plain = Model(config)
    for parameter in plain.parameters():
        # what Megatron's own get_model does
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    # the same numbers in every layout, each rank's part of them where a weight is divided
    torch.manual_seed(1)
    rank = dist.get_rank()
    for name, parameter in plain.named_parameters():
        dim = _DIVIDED.get(name)
        shape = list(parameter.shape)
        shape[dim or 0] *= 1 if dim is None else RANKS
        every = torch.randn(shape) / 4
        own = every if dim is None else every.chunk(RANKS, dim)[rank]
        parameter.data.copy_(own)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, buffers, plain)
    options = OptimizerConfig(
        lr=1e-3, bf16=half, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(options, [model])
    model.zero_grad_buffer()
    model(torch.arange(12).reshape(2, 6)).square().sum().backward()
    model.finish_grad_sync()
    optimizer.prepare_grads()
    records = updates.UpdateRecords(_named, with_sketch=False, wanted=lambda _: True)
    records.gradients([model], "grad_reduced", optimizer)
    records.resolve()
    return {
        "marked": marked,
        "own": float(optimizer.get_grad_norm()),
        "ours": updates.group_norms(optimizer, [model]).tolist(),
        "norms": {name: leaf["Norm"] for name, leaf in records.data.items()},
        "divided": sorted(name for name, leaf in records.data.items() if "GlobalShape" in leaf),
    }


#: The dimension that each weight is cut along.
_DIVIDED = {"table.weight": 0, "out.weight": 0, "out.bias": 0, "back.weight": 1}


def _named(name: str) -> str:
    return name.removesuffix(".grad_reduced")


def main(rank: str, directory: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/met", rank=int(rank), world_size=RANKS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = [
        look(marked, distributed, dtype)
        for marked in (True, False)
        for distributed in (True, False)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
