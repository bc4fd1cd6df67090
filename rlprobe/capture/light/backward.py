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
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Nodes visited before giving up on a module's inputs: many times a decoder layer's; only a
#: graph that leads out of the module (a tensor kept from before) gets there.
MAX_NODES = 20_000
#: Number of a leaf's node (AccumulateGrad), which is older than everything that uses it.
LEAF = (1 << 64) - 1
#: Of which end of a module a gradient is.
INPUT, OUTPUT = "input", "output"

#: ``(node, output index)``: what autograd calls the gradient edge of a tensor.
Edge = tuple[Any, int]
#: ``(node, position among its inputs, the node's number)``.
Use = tuple[Any, int, int]


def edge(tensor: Tensor) -> Edge:
    """The edge along which a tensor's gradient flows out of the graph below it."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    found = torch.autograd.graph.get_gradient_edge(tensor)
    return found.node, found.output_nr


def next_number() -> int:
    """The number that autograd will give to the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())


class Graph:
    """What is known of the graph that the module calls under way are building.

    Modules nest, and each wants the consumers of its inputs when it returns. So that a node is
    read once rather than once per level, every region walked remembers where it is left: an
    enclosing module's walk steps over it. References to nodes keep saved tensors alive, so
    everything is dropped as soon as no call is under way.
    """

    def __init__(self) -> None:
        self._uses: dict[Edge, list[Use]] = {}
        self._read: set[Any] = set()
        self._exits: dict[Any, list[Any]] = {}

    def clear(self) -> None:
        self._uses.clear()
        self._read.clear()
        self._exits.clear()

    def consumers(
        self, outputs: list[Tensor], inputs: list[Edge], first: int
    ) -> tuple[list[tuple[Any, int, int]], set[int]]:
        """Nodes made by a module that consume one of its inputs on the way to its outputs.

        Args:
            outputs: the module's outputs with gradients.
            inputs: edges of its inputs.
            first: :func:`next_number` when the module was called.

        Returns:
            ``(node, position among its inputs, index of the input)`` per consuming edge, empty
            when the walk did not come to an end; and the indices of outputs that the module
            itself consumes too (attention weights): their gradient is not that of the outside.
        """
        roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        if not self._walk(roots, first):
            return [], set()
        found: list[tuple[Any, int, int]] = []
        for index, key in enumerate(inputs):
            for node, position, number in self._uses.get(key, ()):
                if number >= first:  # older ones belong to modules called before
                    found.append((node, position, index))
        inner = {
            index
            for index, tensor in enumerate(outputs)
            if any(
                use[2] >= first for use in self._uses.get((tensor.grad_fn, tensor.output_nr), ())
            )
        }
        return found, inner

    def _walk(self, roots: list[Any], first: int) -> bool:
        uses, read, exits = self._uses, self._read, self._exits
        todo = list(roots)
        seen = set(todo)
        older: list[Any] = []
        inside: list[Any] = []
        while todo:
            node = todo.pop()
            number = node._sequence_nr()
            if number < first:
                older.append(node)
                continue
            if number == LEAF:
                continue
            inside.append(node)
            through = exits.get(node)
            if through is not None:
                for child in through:
                    if child not in seen:
                        seen.add(child)
                        todo.append(child)
                continue
            new = node not in read
            if new:
                read.add(node)
            for position, key in enumerate(node.next_functions):
                child = key[0]
                if child is None:
                    continue
                if new:
                    known = uses.get(key)
                    if known is None:
                        uses[key] = [(node, position, number)]
                    else:
                        known.append((node, position, number))
                if child not in seen:
                    seen.add(child)
                    todo.append(child)
            if len(seen) > MAX_NODES:
                return False
        made = set(inside)
        for root in roots:
            if root in made:
                exits[root] = older
        return True


class ModuleGradients:
    """Collects one module call's gradients and reports each as it arrives.

    Args:
        outputs: its outputs with gradients, in order.
        inputs: how many inputs with gradients it has.
        consumers: see :meth:`Graph.consumers`.
        inner: outputs that are not watched, likewise.
        measure: makes a leaf of a gradient, and is told of which output or input, by its index.
        report: called with the output gradients' leaves and the input gradients' leaves whenever
            one was added (again if the graph is walked twice).
        track: keeps a hook's handle, to be removed at the end of the stage.
        active: whether gradients are still wanted (a graph may outlive the stage).
        quiet: what holds while a gradient is looked at, and while ``measure`` and ``report`` run.
    """

    def __init__(
        self,
        outputs: list[Tensor],
        inputs: int,
        consumers: list[tuple[Any, int, int]],
        inner: set[int],
        measure: Callable[[Tensor, str, int], dict[str, Any]],
        report: Callable[[list[Any], list[Any]], None],
        track: Callable[[Any], None],
        active: Callable[[], bool],
        quiet: AbstractContextManager[None],
    ) -> None:
        self._quiet = quiet
        self._measure = measure
        self._report = report
        self._active = active
        self.output_leaves: list[Any] = [None] * len(outputs)
        self.input_leaves: list[Any] = [None] * inputs
        self._awaited = [0] * inputs
        self._sums: dict[int, Tensor] = {}
        #: Sums that are tensors of our own, which may be added to in place.
        self._own: set[int] = set()
        for index, output in enumerate(outputs):
            if index in inner:
                continue
            track(output.register_hook(partial(self._arrived, index)))
        by_node: dict[Any, list[tuple[int, int]]] = {}
        for node, position, index in consumers:
            by_node.setdefault(node, []).append((position, index))
            self._awaited[index] += 1
        for node, uses in by_node.items():
            track(node.register_hook(partial(self._passed, uses)))

    def settle(self) -> None:
        """Measure what has arrived at inputs some of whose consumers never ran (dead branches)."""
        with self._quiet:
            for index, total in self._sums.items():
                self.input_leaves[index] = self._measure(total, INPUT, index)
            self._sums.clear()

    def _arrived(self, index: int, gradient: Tensor) -> None:
        """The gradient of an output."""
        if not self._active():
            return
        with self._quiet:
            self.output_leaves[index] = self._measure(gradient, OUTPUT, index)
            self._report(self.output_leaves, self.input_leaves)

    def _passed(
        self, uses: list[tuple[int, int]], gradients: tuple[Tensor | None, ...], _: Any
    ) -> None:
        """What a node inside the module sends to what it consumed.

        Args:
            uses: which of them are inputs of the module: position, and index of the input.
            gradients: of everything that the node consumed.
        """
        if not self._active():
            return
        with self._quiet:
            for position, index in uses:
                self._awaited[index] -= 1
                part = gradients[position]
                if part is not None:
                    # itself where it may be, so that it is known again where it is next looked at;
                    # autograd adds to it in place only under a new version
                    part = part.detach() if part.requires_grad else part
                    held = self._sums.get(index)
                    # Autograd adds contributions in the order they arrive; so does this.
                    if held is None:
                        self._sums[index] = part
                    elif index in self._own:
                        held.add_(part)
                    else:
                        self._sums[index] = held + part
                        self._own.add(index)
                if self._awaited[index] == 0 and index in self._sums:
                    total = self._sums.pop(index)
                    self._own.discard(index)
                    self.input_leaves[index] = self._measure(total, INPUT, index)
            self._report(self.output_leaves, self.input_leaves)
