"""Dump files as msprobe writes them, small and with every oddity its format allows."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

Leaf = dict[str, Any]


def tensor(
    values: tuple[Any, Any, Any, Any] = (1.0, -1.0, 0.25, 2.0),
    shape: tuple[int, ...] = (2, 8),
    dtype: str = "torch.float32",
    **more: Any,
) -> Leaf:
    """A tensor's leaf: ``values`` are max, min, mean and norm."""
    names = ("Max", "Min", "Mean", "Norm")
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": list(shape),
        **dict(zip(names, values, strict=True)),
        "requires_grad": False,
        **more,
    }


def scalar(value: Any, kind: str | None = None) -> Leaf:
    return {"type": kind or type(value).__name__, "value": value}


def call(inputs: list[Any], outputs: list[Any], **more: Any) -> dict[str, Any]:
    """A forward entry."""
    return {"input_args": inputs, "input_kwargs": {}, "output": outputs, **more}


def write(
    directory: Path,
    data: dict[str, Any],
    *,
    task: str = "statistics",
    level: str = "mix",
    name: str = "dump.json",
    stack: bool = False,
) -> Path:
    """Write a rank directory; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = directory / "dump_tensor_data"
    header = {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": str(tensors)}
    path = directory / name
    path.write_text(json.dumps({**header, "data": data}, indent=1))
    if stack:
        stacks = {"0": [list(data), ["File model.py, line 1, in forward, \n x = f(x)"]]}
        (directory / "stack.json").write_text(json.dumps(stacks))
        (directory / "construct.json").write_text("{}")
    return path


def random_pair(seed: int, calls: int, checksums: bool = False) -> tuple[Any, Any]:
    """Two dumps of the same calls: equal, noisy, odd and contradicting leaves, all mixed."""
    rng = random.Random(seed)
    benchmark: dict[str, Any] = {}
    counts: dict[str, int] = {}

    def name(stem: str) -> str:
        number = counts.get(stem, -1) + 1
        counts[stem] = number
        return str(number)

    for layer in range(calls):
        kind = rng.choice(["linear", "softmax", "to", "all_to_all_single", "module", "module"])
        inputs = [_leaf(rng) for _ in range(rng.randint(0, 3))] + [_other(rng)]
        if kind == "module":
            stem = f"Module.model.layers.{layer % 7}.mlp.Linear"
            number = name(stem)
            benchmark[f"{stem}.forward.{number}"] = {
                **call(inputs, [_leaf(rng)]),
                "input_kwargs": {"mask": _leaf(rng), "scale": scalar(rng.random())},
                "parameters": {"weight": _leaf(rng), "bias": _leaf(rng)},
            }
            benchmark[f"{stem}.backward.{number}"] = {"input": [_leaf(rng)], "output": [None]}
            benchmark[f"{stem}.parameters_grad.{number}"] = {"weight": [_leaf(rng)]}
        else:
            stem = f"Functional.{kind}"
            nested = [[_leaf(rng), {"key": _leaf(rng)}], _leaf(rng)]
            benchmark[f"{stem}.{name(stem)}.forward"] = call([*inputs, nested], [_leaf(rng)])
    target = copy.deepcopy(benchmark)
    for entry in target.values():
        _change(entry, rng)
    if checksums:
        for side in (benchmark, target):
            _checksum(side)
    for side in (benchmark, target):  # what one side alone has
        only = rng.choice(["Functional.gelu.0.forward", "Functional.silu.0.forward"])
        side[only if side is target else "Functional.relu.0.forward"] = call([], [_leaf(rng)])
    return benchmark, target


_EXTREMES = (0.0, -0.0, math.nan, math.inf, -math.inf, 3.4e38, 1e-45, None, 127, 2**40)


def _leaf(rng: random.Random) -> Leaf | None:
    roll = rng.random()
    if roll < 0.05:
        return None
    dtype = rng.choice(["torch.float32"] * 4 + ["torch.bfloat16", "torch.float16"])
    shape = tuple(rng.choice([1, 2, 3, 64]) for _ in range(rng.randint(0, 3)))
    grad = rng.random() < 0.3
    if roll < 0.15:
        values: tuple[Any, ...] = (rng.randint(0, 99), rng.randint(-9, 0), None, None)
        return tensor(values, shape, "torch.int64", requires_grad=False)
    if roll < 0.2:
        values = (rng.random() < 0.5, False, None, None)
        return tensor(values, shape, "torch.bool", requires_grad=False)
    scale = 10 ** rng.uniform(-6, 4)
    values = tuple(
        rng.choice(_EXTREMES) if rng.random() < 0.04 else rng.gauss(0, 1) * scale for _ in range(4)
    )
    return tensor(values, shape, dtype, requires_grad=grad)


def _other(rng: random.Random) -> Any:
    return rng.choice(
        [
            scalar(3),
            scalar(0.5),
            scalar(True),
            scalar("mean"),
            scalar("torch.float32", "torch.dtype"),
            scalar("cuda:0", "torch.device"),
            scalar([2, 3], "torch.Size"),
            scalar([None, 2, None], "slice"),
            scalar("Ellipsis", "ellipsis"),
            scalar(math.inf),
            None,
        ]
    )


def _change(node: Any, rng: random.Random) -> None:
    """Noise, large changes and contradictions, in place."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if not (isinstance(node, dict) and isinstance(node.get("type"), str)):
        for child in children:
            _change(child, rng)
        return
    roll = rng.random()
    for key in ("Max", "Min", "Mean", "Norm"):
        if isinstance(node.get(key), float):
            if roll < 0.3:
                node[key] *= 1 + rng.gauss(0, 1e-4)
            elif roll < 0.4:
                node[key] *= rng.choice([3.0, -1.0, 0.0])
            elif roll < 0.45:
                node[key] = rng.choice(_EXTREMES[:6])
    if 0.45 < roll < 0.5 and "shape" in node:
        node["shape"] = [*node["shape"], 2]
    elif 0.5 < roll < 0.55 and "dtype" in node:
        node["dtype"] = "torch.float64" if "float" in node["dtype"] else node["dtype"]
    elif 0.55 < roll < 0.6 and "requires_grad" in node:
        node["requires_grad"] = not node["requires_grad"]
    elif roll > 0.8 and node["type"] in ("int", "float"):
        node["value"] += 1


def _checksum(node: Any) -> None:
    """msprobe's md5 field, a CRC-32 of whatever the leaf says."""
    if isinstance(node, dict) and node.get("type") == "torch.Tensor":
        node["md5"] = f"{zlib.crc32(repr(sorted(node.items())).encode()):08x}"
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        _checksum(child)


def float32_bytes(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
