"""Module hooks of the light engine: they look, and give back nothing.

A forward hook that returns None leaves the output alone, a tensor hook that returns None leaves
the gradient alone, and neither adds a node to the graph: outputs, gradients and weights stay bit
for bit what they are without capture.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture.engine import Nest
from rlprobe.capture.light import choices
from rlprobe.capture.light.backward import (
    OUTPUT,
    Edge,
    Graph,
    ModuleGradients,
    edge,
    next_number,
)
from rlprobe.capture.light.coordinates import Batch, Tokens
from rlprobe.capture.light.logical import Logical, Owner, tensors
from rlprobe.capture.light.nesting import nest, with_gradient
from rlprobe.capture.light.own_parameters import OwnParameters
from rlprobe.capture.light.pieces import Places, Undivided
from rlprobe.capture.light.recompute import Recomputation
from rlprobe.capture.light.routers import Choice, choice
from rlprobe.capture.light.routing import ChosenExperts
from rlprobe.capture.light.stack import Stacks, Trace, trace
from rlprobe.capture.light.statistics import Statistics
from rlprobe.capture.light.token_sketches import TokenSketches, is_block


class _Call:
    """A module call that has begun and not ended."""

    __slots__ = (
        "backward", "batch", "choice", "edges", "entry", "first", "graded", "name", "parameters",
        "trace", "watch",
    )  # fmt: skip

    def __init__(self, watch: ModuleWatch, name: str, backward: str, where: Trace) -> None:
        self.watch = watch
        self.name = name
        self.backward = backward
        self.trace = where
        self.entry: dict[str, Nest] = {}
        self.parameters: dict[str, Any] = {}
        #: Edges of the inputs with gradients, taken before the call: an operation in place gives
        #: the tensor another one.
        self.edges: list[Edge] = []
        #: Number of the first node the call may make.
        self.first = 0
        #: Which tokens the call works on, and which of its inputs with gradients has a logical
        #: record; None where that is not known.
        self.batch: Batch | None = None
        #: What it hands out, if it is a router.
        self.choice: Choice | None = None
        self.graded: int | None = None


class _Quiet(AbstractContextManager[None]):
    """The tape's lock, and our operations kept out of dispatch modes.

    Selective checkpointing is such a mode: it caches what it sees in the forward and expects the
    same in the recomputation.
    """

    def __init__(self) -> None:
        # Autograd runs hooks in threads of its own where a model spans several devices.
        self._lock = threading.RLock()
        self._suspended: list[Any] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        suspended = None
        if torch._C._len_torch_dispatch_stack():
            suspended = torch.utils._python_dispatch._disable_current_modes()
            suspended.__enter__()
        self._suspended.append(suspended)

    def __exit__(self, *raised: Any) -> None:
        suspended = self._suspended.pop()
        if suspended is not None:
            suspended.__exit__(*raised)
        self._lock.release()


class Tape:
    """What the hooks of one stage entry write to.

    Args:
        counts: calls so far of every record prefix in this step (continued across entries).
        construct, stacks: the stage's, continued likewise.
        statistics: where tensors become leaves.
        tokens: where block outputs are sketched per token; None where that is off.
        trains: whether the stage has backward passes.
        logical: where records of whole stages are added up; None where that is off.
        routing: what the model's routers choose from; None where it has none.
        chosen_experts: where choices of experts are kept; None where that is off.
        model_tokens: which tokens the model works on; None where nothing needs to know.
    """

    def __init__(
        self,
        counts: dict[str, int],
        construct: dict[str, str | None],
        stacks: Stacks,
        statistics: Statistics,
        tokens: TokenSketches | None = None,
        trains: bool = False,
        logical: Logical | None = None,
        routing: choices.Routing | None = None,
        chosen_experts: ChosenExperts | None = None,
        model_tokens: Tokens | None = None,
    ) -> None:
        self.logical = logical
        self.routing = routing
        self.chosen_experts = chosen_experts
        self.model_tokens = model_tokens
        self.recomputation = Recomputation(trains)
        self.tokens = tokens
        self.micro_step = 0
        self.counts = counts
        self.construct = construct
        self.stacks = stacks
        self.statistics = statistics
        self.data: dict[str, Any] = {}
        #: False outside the token range of a generation, and after the stage.
        self.active = True
        self.handles: list[Any] = []
        self.gradients: list[ModuleGradients] = []
        self.hooked_parameters: set[tuple[str, str, int]] = set()
        self._open: dict[int, list[_Call]] = {}
        self._graphs: dict[int, Graph] = {}
        self.quiet = _Quiet()

    @property
    def open(self) -> list[_Call]:
        """Calls under way in this thread, outermost first."""
        return self._open.setdefault(threading.get_ident(), [])

    @property
    def graph(self) -> Graph:
        """What this thread's calls have built so far."""
        return self._graphs.setdefault(threading.get_ident(), Graph())

    def count(self, key: str) -> int:
        """The index of this use of ``key``, from 0."""
        index = self.counts.get(key, -1) + 1
        self.counts[key] = index
        return index

    def latest(self, prefix: str | None) -> str | None:
        """The last forward record of a module, for calls whose caller is not on the stack."""
        if prefix is None or prefix not in self.counts:
            return None
        return f"{prefix}.forward.{self.counts[prefix]}"

    def move_to_end(self, name: str, entry: dict[str, Any]) -> None:
        """Records stand in the order in which they are complete."""
        self.data.pop(name, None)
        self.data[name] = entry

    def close(self) -> None:
        """Take every hook out; hooks of a graph that lives on fall silent."""
        self.active = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for watched in self.gradients:
            watched.settle()
        self.gradients.clear()
        self._open.clear()
        self._graphs.clear()
        self.statistics.forget()


