"""Dumps to compare, generated: as large as wanted, shaped like a small transformer's training step.

Both sides hold the same calls. Statistics of the target carry a relative noise of 1e-4 on every
fifth leaf; tensors of the target on every element.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: Calls of one layer: stem, inputs, outputs, parameters; `M` stands for a module's record.
_LAYER: tuple[tuple[str, int, int, int], ...] = (
    ("Functional.rms_norm", 3, 1, 0),
    ("M input_layernorm.RMSNorm", 1, 1, 1),
    *((f"{kind}", 3, 1, 0) for kind in ("Functional.linear",) * 3),
    *((f"M self_attn.{p}_proj.Linear", 1, 1, 2) for p in "qkv"),
    ("Tensor.__mul__", 2, 1, 0),
    ("Tensor.__add__", 2, 1, 0),
    ("Torch.matmul", 2, 1, 0),
    ("Functional.softmax", 3, 1, 0),
    ("Functional.dropout", 3, 1, 0),
    ("Functional.linear", 3, 1, 0),
    ("M self_attn.o_proj.Linear", 1, 1, 1),
    ("M self_attn.Attention", 4, 2, 0),
    ("Functional.silu", 1, 1, 0),
    ("M mlp.gate_proj.Linear", 1, 1, 1),
    ("M mlp.MLP", 1, 1, 0),
    ("M DecoderLayer", 4, 1, 0),
)
_LAYERS = 12


def calls(count: int) -> Iterator[tuple[str, int, int, int]]:
    """Names with counters, and numbers of inputs, outputs and parameters, in execution order."""
    done, micro_step = 0, 0
    counters: dict[str, int] = {}
    while True:
        for direction in ("forward", "backward"):
            for layer in range(_LAYERS):
                for stem, inputs, outputs, parameters in _LAYER:
                    if done == count:
                        return
                    done += 1
                    if stem.startswith("M "):
                        path = f"model.layers.{layer}.{stem[2:]}"
                        name = f"Module.{path}.{direction}.{micro_step}"
                    else:
                        number = counters.get(stem + direction, 0)
                        counters[stem + direction] = number + 1
                        name = f"{stem}.{number}.{direction}"
                    yield name, inputs, outputs, parameters if direction == "forward" else 0
        micro_step += 1


class _Leaves:
    """Leaves of both sides, drawn from one generator."""

    def __init__(self, seed: int, sketches: bool) -> None:
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._sketches = sketches

    def pair(self) -> tuple[Any, Any]:
        roll = self._rng.random()
        if roll < 0.05:
            return None, None
        if roll < 0.12:
            scalar = {"type": "float", "value": self._rng.random()}
            return scalar, scalar
        scale = 10 ** self._rng.uniform(-4, 2)
        shape = self._rng.choice([[4, 128, 256], [4, 8, 128, 128], [256], [256, 1024]])
        leaf: dict[str, Any] = {
            "type": "torch.Tensor",
            "dtype": "torch.float32",
            "shape": shape,
            "Max": self._float(3 * scale),
            "Min": self._float(-3 * scale),
            "Mean": self._float(0.01 * scale),
            "Norm": self._float(scale * math.sqrt(math.prod(shape))),
            "requires_grad": self._rng.random() < 0.5,
        }
        other = leaf
        if self._rng.random() < 0.2:
            other = dict(leaf)
            for key in ("Max", "Min", "Mean", "Norm"):
                other[key] = self._float(leaf[key], 1e-4)
        if self._sketches:
            leaf, other = self._with_sketches(leaf, dict(other), other is not leaf)
        return leaf, other

    def _float(self, value: float, noise: float = 0.1) -> float:
        return float(np.float32(value * (1 + noise * self._rng.gauss(0, 1))))

    def _with_sketches(self, leaf: Any, other: Any, noisy: bool) -> tuple[Any, Any]:
        values = self._numbers.standard_normal(61) * leaf["Norm"] / math.sqrt(61)
        noise = 1e-4 * self._numbers.standard_normal(61) * leaf["Norm"] if noisy else 0.0
        sides = []
        for side, sketch in ((leaf, values), (other, values + noise)):
            text = base64.b64encode(sketch.astype("<f4").tobytes()).decode()
            sides.append({**side, "Sketch": f"b64:{text}"})
        return sides[0], sides[1]


def statistics(directory: Path, entries: int, *, sketches: bool = False, seed: int = 7) -> None:
    """Write ``directory/{benchmark,target}/dump.json`` (with stack.json and construct.json)."""
    leaves = _Leaves(seed, sketches)
    paths = [directory / side for side in ("benchmark", "target")]
    for path in paths:
        path.mkdir(parents=True)
    files = [(path / "dump.json").open("w") for path in paths]
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    names = []
    for file in files:
        file.write(json.dumps(header, indent=1)[:-2] + ',\n "data": {\n')
    for number, (name, inputs, outputs, parameters) in enumerate(calls(entries)):
        names.append(name)
        drawn = {
            "input": [leaves.pair() for _ in range(inputs)],
            "output": [leaves.pair() for _ in range(outputs)],
            "parameters": [leaves.pair() for _ in range(parameters)],
        }
        for side, file in enumerate(files):
            entry = _entry(name, {slot: [pair[side] for pair in p] for slot, p in drawn.items()})
            text = json.dumps(entry, indent=1).replace("\n", "\n  ")
            file.write(f"{',' if number else ' '}\n  {json.dumps(name)}: {text}")
    for file in files:
        file.write("\n }\n}\n")
        file.close()
    stack = {"0": [names, ["File train.py, line 1, in step, \n loss = model(batch)"]]}
    for path in paths:
        (path / "stack.json").write_text(json.dumps(stack))
        (path / "construct.json").write_text("{}")


def _entry(name: str, slots: dict[str, list[Any]]) -> dict[str, Any]:
    if ".backward" in name:
        return {"input": slots["input"], "output": slots["output"]}
    entry = {"input_args": slots["input"], "input_kwargs": {}, "output": slots["output"]}
    if slots["parameters"]:
        names = ("weight", "bias")
        entry["parameters"] = dict(zip(names, slots["parameters"], strict=False))
    return entry


def tensors(directory: Path, count: int, *, equal: float = 0.0, seed: int = 0) -> int:
    """Write two dumps of ``count`` float32 tensors of 1 to 8 MiB; returns bytes of both sides.

    Args:
        equal: share of tensors that are the same on both sides.
    """
    import torch

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    data: dict[str, dict[str, Any]] = {"benchmark": {}, "target": {}}
    for side in data:
        (directory / side / "dump_tensor_data").mkdir(parents=True)
    total = number = 0
    while number < count:
        call = f"Functional.linear.{number // 3}.forward"
        entries: dict[str, Any] = {
            s: {"input_args": [], "input_kwargs": {}, "output": []} for s in data
        }
        for slot, key in (
            ("input.0", "input_args"),
            ("input.1", "input_args"),
            ("output.0", "output"),
        ):
            if number == count:
                break
            number += 1
            rows = rng.randint(1, 8) * 256
            benchmark = torch.randn(rows, 1024, generator=generator)
            target = benchmark
            if rng.random() >= equal:
                noise = torch.randn(rows, 1024, generator=generator)
                target = benchmark * (1 + 1e-4 * noise)
            for side, value in (("benchmark", benchmark), ("target", target)):
                file = f"{call}.{slot}.pt"
                torch.save(value, directory / side / "dump_tensor_data" / file)
                total += value.numel() * 4
                entries[side][key].append(
                    {
                        "type": "torch.Tensor",
                        "dtype": "torch.float32",
                        "shape": list(value.shape),
                        "Max": value.max().item(),
                        "Min": value.min().item(),
                        "Mean": value.mean().item(),
                        "Norm": value.norm().item(),
                        "requires_grad": True,
                        "data_name": file,
                    }
                )
        for side in data:
            data[side][call] = entries[side]
    for side, entries in data.items():
        place = directory / side
        header = {"task": "tensor", "level": "L1", "framework": "pytorch"}
        whole = {**header, "dump_data_dir": str(place / "dump_tensor_data"), "data": entries}
        (place / "dump.json").write_text(json.dumps(whole, indent=1))
        (place / "stack.json").write_text("{}")
        (place / "construct.json").write_text("{}")
    return total
