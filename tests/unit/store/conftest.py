"""Scratch space as a run leaves it, small, and stores made of it."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.keys import run_key
from rlprobe.store.read import Run
from tests.unit.store.bundle_helpers import SMALL

LARGE = (1 << 20) + 5


def leaf(value: float, name: str | None = None) -> dict[str, Any]:
    statistics = {"Max": value, "Min": -value, "Mean": 0.0, "Norm": value}
    tensor = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2],
        **statistics,
        "requires_grad": False,
    }
    return tensor if name is None else {**tensor, "data_name": name}


def write_rank(directory: Path, where: str, seed: int, tensors: bool) -> None:
    """One process's dump of one stage and step, as it looks on a machine where it ran."""
    directory.mkdir(parents=True)
    name = "Module.model.layers.0.mlp.up_proj.Linear.forward.0"
    files = [f"{name}.input.0.pt", f"{name}.output.0.pt"] if tensors else [None, None]
    dump = {
        "task": "tensor" if tensors else "statistics",
        "level": "L0",
        "framework": "pytorch",
        "dump_data_dir": f"{where}/dump_tensor_data" if tensors else None,
        "data": {
            name: {
                "input_args": [leaf(1.0 + seed, files[0])],
                "input_kwargs": {},
                "output": [leaf(float("nan"), files[1])],
            }
        },
    }
    (directory / "dump.json").write_text(json.dumps(dump, indent=1))
    frames = [
        f"File {where}/env/lib/python3.11/site-packages/torch/nn/modules/module.py, line 3, in f, "
        "\n return x",
        f"File {where}/recipe/train.py, line 9, in main, \n model(batch)",
    ]
    (directory / "stack.json").write_text(json.dumps({"0": [[name], frames]}, indent=1))
    (directory / "construct.json").write_text(json.dumps({name: None}))
    if tensors:
        generator = random.Random(seed)
        (directory / "dump_tensor_data").mkdir()
        for file, size in zip(files, (100, LARGE), strict=True):
            content = b"PK\x03\x04" + generator.randbytes(size)
            (directory / "dump_tensor_data" / str(file)).write_bytes(content)


def append(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_scratch(
    scratch: Path,
    *,
    where: str = "/home/someone",
    stages: tuple[str, ...] = ("actor_compute_log_prob", "actor_update"),
    ranks: int = 1,
    steps: int = 1,
    seed: int = 0,
    tensors: bool = True,
    rank_name: str = "rank{rank}",
    rollouts: bool = True,
) -> Path:
    """What a run leaves; equal arguments but ``where`` mean equal numbers."""
    dump, side = scratch / "dump", scratch / "side"
    dump.mkdir(parents=True)
    for stage in stages:
        for step in range(steps):
            for rank in range(ranks):
                directory = dump / stage / f"step{step}" / rank_name.format(rank=rank)
                write_rank(directory, where, seed + step + 7 * rank, tensors)
    data = dump / "data" / "responses" / "step0" / "rank0" / "micro_step0"
    data.mkdir(parents=True)
    (data / "responses.npy").write_bytes(b"\x93NUMPY" + bytes(50))
    (data / "responses.json").write_text('{"data": {"max": 1}}')
    (dump / "configurations.json").write_text('{"trainer": {}}')
    for rank in range(ranks):
        process = f"actor-rank{rank}"
        append(
            side / "parts" / "weights" / f"{process}.jsonl",
            *(
                {
                    "step": 0,
                    "stage": "actor_update",
                    "role": "actor",
                    "rank": rank,
                    "name": name,
                    "dtype": "torch.float32",
                    "shape": [2, 2],
                    "local_shape": [2, 2],
                    "digest": f"sha256:{seed:064x}",
                    "norm": 1.5,
                    "sketch": [0.25] * 61,
                    "complete": True,
                }
                for name in ("model.norm.weight", "lm_head.weight")
            ),
        )
        append(
            side / "parts" / "samples" / f"{process}.jsonl",
            {
                "step": 0,
                "stage": "actor_update",
                "rank": rank,
                "samples": [f"sha256:{rank:064x}"],
            },
        )
        append(
            side / "parts" / "captured" / f"{process}.jsonl",
            {"step": 0, "trainer_step": 1, "stage": "actor_update", "rank": rank, "records": 2},
        )
        for kind, value in (
            ("layout", {"role": "actor", "rank": rank, "world_size": ranks, "dp": ranks}),
            ("environment", {"torch": "2.13.0", "threads": {"intra_op": 2}}),
        ):
            append(side / "parts" / kind / f"{process}.json", value)
    (side / "parts" / "first_step.json").write_text('{"first_step": 1}')
    append(side / "metrics.jsonl", {"step": 0, "trainer_step": 1, "metrics": {"loss": 0.5}})
    if rollouts:
        (side / "rollouts").mkdir()
        (side / "rollouts" / "step0.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes([seed]) * 99)
    return scratch


def declare(role: str = "benchmark", **more: Any) -> dict[str, Any]:
    return {"role": role, "seed": 1, "framework": "verl", "device": "cpu", **more}


@pytest.fixture
def scratch(tmp_path: Path) -> Callable[..., Path]:
    """Makes scratch spaces, each in a directory of its own."""
    count = iter(range(10**6))
    return lambda **kwargs: write_scratch(tmp_path / f"scratch-{next(count)}", **kwargs)


@pytest.fixture
def make_scratch() -> Callable[..., Path]:
    """Makes a scratch space at a given place."""
    return write_scratch


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of commits need not wait for a disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def committed(scratch: Callable[..., Path], store: Path) -> Callable[..., Run]:
    """Commits a run: arguments of :func:`write_scratch`, and what is declared beside."""

    def make(
        role: str = "benchmark",
        *,
        at: Path = store,
        declared: dict[str, Any] | None = None,
        scratch_at: Path | None = None,
        **kwargs: Any,
    ) -> Run:
        declared = declare(role, **(declared or {}))
        key = run_key(declared)
        commit(scratch_at or scratch(**kwargs), at, key, declared)
        return Run.open(at, key)

    return make


@pytest.fixture
def exported(committed, store, tmp_path):
    run = committed(**SMALL)
    return export(store, [run.key], tmp_path / "run.rlprobe")