class ModuleWatch:
    """The hooks of one module.

    Args:
        tape: where records go.
        prefix: ``Module.{path}.{class}``.
        enclosing: prefix of the module that holds this one, or None.
        module: the module.
        block: whether its output is sketched per token, where that is wanted.
        owner: whose logical records it adds to.
        views: names of the parameters that FSDP1 keeps; None where it keeps none.
    """

    def __init__(
        self,
        tape: Tape,
        prefix: str,
        enclosing: str | None,
        module: nn.Module,
        block: bool,
        owner: Owner,
        views: tuple[str, ...] | None = None,
    ) -> None:
        self.tape = tape
        self.prefix = prefix
        self.enclosing = enclosing
        self.block = block
        self.owner = owner
        self._parameters = OwnParameters(tape, prefix, views)
        tape.handles.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
        # Parameters first among the forward hooks: FSDP2's own, which frees them, comes after.
        # The output last: other hooks may change it, and the caller gets what they leave.
        # Always called: an exception in the module must not leave its call open.
        #: Whether parameters are looked at when the output is: nothing comes in between.
        self._at_once = not module._forward_hooks
        if not self._at_once:
            tape.handles.append(
                module.register_forward_hook(self.during, prepend=True, always_call=True)
            )
        tape.handles.append(
            module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
        )

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tape = self.tape
        if not tape.active or tape.recomputation.leaves_out(self.prefix):
            return
        with tape.quiet:
            calls = tape.open
            parent = calls[-1] if calls else None
            index = tape.count(self.prefix)
            name = f"{self.prefix}.forward.{index}"
            backward = f"{self.prefix}.backward.{index}"
            where = trace(parent.trace if parent is not None else None)
            call = _Call(self, name, backward, where)
            calls.append(call)
            above = parent.name if parent is not None else tape.latest(self.enclosing)
            tape.construct[name] = above
            tape.stacks.add(name, where.stack)
            leaf = tape.statistics.leaf
            call.entry["input_args"] = [nest(arg, leaf, 1) for arg in args]
            call.entry["input_kwargs"] = {k: nest(v, leaf, 1) for k, v in kwargs.items()}
            if torch.is_grad_enabled():
                call.edges = [edge(tensor) for tensor in with_gradient((args, kwargs))]
                call.first = next_number()
            if tape.model_tokens is not None:
                call.batch = tape.model_tokens.of(self.owner.path)
            if tape.logical is not None:
                self._take(tape.logical, call, args, kwargs)

    def _take(self, logical: Logical, call: _Call, args: Any, kwargs: dict[str, Any]) -> None:
        """Add what the module is given to its logical record."""
        taken = logical.taken(tensors((args, kwargs)), call.batch)
        logical.add(self.owner, "forward", "input", taken)
        if taken is not None and call.edges:
            call.graded = _index(taken.tensor, with_gradient((args, kwargs)))

    def _position(self) -> int:
        """Index of this module's latest call among those under way, -1 for none."""
        calls = self.tape.open
        if calls and calls[-1].watch is self:
            return len(calls) - 1
        return next((i for i in reversed(range(len(calls))) if calls[i].watch is self), -1)

    def during(self, module: nn.Module, args: Any, output: Any) -> None:
        position = self._position()
        if position >= 0 and self.tape.active:
            with self.tape.quiet:
                self.tape.open[position].parameters = self._parameters.leaves(module)

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tape = self.tape
        calls = tape.open
        position = self._position()
        if position < 0:  # the call began before capture did, or outside the token range
            return
        call = calls[position]
        del calls[position:]  # calls above it ended by an exception that was caught
        if not tape.active:
            return
        with tape.quiet:
            leaf = tape.statistics.leaf
            if self._at_once:
                call.parameters = self._parameters.leaves(module)
            failed = output is None and sys.exc_info()[0] is not None
            outputs = output if isinstance(output, tuple) else (output,)
            call.entry["output"] = [nest(item, leaf, 1) for item in outputs]
            call.entry["parameters"] = call.parameters
            tape.move_to_end(call.name, call.entry)
            if self.block and tape.tokens is not None:
                tape.tokens.add(f"{call.name}.output.0", tape.micro_step, output)
            if tape.routing is not None and tape.tokens is not None and not failed:
                chosen = tape.routing.chosen(self.owner.path, module, output)
                if chosen is not None:
                    tape.tokens.add_choice(choices.record(call.name), tape.micro_step, chosen)
            graded = None
            if tape.model_tokens is not None and tape.model_tokens.batch and not failed:
                call.choice = choice(tensors(outputs))
                if call.choice is not None and tape.chosen_experts is not None:
                    tape.chosen_experts.add(self.owner.path, call.choice)
            if tape.logical is not None and not failed:
                graded = self._give(tape.logical, call, outputs)
            if not failed and torch.is_grad_enabled():
                self._watch_gradients(call, outputs, graded)
            if not calls:
                tape.graph.clear()

    def _give(self, logical: Logical, call: _Call, outputs: tuple[Any, ...]) -> int | None:
        """Add what the module gives to its logical record; which of its gradients is that of it."""
        if call.choice is not None:
            taken = logical.chosen(call.choice, call.choice.weights, call.batch)
        elif (to := self.owner.places.angles(self.owner.path, self.owner.module)) is not None:
            taken = logical.cosines(tensors(outputs), to, call.batch)
        else:
            taken = logical.taken(tensors(outputs), call.batch)
        logical.add(self.owner, "forward", "output", taken)
        return None if taken is None else _index(taken.tensor, with_gradient(outputs))

    def _watch_gradients(
        self, call: _Call, outputs: tuple[Any, ...], graded: int | None = None
    ) -> None:
        tape = self.tape
        tensors = with_gradient(outputs)
        if not tensors:
            return
        arriving = _Arriving(self, call, graded)
        found: list[tuple[Any, int, int]] = []
        inner: set[int] = set()
        if call.edges or len(tensors) > 1:
            found, inner = tape.graph.consumers(tensors, call.edges, call.first)
        watched = ModuleGradients(
            tensors,
            len(call.edges),
            found,
            inner,
            arriving.measure,
            arriving.report,
            tape.handles.append,
            arriving.active,
            tape.quiet,
        )
        if found:
            tape.gradients.append(watched)


