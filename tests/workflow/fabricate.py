"""Runs as a training would have left them, without one: committed to a real store.

Every role gets the stages, weights, samples and rollouts that its specification asks for. The same
numbers everywhere, but for round-off in the target and, on request, a fault from one record on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from rlprobe.rollouts import Rollouts, hdf5
from rlprobe.rollouts.model import Sample
from rlprobe.runs.jobs import Jobs
from rlprobe.spec import RunSpec
from rlprobe.stages import GENERATE, MODEL_ROLE, UPDATE_STAGES
from rlprobe.store.commit import commit

LAYERS = ("model.embed_tokens", "model.layers.0.mlp", "model.layers.1.mlp", "lm_head")
WIDTH = 32
#: Instead of a module: the target begins with other weights, which must shut the gate.
OTHER_WEIGHTS = "other weights"
#: Relative size of what another kernel changes.
ROUND_OFF = 1e-7


def store(
    jobs: Jobs,
    roles: list[str] | None = None,
    fault: str | None = None,
    *,
    key_data: bool = False,
) -> None:
    """Commit the runs of ``roles`` (all by default).

    Args:
        fault: names the target's wrong module.
        key_data: they recorded what the log-prob stage hands on, too.
    """
    for role in roles or list(jobs.runs):
        spec = jobs.runs[role]
        scratch = Path("scratch", role)
        _run(spec, scratch, fault if role.startswith(("target", "repeat_target")) else None)
        if key_data:
            for step in range(spec.steps.start, spec.steps.end + 1):
                _key_data(scratch / "dump/data", step, role)
        commit(scratch, Path(jobs.alignment.store), spec.key, spec.declared())


def _run(spec: RunSpec, scratch: Path, fault: str | None) -> None:
    noise = ROUND_OFF if spec.role in ("target", "repeat_target") else 0.0
    steps = range(spec.steps.start, spec.steps.end + 1)
    for stage in spec.stages:
        for step in steps:
            _stage(scratch, stage, step, noise, fault)
    side = scratch / "side"
    _lines(side / "metrics.jsonl", [_metrics(step) for step in steps])
    _write(side / "parts" / "first_step.json", {"first_step": 1})
    _write(side / "run.json", {"role": spec.role, "started": 1.0, "ended": 2.0, "command": []})
    for role in sorted({MODEL_ROLE[stage] for stage in spec.stages}):
        _parts(side, spec, role, fault)
    if spec.replay_of is None:
        for step in steps:
            hdf5.write(side / "rollouts" / f"step{step}.h5", _rollouts(step))


def _stage(scratch: Path, stage: str, step: int, noise: float, fault: str | None) -> None:
    directory = scratch / "dump" / stage / f"step{step}" / "rank0"
    generator = np.random.default_rng([len(stage), step])
    data: dict[str, Any] = {}
    off = 0.0
    values = generator.standard_normal((4, WIDTH))
    for layer in LAYERS:
        given = values * (1 + noise + off)
        values = np.tanh(values) + generator.standard_normal((4, WIDTH))
        if layer == fault:
            off = 0.05
        made = values * (1 + noise + off)
        data[f"Module.{layer}.Linear.forward.0"] = {
            "input_args": [_leaf(given)],
            "input_kwargs": {},
            "output": [_leaf(made)],
        }
    header = {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None}
    _write(directory / "dump.json", {**header, "data": data})
    _write(directory / "stack.json", {})
    _write(directory / "construct.json", {})


def _leaf(values: np.ndarray) -> dict[str, Any]:
    single = values.astype(np.float32)
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": list(single.shape),
        "Max": float(single.max()),
        "Min": float(single.min()),
        "Mean": float(single.mean()),
        "Norm": float(np.linalg.norm(single)),
        "requires_grad": False,
        "Digest": "sha256:" + hashlib.sha256(single.tobytes()).hexdigest(),
    }


def _key_data(root: Path, step: int, role: str) -> None:
    """Log-probabilities of the step's samples, a row each."""
    values = -np.random.default_rng(step).random((4, 2), dtype=np.float32)
    if role == "target":
        values *= np.float32(1 + ROUND_OFF)
    place = root / "old_log_probs" / f"step{step}/rank0/micro_step0"
    place.mkdir(parents=True)
    np.save(place / "old_log_probs.npy", values)
    of = {
        "max": float(values.max()),
        "min": float(values.min()),
        "mean": float(values.mean()),
        "norm": float(np.linalg.norm(values)),
        "shape": list(values.shape),
        "dtype": "torch.float32",
        "samples": [sample.sample_digest for sample in _rollouts(step).samples],
    }
    _write(place / "old_log_probs.json", {"data": of})


def _parts(side: Path, spec: RunSpec, role: str, fault: str | None) -> None:
    parts = side / "parts"
    seed = fault if fault == OTHER_WEIGHTS else role
    stages = [stage for stage in spec.stages if MODEL_ROLE[stage] == role]
    steps = range(spec.steps.start, spec.steps.end + 1)
    _lines(
        parts / "captured" / f"{role}-rank0.jsonl",
        [
            {
                "step": step,
                "trainer_step": step + 1,
                "stage": stage,
                "rank": 0,
                "role": role,
                "engine": "light",
                "records": len(LAYERS),
                "calls": 1,
                "seconds": 0.1,
                "adapter": None,
            }
            for step in steps
            for stage in stages
        ],
    )
    _lines(
        parts / "weights" / f"{role}-rank0.jsonl",
        [
            {
                "step": spec.steps.start,
                "stage": stages[0],
                "role": role,
                "rank": 0,
                "name": f"{layer}.weight",
                "dtype": "torch.float32",
                "shape": [WIDTH, WIDTH],
                "local_shape": [WIDTH, WIDTH],
                "digest": "sha256:" + hashlib.sha256(f"{seed} {layer}".encode()).hexdigest(),
                "norm": 1.0,
                "sketch": None,
                "complete": True,
            }
            for layer in LAYERS
        ],
    )
    _lines(
        parts / "samples" / f"{role}-rank0.jsonl",
        [
            {
                "step": step,
                "stage": stage,
                "rank": 0,
                "samples": [sample.sample_digest for sample in _rollouts(step).samples],
            }
            for step in steps
            for stage in stages
            if stage in UPDATE_STAGES and stage != GENERATE
        ],
    )
    layout = {"role": role, "rank": 0, "world_size": 1, "tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1}
    _write(parts / "layout" / f"{role}-rank0.json", {**layout, "backend": "fsdp2"})
    _write(parts / "environment" / f"{role}-rank0.json", {"python": "3.11", "torch": "2.13.0"})


def _rollouts(step: int) -> Rollouts:
    samples = [
        Sample.build(
            id=f"{row}", prompt_identity=f"p{row}", prompt_ids=[1, row], response_ids=[2, step]
        )
        for row in range(4)
    ]
    return Rollouts(
        step=step,
        trainer_step=step + 1,
        tensors={"responses": np.full((4, 2), step)},
        sampling={"temperature": 1.0},
        samples=samples,
    )


def _metrics(step: int) -> dict[str, Any]:
    return {"step": step, "trainer_step": step + 1, "metrics": {"actor/loss": 0.5}}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _lines(path: Path, values: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
