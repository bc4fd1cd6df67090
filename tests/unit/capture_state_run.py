"""A state kept by one kind of sharding and loaded by the next, over two gloo ranks.

python tests/unit/capture_state_run.py RANK WORLD DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_helpers import tokens
from capture_sharded_run import sharded
from torch import nn

from rlprobe.capture.state.join import join
from rlprobe.capture.state.keep import keep

KINDS = ("fsdp2", "fsdp1", "fsdp1-original")


def trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        output = model(tokens())
        nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def main() -> None:
    rank, world, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = f"file://{root / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    before: Path | None = None
    for kind in KINDS:
        model = sharded(kind)
        # the first is what is handed on; the others have gone another way until then
        optimizer = trained(model, 3 if before is None else 1)
        common: dict[str, Any] = {"role": "actor", "rank": rank, "models": [model]}
        if before is not None:
            join(before, optimizer=optimizer, **common)
            dist.barrier()
        before = root / kind
        keep(before, world_size=world, step=1, optimizer=optimizer, **common)
        dist.barrier()
        trained(model, 1)  # it still trains
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
