"""Where operators are watched: in one module, around the model's outputs, or in the update.

A module's backward is watched node by node: only the nodes that its own code made switch the trace
on, for the time they run. What surrounds the model has no node of its own to begin with; there the
trace sees every operator of the stage and lets all pass but its own.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.backward import LEAF
from rlprobe.capture.light.recompute import in_backward
from rlprobe.capture.names import named_modules
from rlprobe.capture.session import CaptureOptions
from rlprobe.capture.trace import reach
from rlprobe.capture.trace.again import (
    Before,
    generators,
    put_back,
    rerun,
    unseen,
    without_hooks,
)
from rlprobe.capture.trace.backward import Backward
from rlprobe.capture.trace.exchange import Keeper
from rlprobe.capture.trace.file import TraceFile
from rlprobe.capture.trace.hooks import Hooks
from rlprobe.capture.trace.operators import Operators, scalar, tensors
from rlprobe.capture.trace.told import Told, told
from rlprobe.capture.trace.values import Values

_log = logging.getLogger("rlprobe")
MODULE, OUTPUTS, UPDATE = "module", "outputs", "update"
KINDS = (MODULE, OUTPUTS, UPDATE)
#: Nodes of a graph visited for the ones that a module made.
_NODES = 50_000
#: Nodes of FSDP2, in which it reduces the gradients of a unit whose inputs have one.
_REDUCES = ("RegisterPostBackwardFunction",)


class Tracing:
    """The trace of one stage and step, over all its entries.

    Args:
        context: of the stage on this rank.
        models: the module whose stage it is, or its chunks.
        options: :attr:`CaptureOptions.trace` says what, ``trace_module`` which module.
    """

    def __init__(
        self, context: StageContext, models: list[nn.Module], options: CaptureOptions
    ) -> None:
        self._options = options
        self._context = context
        self.kind = str(options.trace)
        device = next((p.device for m in models for p in m.parameters()), torch.device("cpu"))
        self._device = device
        self._file = TraceFile(context, self.kind, options.trace_module, device.type)
        self._spent = 0
        self._values = Values(context.directory, "trace", self._allow, self._keeps)
        self._mode = Operators(self._values, self._wanted, self._file.operator, self._adds_up)
        self._handles: list[Any] = []
        self._hooks = Hooks(lambda: not self._inside, self._hook_begins, self._hook_ends)
        self._inside = 0
        self._micro_step = 0
        self._updating = False
        self._entered = 0
        self._traced: set[int] = set()
        self._before: Before | None = None
        self._again_backward = False
        keeps = options.keep_outputs and self.kind == MODULE
        self._exchange = Keeper(context.directory, options.tensor_budget) if keeps else None
        self._told: dict[str, Told] = {}
        self._ranges: list[int] = []
        self._began = 0

    def _allow(self, size: int) -> bool:
        limit = self._options.tensor_budget
        if limit is not None and self._spent + size > limit:
            return False
        self._spent += size
        return True

    def _keeps(self) -> bool:
        """Whether values from outside are kept: of an update not every micro-batch's gradients."""
        return self.kind != UPDATE or self._updating

    def begin(self, models: list[nn.Module]) -> None:
        """An entry of the stage begins."""
        self._hooks.over = False
        if self.kind == MODULE:
            named = list(named_modules(models))
            wanted = self._options.trace_module
            for _, path, module in named:
                if path == wanted:
                    self._watch_module(path, module)
            return
        for model in models:
            self._handles.append(model.register_forward_pre_hook(self._model_begins, prepend=True))
            self._handles.append(
                model.register_forward_hook(self._model_ends, with_kwargs=True, always_call=True)
            )
        self._enter()

    def end(self) -> None:
        """An entry of the stage ends: take everything out and write what was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.over = True
        while self._entered:
            self._leave()
        self._file.publish()

    def finish(self) -> int:
        """The stage is over; returns how many operators were recorded."""
        self._values.forget()
        if self._values.left_out:
            _log.warning("%s: %d values of the operators' trace did not fit into the budget",
                         self._context.stage, self._values.left_out)  # fmt: skip
        return self._file.count

    def micro_step(self, index: int) -> None:
        """A micro-batch begins."""
        self._micro_step = index
        self._updating = False
        if self._counts():
            self._file.add({"record": "micro_step", "micro_step": index})

    def given(self, data: Mapping[str, Any]) -> None:
        """What the stage was given, by name: outside the model, operators work on that.

        Args:
            data: tensors, or lists of them; anything else is passed over.
        """
        if self.kind != OUTPUTS:
            return
        with unseen():  # what a jagged entry holds is asked of it by an operator
            for name, value in data.items():
                for tensor in tensors(value):
                    self._values.owner(tensor, f"batch {name}")

    def result(self, name: str, value: object) -> None:
        """A result that the stage hands out: what it depends on is what matters of a trace."""
        if self.kind != OUTPUTS or self._updating or not self._counts():
            return
        if isinstance(value, torch.Tensor):
            with unseen():
                self._file.add({"record": "outputs", "name": name,
                                "outputs": [self._values.made(value)]})  # fmt: skip

    def settings(self, optimizer: Any) -> None:
        """An optimizer's groups as they stand before its step: learning rates, betas, decay."""
        groups = getattr(optimizer, "param_groups", None) or []
        self._file.add({"record": "settings", "groups": [
            {name: scalar(value) for name, value in group.items() if name != "params"}
            for group in groups
        ]})  # fmt: skip

    def updated(self) -> None:
        """The optimizer has stepped: what follows is of no update."""
        if self.kind == UPDATE:
            self._updating = False

    def update(self, models: list[nn.Module]) -> None:
        """All gradients are there: clipping and the optimizer follow."""
        self._updating = True
        if self.kind != UPDATE:
            return
        for _, path, module in named_modules(models):
            for name, parameter in module.named_parameters(path, recurse=False):
                self._values.call(parameter, f"parameter {name}")
                if parameter.grad is not None:
                    self._values.reenter(parameter.grad, f"gradient of {name}")

    def _counts(self) -> bool:
        wanted = self._options.micro_steps
        return not wanted or self._micro_step in wanted

    # what is recorded when

    def _wanted(self) -> bool:
        if self.kind == MODULE:
            return not self._inside
        if self.kind == UPDATE:
            return self._of_gradients() if in_backward() else self._updating
        if self._updating or self._inside or not self._counts():
            return False
        return self._is_own(torch._C._current_autograd_node()) if in_backward() else True

    def _adds_up(self) -> bool:
        """Whether gradients are being added up: what adds them is run twice on the same."""
        return self.kind == UPDATE and in_backward()

    def _of_gradients(self) -> bool:
        """Whether what runs in the backward pass adds up, reduces or changes parameters' gradients.

        No module's code does that: it runs in the nodes of leaves, in hooks on them, and between
        nodes (FSDP2's and DDP's reductions).
        """
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() == LEAF:
            return True
        return bool(node.name().startswith(_REDUCES))

    def _is_own(self, node: Any) -> bool:
        """Whether code outside the model made a node: by when it was made."""
        if node is None or node._sequence_nr() == LEAF:
            return False
        return bisect.bisect(self._ranges, node._sequence_nr()) % 2 == 1

    def _enter(self) -> None:
        self._mode.__enter__()
        self._entered += 1
        self._ranges.append(int(torch.autograd._get_sequence_nr()))

    def _leave(self) -> None:
        self._mode.__exit__(None, None, None)
        self._entered -= 1

    # around the model

    def _model_begins(self, *_: Any) -> None:
        if not in_backward():
            self._inside += 1
            if self._inside == 1:
                self._ranges.append(int(torch.autograd._get_sequence_nr()))

    def _model_ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or not self._inside:
            return
        self._inside -= 1
        if not self._inside:
            self._ranges.append(int(torch.autograd._get_sequence_nr()))
            if self._counts() and self.kind == OUTPUTS and not self._updating:
                for index, tensor in enumerate(tensors(output)):
                    self._values.call(tensor, f"model output {index}")

    # in one module

    def _watch_module(self, path: str, module: nn.Module) -> None:
        self._path = path
        self._handles.append(module.register_forward_pre_hook(self._begins, with_kwargs=True))
        # before FSDP's own hook, which takes the parameters away that a second call needs
        self._handles.append(
            module.register_forward_hook(
                self._ends, with_kwargs=True, always_call=True, prepend=True
            )
        )
        for name, child in module.named_modules():
            if not name:
                continue
            self._handles.append(child.register_forward_pre_hook(self._child_begins))
            self._handles.append(
                child.register_forward_hook(
                    self._child_ends(f"{path}.{name}"), with_kwargs=True, always_call=True
                )
            )

    def _begins(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        once = self._micro_step in self._traced or (
            bool(self._traced) and not self._options.micro_steps
        )
        if self._entered or once or in_backward() or not self._counts():
            return
        self._before = Before(args, kwargs, self._device)
        if self._exchange is not None:
            self._told = told(module)
        self._file.add({"record": "call", "module": self._path, "micro_step": self._micro_step,
                        "grad": torch.is_grad_enabled()})  # fmt: skip
        for name, part in [*module.named_parameters(), *module.named_buffers()]:
            self._values.call(part, name)
        for index, tensor in enumerate(tensors((args, kwargs))):
            self._values.call(tensor, f"input {index}")
        self._traced.add(self._micro_step)
        self._inside = 0
        self._ranges.clear()
        self._enter()
        self._hooks.__enter__()

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._entered or in_backward() or self._before is None:
            return
        self._hooks.__exit__(None, None, None)
        self._leave()
        self._ranges.append(int(torch.autograd._get_sequence_nr()))
        before, self._before = self._before, None
        found = list(tensors(output))
        if not found:
            return  # the call raised: whoever called it deals with that
        self._file.add({"record": "outputs", "outputs": [
            {**self._values.made(t), "data": self._values.save(t, f"output{i}")}
            for i, t in enumerate(found)
        ]})  # fmt: skip
        self._watch_nodes(found)
        with without_hooks(module):
            again, wide = rerun(module, before, output)
            reached = self._reached(module, before, output, again)
        again["wide_data"] = [self._values.save(t, f"wide{i}") for i, t in enumerate(wide)]
        if reached is not None:
            data = self._values.save(reached, "reach")
            again["reach"] = {"dtype": "torch.float32", "shape": [*reached.shape], "data": data}
        self._file.add(again)
        exchange, self._exchange = self._exchange, None  # of the first call
        if exchange is not None:
            exchange.told(module, self._told)
            exchange.forward(before, found)
        self._await_gradients(module, before, found, exchange)

    def _reached(
        self, module: nn.Module, before: Before, output: Any, again: dict[str, Any]
    ) -> torch.Tensor | None:
        """Which tokens depend on which, where the module repeats itself."""
        if again.get("repeats") is not True or again.get("draws") is not False:
            return None
        after = generators(self._device)
        try:
            return reach.measured(module, before, output)
        except Exception as error:  # noqa: BLE001 - a kernel may refuse in any way: it is recorded
            again["reach_failed"] = f"{type(error).__name__}: {error}"[:500]
            return None
        finally:
            put_back(after, self._device)

    def _await_gradients(
        self,
        module: nn.Module,
        before: Before,
        outputs: list[torch.Tensor],
        exchange: Keeper | None,
    ) -> None:
        """Run the backward pass again when the gradients of the outputs have come."""
        needed = [t for t in outputs if t.requires_grad]
        if not needed or self._again_backward:
            return
        self._again_backward = True
        backward = Backward(module, before, outputs)

        def arrived(gradients: Sequence[torch.Tensor | None]) -> None:
            found, made, wide = backward.run(gradients)
            for kind, tensors_of in (("made", made), ("wide", wide)):
                for line, (name, tensor) in zip(found[kind], tensors_of.items(), strict=True):
                    line["data"] = self._values.save(tensor, f"{kind} {name}".replace(" ", "_"))
            self._file.add(found)
            if exchange is not None:
                exchange.backward(gradients, made)

        self._handles.append(torch.autograd.graph.register_multi_grad_hook(needed, arrived))

    def _child_begins(self, *_: Any) -> None:
        if self._entered and not in_backward():
            self._inside += 1
            if self._inside == 1:
                self._ranges.append(int(torch.autograd._get_sequence_nr()))

    def _child_ends(self, path: str) -> Any:
        def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._entered or not self._inside or in_backward():
                return
            self._inside -= 1
            if not self._inside:
                self._ranges.append(int(torch.autograd._get_sequence_nr()))
                self._mode.child(path, args, kwargs, output)

        return ends

    def _watch_nodes(self, outputs: Sequence[torch.Tensor]) -> None:
        """Switch the trace on in the nodes that the module's own code made."""
        first = self._ranges[0]
        todo = [t.grad_fn for t in outputs if t.grad_fn is not None]
        seen = set(todo)
        while todo and len(seen) < _NODES:
            node: Any = todo.pop()
            if node._sequence_nr() < first:
                continue
            if self._is_own(node):
                self._handles.append(node.register_prehook(self._node_begins))
                self._handles.append(node.register_hook(self._node_ends))
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    todo.append(child)

    def _node_begins(self, *_: Any) -> None:
        self._inside = 0
        self._mode.__enter__()
        self._entered += 1

    def _node_ends(self, *_: Any) -> None:
        if self._entered:
            self._leave()

    def _hook_begins(self) -> None:
        self._inside = 0
        self._mode.__enter__()

    def _hook_ends(self) -> None:
        self._mode.__exit__(None, None, None)
