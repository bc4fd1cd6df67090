"""One side's suspect, run on what the other side's was given: is it this code at all?

The benchmark's refining run keeps what a traced call was given (inputs, and the gradients of its
outputs) and made (outputs, and gradients). The target's suspect is then run on the same, with its
own weights, beside a call of its own, and what it makes is held against what was made there. Where
the modules were told other numbers (:mod:`.told`) it is run with the other side's too, each by
itself and all of them: one that makes the other side's outputs is the cause. Whole numbers are not
tried.

``{stage}/step{N}/rank{R}/exchange/``: ``exchange.jsonl`` with a line a tensor {kind (input,
output, given, made), name, dtype, shape, file} and the bytes of each, and ``told.json``, the
module's numbers by name; on the other side ``exchanged.jsonl``, a line {outputs, gradients
(relative differences by name), failed, told (a list of {names, there, here, tried, outputs,
failed})}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rlprobe.capture.files import append_line
from rlprobe.capture.light.recompute import in_backward
from rlprobe.capture.names import named_modules
from rlprobe.capture.trace.again import Alone, Before, generators, put_back, unseen, without_hooks
from rlprobe.capture.trace.backward import Backward, Made
from rlprobe.capture.trace.operators import scalar, tensors
from rlprobe.capture.trace.told import Told, instead, is_harmless, others, told, unchanged
from rlprobe.capture.trace.values import unpacked

DIRECTORY = "exchange"
INDEX = "exchange.jsonl"
REPORT = "exchanged.jsonl"
TOLD = "told.json"
#: Numbers that are tried one by one.
_ALONE = 8
INPUT, OUTPUT, GIVEN, MADE = "input", "output", "given", "made"


class Keeper:
    """Writes what a call was given and made.

    Args:
        directory: of the rank's files.
        budget: bytes that may be written; None: no limit. Beyond it nothing is kept.
    """

    def __init__(self, directory: Path, budget: int | None) -> None:
        self._place = directory / DIRECTORY
        self._left = budget

    def told(self, module: nn.Module, before: dict[str, Told]) -> None:
        """Keep the numbers that the module was told, but for those that its own call changes.

        Args:
            module: after the call.
            before: what it was told when the call began.
        """
        self._place.mkdir(parents=True, exist_ok=True)
        stay = unchanged(before, module)
        numbers = {name: scalar(one.value) for name, one in stay.items()}
        (self._place / TOLD).write_text(json.dumps(numbers), encoding="utf-8")

    def forward(self, before: Before, outputs: Sequence[Tensor]) -> None:
        """Keep a call's inputs and outputs."""
        self._keep(INPUT, {str(i): t for i, t in enumerate(tensors((before.args, before.kwargs)))})
        self._keep(OUTPUT, {str(i): t for i, t in enumerate(outputs)})

    def backward(self, given: Sequence[Tensor | None], made: Made) -> None:
        """Keep the gradients that came, and those that it makes of them."""
        self._keep(GIVEN, {str(i): t for i, t in enumerate(given) if t is not None})
        self._keep(MADE, made)

    def _keep(self, kind: str, values: dict[str, Tensor]) -> None:
        for number, (name, tensor) in enumerate(values.items()):
            local = unpacked(tensor).detach()
            size = local.numel() * local.element_size()
            if self._left is not None and size > self._left:
                return
            self._left = None if self._left is None else self._left - size
            self._place.mkdir(parents=True, exist_ok=True)
            file = f"{kind}{number}.npy"
            flat = local.cpu().contiguous().reshape(-1).view(torch.uint8)
            np.save(self._place / file, flat.numpy(), allow_pickle=False)
            append_line(self._place / INDEX, {
                "kind": kind, "name": name, "dtype": str(local.dtype), "shape": [*local.shape],
                "file": file,
            })  # fmt: skip


@contextmanager
def exchanging(
    models: list[nn.Module], module: str, source: Path, directory: Path
) -> Iterator[None]:
    """Run a module once on what the other side's was given, beside a call of its own in the body.

    Args:
        models: the module whose stage it is, or its chunks.
        module: Hugging Face path.
        source: what :class:`Keeper` wrote on the other side, of this stage, step and rank.
        directory: of the rank's files here.
    """
    place = directory / DIRECTORY
    kept = _read(source)
    if not kept or (place / REPORT).exists():
        yield
        return
    found = [each for _, name, each in named_modules(models) if name == module]
    tried = _Try(kept, _numbers(source), place)
    handles = [each.register_forward_pre_hook(tried.begins, with_kwargs=True) for each in found]
    handles += [each.register_forward_hook(tried.ends, prepend=True) for each in found]
    try:
        yield
    finally:
        tried.report()
        for handle in [*handles, *tried.handles]:
            handle.remove()


#: By kind: what the other side kept, by name.
_Kept = dict[str, dict[str, Tensor]]


