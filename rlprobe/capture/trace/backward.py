"""The suspect's backward pass once more: twice with the gradients that came, and in fp64.

When the gradients of a call's outputs have arrived, its forward is run again on copies of what it
was given (inputs, parameters, buffers), and from there its backward, beside the run's own graph.
No gradient is kept anywhere and the random generators are put back. Where it cannot be done, the
reason is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rlprobe.capture.trace.again import (
    Alone,
    Before,
    Generators,
    Wide,
    difference,
    generators,
    put_back,
    unseen,
    without_hooks,
)
from rlprobe.capture.trace.operators import equal, tensors
from rlprobe.capture.trace.values import content, unpacked

#: Gradients named of those that differ.
_NAMED = 8


class Backward:
    """One call of a suspect, until its gradients come.

    Args:
        module: the suspect.
        before: the call.
        outputs: tensors that it returned.
    """

    def __init__(self, module: nn.Module, before: Before, outputs: Sequence[Tensor]) -> None:
        self._module = module
        self._before = before
        self._needed = [index for index, t in enumerate(outputs) if t.requires_grad]
        # copies: a framework may take the parameters away before the backward pass
        self._parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
        self._buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self._wanted = {n for n, p in module.named_parameters() if p.requires_grad}

    def run(self, gradients: Sequence[Tensor | None]) -> tuple[dict[str, Any], Made, Made]:
        """Run it again.

        Args:
            gradients: of the outputs that have one, in order; None for those that got none.

        Returns:
            what was found, for the trace; the gradients it makes by name (of inputs and
            parameters), and the same in fp64. Either is empty where it could not be done.
        """
        found: dict[str, Any] = {"record": "again_backward"}
        given = [None if g is None else unpacked(g).detach().clone() for g in gradients]
        now = generators(self._before.device)
        made: Made = {}
        wide: Made = {}
        with unseen(), without_hooks(self._module), Alone():
            try:
                made = self._gradients(given, now)
                same = self._gradients(given, now)
                differs = [n for n in made if not equal([made[n]], [same[n]])]
                found["repeats"] = not differs
                if differs:
                    found["differs"] = differs[:_NAMED]
                    found["difference"] = difference([*made.values()], [*same.values()])
                # other random numbers: what draws them in its backward pass would show
                drawn = self._gradients(given, generators(self._before.device))
                found["draws"] = not equal([*same.values()], [*drawn.values()])
            except Exception as error:  # noqa: BLE001 - a kernel may refuse in any way: recorded
                found["failed"] = f"{type(error).__name__}: {error}"[:500]
                made = {}
            try:
                with Wide():
                    wide = self._gradients([_wide(g) for g in given], now, wide=True)
            except Exception as error:  # noqa: BLE001 - likewise
                found["wide_failed"] = f"{type(error).__name__}: {error}"[:500]
            found["made"] = [{"name": name, **content(t)} for name, t in made.items()]
            found["wide"] = [{"name": name, **content(t)} for name, t in wide.items()]
        put_back(now, self._before.device)
        return found, made, wide

    def once(self, given: Sequence[Tensor | None]) -> tuple[Made, str | None]:
        """The gradients that it makes of others, by name, and why it could not."""
        now = generators(self._before.device)
        try:
            with unseen(), without_hooks(self._module), Alone():
                return self._gradients(given, now), None
        except Exception as error:  # noqa: BLE001 - a kernel may refuse in any way: it is recorded
            return {}, f"{type(error).__name__}: {error}"[:500]
        finally:
            put_back(now, self._before.device)

    def _gradients(
        self, given: Sequence[Tensor | None], state: Generators, *, wide: bool = False
    ) -> Made:
        """Forward with the call's random state, then backward with ``state``."""
        leaves: Made = {}

        def leaf(name: str, value: Tensor, wanted: bool) -> Tensor:
            value = value.clone()
            value = value.double() if wide and value.is_floating_point() else value
            if not wanted:
                return value
            leaves[name] = value.requires_grad_()
            return leaves[name]

        counted = iter(range(1 << 30))

        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            name = f"input {next(counted)}"
            made = leaf(name, value.detach(), value.requires_grad)
            # an operator in place may not write to a leaf
            return made.clone() if made.requires_grad else made

        put_back(self._before.state, self._before.device)
        with torch.enable_grad():
            args, kwargs = tree_map(entered, (self._before.args, self._before.kwargs))
            own = {n: leaf(n, p, n in self._wanted) for n, p in self._parameters.items()}
            own |= {n: leaf(n, b, False) for n, b in self._buffers.items()}
            output = torch.func.functional_call(self._module, own, args, kwargs)
            outputs = [unpacked(t) for t in tensors(output)]
        ends = [
            (outputs[index], gradient)
            for index, gradient in zip(self._needed, given, strict=True)
            if gradient is not None
        ]
        put_back(state, self._before.device)
        found = torch.autograd.grad(
            [end for end, _ in ends],
            list(leaves.values()),
            [gradient.to(end.dtype) for end, gradient in ends],
            allow_unused=True,
        )
        return {
            name: unpacked(gradient).detach()
            for name, gradient in zip(leaves, found, strict=True)
            if gradient is not None
        }


#: Gradients by name: ``input 0`` or a parameter's.
Made = dict[str, Tensor]


def _wide(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.double()
