"""Gradients at a module's ends, watched without adding anything to the autograd graph.

``register_full_backward_hook`` (and msprobe's L0) puts a node of its own before and behind the
module, which changes how gradients are summed: 45 of 51 fp32 gradients of a small model then
differ in the last bits. Here the graph stays as it is:

- the gradient of an output is seen by a hook on that tensor;
- the gradient that the module sends to an input is the sum of what the nodes *inside* the module
  that consume the input return for it. Those nodes are found by walking from the outputs to the
  inputs; hooks on nodes only look. An input's own gradient would not do: it also holds what
  other consumers of the same tensor contributed (the residual, the sibling projections).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Nodes visited before giving up on a module's inputs: enough for a decoder layer many times
#: over; only a graph that leads out of the module (a tensor kept from before) gets there.
MAX_NODES = 20_000

#: ``(node, index of the edge)``: what autograd calls the gradient edge of a tensor.
Edge = tuple[Any, int]


def edge(tensor: Tensor) -> Edge:
    """The edge along which a tensor's gradient flows out of the graph below it."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    found = torch.autograd.graph.get_gradient_edge(tensor)
    return found.node, found.output_nr


def consumers(outputs: list[Tensor], inputs: list[Edge]) -> list[tuple[Any, int, int]] | None:
    """Nodes between ``inputs`` and ``outputs`` that consume an input.

    Args:
        outputs: a module's outputs with gradients.
        inputs: edges of its inputs.

    Returns:
        ``(node, position among its inputs, index of the input)`` per consuming edge; None when
        the walk left the module.
    """
    wanted: dict[Edge, list[int]] = {}
    for index, key in enumerate(inputs):
        wanted.setdefault(key, []).append(index)
    # Nodes made inside the module are numbered after those its inputs came from.
    floor = max((_number(node) for node, _ in inputs), default=-1)
    found: list[tuple[Any, int, int]] = []
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if _number(node) <= floor:
            continue
        for position, (child, number) in enumerate(node.next_functions):
            if child is None:
                continue
            indices = wanted.get((child, number))
            if indices is not None:
                # One tensor passed twice is one edge: both inputs see the same gradient.
                found.extend((node, position, index) for index in indices)
            if child not in seen:
                seen.add(child)
                if len(seen) > MAX_NODES:
                    return None
                todo.append(child)
    return found


_ACCUMULATE = "AccumulateGrad"


def _number(node: Any) -> int:
    """Creation number of a node; leaves (AccumulateGrad) count as older than everything."""
    if type(node).__name__ == _ACCUMULATE:
        return -1
    number = node._sequence_nr()
    return int(number)


class ModuleGradients:
    """Collects one module call's gradients and says when they are complete.

    Args:
        outputs: its outputs with gradients, in order.
        inputs: its inputs with gradients, in order.
        input_edges: their edges, taken **before** the call: an in-place operation in the module
            gives the tensor another one.
        measure: makes a leaf of a gradient.
        done: called with the output gradients' leaves and the input gradients' leaves each time
            they are complete (again if the graph is walked twice).
        track: keeps a hook's handle, to be removed at the end of the stage.
        active: whether gradients are still wanted (a graph may outlive the stage).
    """

    def __init__(
        self,
        outputs: list[Tensor],
        input_edges: list[Edge],
        measure: Callable[[Tensor], dict[str, Any]],
        done: Callable[[list[Any], list[Any]], None],
        track: Callable[[Any], None],
        active: Callable[[], bool],
    ) -> None:
        self._active = active
        self._measure = measure
        self._done = done
        self.output_leaves: list[Any] = [None] * len(outputs)
        self.input_leaves: list[Any] = [None] * len(input_edges)
        found = consumers(outputs, input_edges) if input_edges else []
        self._awaited = [0] * len(input_edges)
        self._sums: dict[int, Tensor] = {}
        for index, output in enumerate(outputs):
            track(output.register_hook(self._output_hook(index)))
        by_node: dict[Any, list[tuple[int, int]]] = {}
        for node, position, index in found or ():
            by_node.setdefault(node, []).append((position, index))
            self._awaited[index] += 1
        for node, uses in by_node.items():
            track(node.register_hook(self._node_hook(uses)))

    def _output_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self._active():
                return
            self.output_leaves[index] = self._measure(gradient)
            self._report()

        return hook

    def _node_hook(self, uses: list[tuple[int, int]]) -> Callable[[Any, Any], None]:
        def hook(gradients: tuple[Tensor | None, ...], _: Any) -> None:
            if not self._active():
                return
            for position, index in uses:
                self._awaited[index] -= 1
                part = gradients[position]
                if part is not None:
                    held = self._sums.get(index)
                    # Autograd adds contributions in the order they arrive; so does this.
                    self._sums[index] = part.detach() if held is None else held + part.detach()
                if self._awaited[index] == 0 and index in self._sums:
                    self.input_leaves[index] = self._measure(self._sums.pop(index))
            self._report()

        return hook

    def _report(self) -> None:
        self._done(self.output_leaves, self.input_leaves)