class _Try:
    """The first call whose inputs have the other side's shapes."""

    def __init__(self, kept: _Kept, numbers: dict[str, Any], place: Path) -> None:
        self._kept = kept
        self._numbers = numbers
        self._place = place
        self._before: Before | None = None
        self._told: dict[str, Told] = {}
        self._done = False
        self._line: dict[str, Any] | None = None
        self.handles: list[Any] = []

    def begins(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._done or in_backward():
            return
        try:
            with unseen():
                self._before = self._with_theirs(args, kwargs)
            self._told = told(module)
        except Exception as error:  # noqa: BLE001 - of any kind of tensor: it is recorded
            self._done = True
            self._line = {"failed": f"{type(error).__name__}: {error}"[:500]}

    def _with_theirs(self, args: Any, kwargs: dict[str, Any]) -> Before | None:
        """The call with the other side's inputs; None where they have other shapes."""
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        theirs = list(self._kept.get(INPUT, {}).values())
        if [_form(leaves[i]) for i in places] != [_form(t) for t in theirs]:
            return None
        device = next((leaves[i].device for i in places), torch.device("cpu"))
        for i, other in zip(places, theirs, strict=True):
            own = leaves[i]
            leaves[i] = other.to(own.device).requires_grad_(own.requires_grad)
        inputs, named = tree_unflatten(leaves, form)
        return Before(inputs, named, device)

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        before, self._before = self._before, None
        if before is None or in_backward():
            return
        self._done = True
        line: dict[str, Any] = {"outputs": {}, "gradients": {}, "failed": None}
        self._line = line
        after = generators(before.device)
        try:
            with unseen(), without_hooks(module), torch.no_grad(), Alone():
                line["told"] = list(self._told_theirs(module, before))
                line["outputs"] = self._made(module, before)
            self._await(module, before, list(tensors(output)))
        except Exception as error:  # noqa: BLE001 - a kernel may refuse in any way: it is recorded
            line["failed"] = f"{type(error).__name__}: {error}"[:500]
        finally:
            put_back(after, before.device)

    def _made(self, module: nn.Module, before: Before) -> dict[str, Any]:
        """By how much what it makes of the other side's inputs differs from what was made there."""
        put_back(before.state, before.device)
        # copies: an operator in place may change what it is given
        args, kwargs = tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v, (before.args, before.kwargs)
        )
        mine = {str(i): unpacked(t) for i, t in enumerate(tensors(module.forward(*args, **kwargs)))}
        return _differences(self._kept.get(OUTPUT, {}), mine)

    def _told_theirs(self, module: nn.Module, before: Before) -> Iterator[dict[str, Any]]:
        """What it makes where it is told what the other side's was told, one by one and in all."""
        apart = others(unchanged(self._told, module), self._numbers)
        harmless = {name: one for name, one in apart.items() if is_harmless(*one)}
        if len(harmless) <= _ALONE:
            for name, one in harmless.items():
                yield self._with(module, before, {name: one})
        if len(harmless) > 1:
            yield self._with(module, before, harmless)
        whole = {name: one for name, one in apart.items() if name not in harmless}
        if whole:
            yield _line(whole, tried=False)

    def _with(
        self, module: nn.Module, before: Before, changes: dict[str, tuple[Told, Any]]
    ) -> dict[str, Any]:
        line = _line(changes, tried=True)
        try:
            with instead(changes):
                line["outputs"] = self._made(module, before)
        except Exception as error:  # noqa: BLE001 - a number may be none that its code takes
            line["failed"] = f"{type(error).__name__}: {error}"[:500]
        return line

    def _await(self, module: nn.Module, before: Before, outputs: list[Tensor]) -> None:
        needed = [t for t in outputs if t.requires_grad]
        if not needed or not self._kept.get(GIVEN):
            return
        backward = Backward(module, before, outputs)
        theirs = self._kept[GIVEN]

        def arrived(_: Sequence[Tensor | None]) -> None:
            given = [
                None if str(i) not in theirs else theirs[str(i)].to(before.device)
                for i in range(len(needed))
            ]
            mine, failed = backward.once(given)
            assert self._line is not None
            self._line["gradients"] = _differences(self._kept.get(MADE, {}), mine)
            self._line["failed"] = failed

        self.handles.append(torch.autograd.graph.register_multi_grad_hook(needed, arrived))

    def report(self) -> None:
        """Write what was found, if a call was tried."""
        if self._line is not None:
            append_line(self._place / REPORT, self._line)


def _line(changes: dict[str, tuple[Told, Any]], *, tried: bool) -> dict[str, Any]:
    return {
        "names": [*changes],
        "there": [scalar(value) for _, value in changes.values()],
        "here": [scalar(own.value) for own, _ in changes.values()],
        "tried": tried,
        "outputs": {},
        "failed": None,
    }


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return str(tensor.dtype), tuple(tensor.shape)


def _differences(there: dict[str, Tensor], here: dict[str, Tensor]) -> dict[str, Any]:
    """Relative L2 differences of what is on both sides, by name."""
    found: dict[str, Any] = {}
    for name, other in there.items():
        own = here.get(name)
        if own is None or own.shape != other.shape or not own.is_floating_point():
            continue
        exact = other.to(own.device).double()
        size = float(exact.norm())
        apart = float((own.double() - exact).norm())
        value = apart / size if size else apart
        found[name] = value if math.isfinite(value) else str(value)
    return found


def _numbers(source: Path) -> dict[str, Any]:
    path = source / TOLD
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _read(source: Path) -> _Kept:
    path = source / INDEX
    if not path.is_file():
        return {}
    found: _Kept = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        dtype = getattr(torch, str(line["dtype"]).removeprefix("torch."))
        raw = np.load(source / Path(str(line["file"])).name, allow_pickle=False)
        tensor = torch.from_numpy(raw).view(dtype).reshape(line["shape"])
        found.setdefault(str(line["kind"]), {})[str(line["name"])] = tensor
    return found
