"""A module's outputs, kept on one side and put in place of its own on the other.

With the benchmark's outputs in the suspect's place, everything after it computes what it would have
computed: what still differs is a second difference. Gradients pass through as if the outputs were
the module's own. Activations that are recomputed in the backward pass call the module once more,
for which nothing was kept: there nothing is put in place, and that is said.

Put in place of many modules' at once, each begins from the other side's numbers, and what it makes
before it is replaced is its own difference alone.

``{stage}/step{N}/rank{R}/outputs/`` (of several modules ``blocks/{module}/outputs/``):
``outputs.jsonl`` with a line a tensor {call, index, dtype, shape, file}, the bytes of each in a
file (null: over the budget). On the other side ``substituted.jsonl``, a line an entry of the stage
{calls, failed, apart}: the largest relative difference of what was replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rlprobe.capture.files import append_line
from rlprobe.capture.light.recompute import in_backward
from rlprobe.capture.names import named_modules
from rlprobe.capture.trace import again
from rlprobe.capture.trace.values import unpacked

DIRECTORY = "outputs"
INDEX = "outputs.jsonl"
REPORT = "substituted.jsonl"
#: Of several modules: a directory each below it.
BLOCKS = "blocks"


@contextmanager
def keeping(
    models: list[nn.Module],
    module: str,
    directory: Path,
    budget: int | None,
    only: Collection[int] = (),
) -> Iterator[None]:
    """Write every output of a module's calls in the body.

    Args:
        models: the module whose stage it is, or its chunks.
        module: Hugging Face path.
        directory: of the rank's files.
        budget: bytes that may be written in an entry of the stage; what does not fit is left out.
        only: the calls, from 0, that are kept; empty: all.
    """
    place = directory / DIRECTORY
    spent = 0
    calls = _Counter(place / INDEX)

    def kept(output: Any) -> Any:
        nonlocal spent
        if in_backward():
            return output
        number = next(calls)
        for index, tensor in enumerate(_tensors(output) if number in (only or (number,)) else ()):
            local = unpacked(tensor).detach()
            spent += local.numel() * local.element_size()
            _write(place, number, index, local, within=budget is None or spent <= budget)
        return output

    with _changed(models, module, kept):
        yield


@contextmanager
def substituting(
    models: list[nn.Module],
    module: str,
    source: Path,
    directory: Path,
    only: Collection[int] = (),
) -> Iterator[None]:
    """Give out kept outputs in place of a module's own in the body.

    Args:
        models: the module whose stage it is, or its chunks.
        module: Hugging Face path.
        source: what :func:`keeping` wrote on the other side, of this stage, step and rank.
        directory: of the rank's files here.
        only: the calls, from 0, that are given other outputs; empty: all.
    """
    place = directory / DIRECTORY
    calls = _Counter(place / REPORT)
    there = _read(source / INDEX)
    failed: list[str] = []
    done = 0
    apart = 0.0

    def substituted(output: Any) -> Any:
        nonlocal done, apart
        if in_backward():
            failed.append("activations are recomputed in the backward pass")
            return output
        number = next(calls)
        if number not in (only or (number,)):
            return output
        leaves, form = tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index, at in enumerate(places):
            line = there.get((number, index))
            why = _unfit(leaves[at], line)
            if line is None or why:
                failed.append(f"call {number}, output {index}: {why}")
                return output
            other = _load(source, line, leaves[at])
            apart = max(apart, _apart(leaves[at].detach(), other))
            leaves[at] = _InPlace.apply(leaves[at], other)
        done += 1
        return tree_unflatten(leaves, form)

    try:
        with _changed(models, module, substituted):
            yield
    finally:
        found = apart if math.isfinite(apart) else str(apart)
        append_line(place / REPORT, {"calls": done, "failed": failed[:8], "apart": found})


def _apart(own: Tensor, other: Tensor) -> float:
    """Relative L2 difference of a module's own output from the other side's."""
    if not own.is_floating_point():
        return 0.0
    wide, exact = (t.to(torch.float32) for t in (own, other))
    difference, size = float((wide - exact).norm()), float(exact.norm())
    return difference / size if size else difference


class _InPlace(torch.autograd.Function):
    """The other side's numbers forward, and the gradient to the module's own output backward."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, other: Tensor) -> Tensor:
        return other

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


class _Counter:
    """Numbers calls over all entries of a stage, of which each begins where the last one ended."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        read = [json.loads(line) for line in lines]
        self._next = (
            sum(line["calls"] for line in read)
            if path.name == REPORT
            else len({line["call"] for line in read})
        )

    def __next__(self) -> int:
        self._next += 1
        return self._next - 1


@contextmanager
def _changed(models: list[nn.Module], path: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a module hand on something else; hooks that are registered later see that."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        with again.unseen():
            return change(output)

    found = [module for _, name, module in named_modules(models) if name == path]
    handles = [module.register_forward_hook(hook) for module in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _write(place: Path, call: int, index: int, tensor: Tensor, *, within: bool) -> None:
    place.mkdir(parents=True, exist_ok=True)
    name = None
    if within:
        name = f"{call}.{index}.npy"
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        np.save(place / name, flat.numpy(), allow_pickle=False)
    append_line(place / INDEX, {
        "call": call, "index": index, "dtype": str(tensor.dtype), "shape": list(tensor.shape),
        "file": name,
    })  # fmt: skip


def _read(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(int(line["call"]), int(line["index"])): line for line in lines}


def _unfit(own: Tensor, line: dict[str, Any] | None) -> str:
    """Why what was kept cannot stand for an output; empty where it can."""
    if line is None:
        return "the benchmark's was not kept"
    if line["file"] is None:
        return "the benchmark's did not fit into the budget (--budget-mib)"
    if unpacked(own) is not own:
        return "it is a distributed tensor"
    if [str(own.dtype), list(own.shape)] != [line["dtype"], line["shape"]]:
        return (
            f"{own.dtype} {list(own.shape)} here, {line['dtype']} {line['shape']} on the benchmark"
        )
    return ""


def _load(source: Path, line: dict[str, Any], own: Tensor) -> Tensor:
    raw = np.load(source / Path(str(line["file"])).name, allow_pickle=False)
    return torch.from_numpy(raw).view(own.dtype).reshape(own.shape).to(own.device)
