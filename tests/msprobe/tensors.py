"""Dumps of task ``tensor``, written with torch: real ``.pt`` files beside dump.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.msprobe import dumps


def leaf(value: torch.Tensor, name: str) -> dict[str, Any]:
    """The leaf msprobe would write for a tensor whose file is ``name``.pt."""
    numbers: tuple[Any, ...] = (None, None, None, None)
    if value.numel() and value.dtype != torch.complex64:
        wide = value.double()
        top, low = wide.max().item(), wide.min().item()
        if value.dtype == torch.bool:
            numbers = (bool(top), bool(low), None, None)
        elif value.is_floating_point():
            numbers = (top, low, wide.mean().item(), wide.norm().item())
        else:
            numbers = (int(value.max()), int(value.min()), None, None)
    shape = tuple(value.shape)
    return dumps.tensor(numbers, shape, str(value.dtype), data_name=f"{name}.pt")


def write(directory: Path, calls: dict[str, tuple[Any, ...]]) -> Path:
    """A rank directory of calls ``name -> (inputs, outputs[, parameters])``.

    Inputs and outputs are tensors or plain leaves, parameters tensors by name.
    """
    files = directory / "dump_tensor_data"
    files.mkdir(parents=True, exist_ok=True)

    def kept(value: Any, file: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel():
            torch.save(value, files / f"{file}.pt")
        return leaf(value, file)

    data: dict[str, Any] = {}
    for name, (inputs, outputs, *parameters) in calls.items():
        leaves = [
            [kept(value, f"{name}.{slot}.{n}") for n, value in enumerate(values)]
            for slot, values in (("input", inputs), ("output", outputs))
        ]
        more = {
            k: kept(v, f"{name}.parameters.{k}") for held in parameters for k, v in held.items()
        }
        further: dict[str, Any] = {"parameters": more} if more else {}
        data[name] = dumps.call(*leaves, **further)
    return dumps.write(directory, data, task="tensor")


def write_pair(benchmark: Path, target: Path, seed: int) -> None:
    """The same calls on both sides, with every kind of difference an elementwise table shows."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    def noisy(x: torch.Tensor, scale: float) -> torch.Tensor:
        factor = 1 + scale * torch.randn(x.shape, generator=g)
        return (x.double() * factor).to(x.dtype)

    x, w = random(4, 33), random(17, 33)
    zeros, masked = torch.zeros(3, 4), torch.full((2, 5), -3.4028234663852886e38)
    infinite = random(2, 6)
    infinite[0, 0], infinite[1, 2] = float("inf"), float("nan")
    integers = torch.randint(-50, 50, (7, 3), generator=g)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "equal": (x, x.clone()),
        "small": (x, noisy(x, 1e-4)),
        "medium": (x, noisy(x, 3e-3)),
        "large": (x, noisy(x, 1.0)),
        "negated": (x, -x),
        "half_wrong": (x, torch.where(x > 0, x, -x)),
        "permuted": (w, w[torch.randperm(17, generator=g)]),
        "bfloat16": (x.bfloat16(), noisy(x.bfloat16(), 1e-2)),
        "float16": (x.half(), noisy(x.half(), 1e-2)),
        "float64": (x.double(), noisy(x.double(), 1e-9)),
        "float8": (x.to(torch.float8_e4m3fn), (x * 1.1).to(torch.float8_e4m3fn)),
        "integers": (integers, integers + (integers % 3 == 0)),
        "booleans": (integers > 0, integers > 1),
        "zeros": (zeros, zeros.clone()),
        "zero_target": (random(3, 4), zeros),
        "zero_benchmark": (zeros, random(3, 4)),
        "some_zeros": (x * (x > 0), noisy(x * (x > 0), 1e-3)),
        "masks": (masked, masked.clone()),
        "same_nonfinite": (infinite, noisy(infinite, 1e-4)),
        "other_nonfinite": (random(2, 6), infinite),
        "scalar": (torch.tensor(2.0), torch.tensor(2.5)),
        "one_element": (random(1, 1), random(1, 1)),
        "transposed": (w.t(), noisy(w.t(), 1e-4)),
        "sliced": (w[:, 3:20], noisy(w[:, 3:20], 1e-4)),
        "expanded": (x[:1].expand(4, 33), noisy(x[:1], 1e-4).expand(4, 33)),
        "squeezed": (x[None], noisy(x, 1e-4)[None]),
        "other_shape": (x, noisy(x, 1e-4)[:3]),
        "empty": (x[:0], x[:0]),
        "dtypes": (x, x.double()),
    }
    calls: list[dict[str, Any]] = [{}, {}]
    for name, pair in cases.items():
        for side in (0, 1):
            calls[side][f"Functional.{name}.0.forward"] = (
                [x, dumps.scalar(1)],
                [pair[side]],
            )
    for side, directory in enumerate((benchmark, target)):
        write(directory, calls[side])