class _Arriving:
    """What becomes of a call's gradients: leaves, records, parts of logical records.

    It outlives the call, of which it holds nothing that keeps the graph alive.

    Args:
        watch: the module's hooks.
        call: the call, which is over.
        graded: which of its outputs with gradients has a logical record.
    """

    __slots__ = ("_batch", "_given", "_name", "_owner", "_parent", "_routed", "_taken", "_tape")

    def __init__(self, watch: ModuleWatch, call: _Call, graded: int | None) -> None:
        self._tape = watch.tape
        self._owner = watch.owner
        self._name = call.backward
        above = watch.tape.construct.get(call.name)
        self._parent = above.replace(".forward.", ".backward.") if above is not None else None
        self._batch, self._routed = call.batch, call.choice
        self._given, self._taken = graded, call.graded

    def active(self) -> bool:
        """Whether gradients are still wanted."""
        return self._tape.active

    def measure(self, gradient: Tensor, end: str, index: int) -> dict[str, Any]:
        """A leaf of one gradient."""
        leaf = self._tape.statistics.leaf(gradient)
        if self._tape.logical is not None:
            self._add(self._tape.logical, gradient, end, index)
        return leaf

    def _add(self, logical: Logical, gradient: Tensor, end: str, index: int) -> None:
        if index != (self._given if end == OUTPUT else self._taken):
            return
        if self._routed is not None and end == OUTPUT:
            taken = logical.chosen(self._routed, gradient, self._batch)
        else:
            taken = logical.taken([gradient], self._batch)
        logical.add(self._owner, "backward", "input" if end == OUTPUT else "output", taken)

    def report(self, output_leaves: list[Any], input_leaves: list[Any]) -> None:
        """The record as far as it has come."""
        self._tape.construct[self._name] = self._parent
        self._tape.move_to_end(self._name, {"input": output_leaves, "output": input_leaves})


