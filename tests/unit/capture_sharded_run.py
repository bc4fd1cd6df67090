"""A model sharded by FSDP2 or FSDP1 over gloo, trained with and without capture.

python tests/unit/capture_sharded_run.py KIND RANK WORLD DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_helpers import UPDATE, Tiny, hooks_of, make, session, tokens
from torch import Tensor, nn

from rlprobe.capture.recorder import Recorder


def sharded(kind: str) -> nn.Module:
    model = make(lambda: Tiny(width=22))  # 22 rows do not divide evenly by 2 * 61
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.layers[0])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=kind == "fsdp1-original",
    )


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def train(model: nn.Module, recorder: Recorder | None) -> dict[str, Tensor]:
    """Two optimizer steps in one entry of a stage."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}

    def body(scope: Any = None) -> None:
        for index in range(2):
            if scope is not None:
                scope.micro_step(index)
            output = model(tokens())
            loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten())
            loss.backward()
            if scope is not None:
                scope.gradients("grad_reduced")
            found[f"loss {index}"] = loss.detach().clone()
            optimizer.step()
            optimizer.zero_grad()

    if recorder is None:
        body()
    else:
        with recorder.stage(UPDATE, 0, 1, model, optimizer=optimizer) as scope:
            body(scope)
    found.update({name: local(parameter) for name, parameter in model.named_parameters()})
    return found


def main() -> None:
    kind, rank, world, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    root = Path(directory)
    store = f"file://{root / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    plain = train(sharded(kind), None)
    model = sharded(kind)
    before = hooks_of(model)  # FSDP has some of its own
    recorder = Recorder(session(root, provenance=True), role="actor", rank=rank, world_size=world)
    watched = train(model, recorder)
    different = [name for name in plain if not torch.equal(plain[name], watched[name])]
    left = sorted(set(hooks_of(model)) - set(before))
    seen = {"different": different, "hooks_left": left}
    (root / f"seen{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