def attach(
    tape: Tape,
    modules: Iterator[tuple[str, str, nn.Module]],
    wanted: Wanted,
    places: Places | None = None,
    views: Mapping[int, tuple[str, ...]] | None = None,
) -> int:
    """Hook every wanted module; returns how many.

    Args:
        tape: where records go.
        modules: ``(prefix, path, module)`` in the order of ``named_modules``.
        wanted: whether the module at a path is captured.
        places: which part of logical tensors the model has; None: all of them.
        views: names of parameters that FSDP1 keeps, by identity of their module.
    """
    places = places or Undivided()
    views = views or {}
    prefixes: dict[str, str] = {}
    hooked = 0
    for prefix, path, module in modules:
        prefixes[path] = prefix
        if wanted(path):
            owner = Owner(path, prefix.rpartition(".")[2], module, places)
            above, block = _enclosing(path, prefixes), is_block(path, module)
            ModuleWatch(tape, prefix, above, module, block, owner, views.get(id(module)))
            hooked += 1
    return hooked


def attach_root(tape: Tape, root: nn.Module) -> None:
    """See which tokens each call of the whole model works on."""
    parameters = inspect.signature(root.forward)

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if tape.model_tokens is None or not tape.active:
            return
        with tape.quiet:
            given = dict(parameters.bind_partial(*args, **kwargs).arguments)
            for name, value in list(given.items()):
                if parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                    given.update(value)
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            tape.model_tokens.enter(given, device)

    tape.handles.append(root.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))


def _index(tensor: Tensor, among: list[Tensor]) -> int | None:
    return next((at for at, other in enumerate(among) if other is tensor), None)


Wanted = Callable[[str], bool]


def _enclosing(path: str, prefixes: dict[str, str]) -> str | None:
    while "." in path:
        path = path.rsplit(".", 1)[0]
        if path in prefixes:
            return prefixes[path]
    return None
