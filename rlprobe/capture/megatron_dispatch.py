"""Records of Megatron's experts: what they are given and give, and whose rows each has.

Between a router and its experts stands a dispatcher, which is no module. It sorts tokens by expert
and, in expert parallelism, sends each to the rank of its expert and the result back. So that a
container of experts is recorded as the Hugging Face model has it (``mlp.experts``: a row a token),
it is looked at where rows are still, and again, in the tokens' order. And so that an expert's own
modules have coordinates, the keys of the tokens take the way of the tokens: through the steps of
the dispatcher, in its own groups (8 bytes a row, no more).

That way is a collective. It is taken only where every rank is captured, for else ranks would wait
for those that are not.

Works on the dispatchers of megatron-core 0.16 that sort on the ranks themselves (``alltoall``,
``allgather``), without padding of experts' rows; of others, experts' own modules have no records.
Nothing of Megatron is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture.light.backward import INPUT, Graph, ModuleGradients, edge, next_number
from rlprobe.capture.light.coordinates import Batch
from rlprobe.capture.light.hooks import Tape
from rlprobe.capture.light.logical import Logical, Owner, Taken
from rlprobe.capture.light.pieces import Undivided

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_METHODS = ("dispatch_preprocess", "dispatch_postprocess", "combine_postprocess")


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of Megatron's layers of experts."""
    dispatcher = getattr(module, "token_dispatcher", None)
    return all(callable(getattr(dispatcher, name, None)) for name in _METHODS)


class DispatchWatch:
    """Looks at one layer's dispatcher until the tape is closed.

    Args:
        tape: where records go; with logical ones.
        path: Hugging Face path of the layer (``model.layers.3.mlp``).
        layer: the layer.
        every_rank: whether all ranks are captured.
    """

    def __init__(self, tape: Tape, path: str, layer: Any, every_rank: bool) -> None:
        self._tape = tape
        self._path = path
        self._layer = layer
        self._every_rank = every_rank
        self._dispatcher = layer.token_dispatcher
        self._owner = Owner(
            f"{path}.experts", type(layer.experts).__name__, layer.experts, Undivided()
        )
        self._batch: Batch | None = None
        self._rows = 0
        self._map: Tensor | None = None
        self._consumers: list[tuple[Any, int, int]] = []
        for name, after in zip(_METHODS, (self._given, self._sent, self._back), strict=True):
            setattr(self._dispatcher, name, self._watched(name, after))
        tape.handles.append(self)

    def remove(self) -> None:
        """Take the methods out that stand before the dispatcher's own."""
        for name in _METHODS:
            self._dispatcher.__dict__.pop(name, None)

    def _watched(self, name: str, after: Callable[..., None]) -> Callable[..., Any]:
        original = getattr(self._dispatcher, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = next_number() if torch.is_grad_enabled() else None
            found = original(*args, **kwargs)
            if self._is_recorded():
                with self._tape.quiet:
                    after(number, found, *args, **kwargs)
            return found

        return wrapper

    def _is_recorded(self) -> bool:
        """Whether the layer's call is one that records are made of."""
        calls = self._tape.open
        return (
            self._tape.active
            and self._tape.logical is not None
            and any(call.watch.owner.path == self._path for call in calls)
        )

    @property
    def _logical(self) -> Logical:
        assert self._tape.logical is not None
        return self._tape.logical

    def _given(
        self, number: int | None, found: Any, hidden: Tensor, routing_map: Tensor, *more: Any
    ) -> None:
        """Tokens are about to be sent."""
        self._batch = self._logical.tokens.of(self._owner.path)
        self._map = routing_map
        self._rows = hidden.numel() // hidden.shape[-1]
        self._logical.add(self._owner, "forward", "input", self._taken(hidden))
        self._consumers = []
        if number is not None and hidden.requires_grad:
            self._consumers = Graph().consumers([found[0]], [edge(hidden)], number)[0]

    def _sent(self, number: int | None, found: Any, *given: Any, **named: Any) -> None:
        """Rows have come, sorted by expert."""
        if not self._every_rank or self._map is None:
            return
        batch = self._batch and self._here(self._batch)
        keys = torch.zeros(self._rows, dtype=torch.int64, device=self._map.device)
        if batch is not None and len(batch.row_keys()) == self._rows:
            keys = batch.row_keys()
        with torch.no_grad():
            rows = row_keys(self._dispatcher, self._map, keys)
        self._map = None
        counts = [int(count) for count in found[1].tolist()]
        numbers = list(self._layer.local_expert_indices)
        if rows is None or len(rows) != len(found[0]) or sum(counts) != len(rows):
            return
        parts = zip(numbers, rows.split(counts), strict=True)
        each = {number: Batch.of_rows(part) for number, part in parts if len(part)}
        self._logical.tokens.dispatched(
            self._owner.path, {number: own for number, own in each.items() if own is not None}
        )

    def _here(self, batch: Batch) -> Batch | None:
        """The tokens of this rank, which may have a stretch of the sequence alone."""
        stretch = self._logical.tokens.stretch(batch)
        return batch if len(batch.row_keys()) == self._rows else stretch

    def _back(self, number: int | None, found: Any, *given: Any, **named: Any) -> None:
        """The tokens' results are back, added up over experts."""
        output = found
        self._logical.add(self._owner, "forward", "output", self._taken(output))
        if number is None or not output.requires_grad:
            return
        tape, logical = self._tape, self._logical

        def measure(gradient: Tensor, end: str, index: int) -> dict[str, Any]:
            slot = "output" if end == INPUT else "input"
            logical.add(self._owner, "backward", slot, self._taken(gradient, batch))
            return {}

        batch = self._batch
        watched = ModuleGradients(
            [output],
            1 if self._consumers else 0,
            self._consumers,
            set(),
            measure,
            lambda *_: None,
            tape.handles.append,
            lambda: tape.active,
            tape.quiet,
        )
        tape.gradients.append(watched)

    def _taken(self, tensor: Tensor, batch: Batch | None = None) -> Taken | None:
        return self._logical.taken([tensor], batch or self._batch)


def row_keys(dispatcher: Any, routing_map: Tensor, keys: Tensor) -> Tensor | None:
    """The keys of the rows that this rank's experts have, in the order in which they have them.

    Args:
        dispatcher: after it has sent the tokens.
        routing_map: of this rank's tokens, [tokens, experts].
        keys: of this rank's tokens, [tokens], int64.

    Returns:
        Shape (rows,); None where the order is not known.
    """
    kinds = {base.__name__ for base in type(dispatcher).__mro__}
    module = sys.modules.get(_MODULE)
    config: Any = getattr(dispatcher, "config", None)
    padded = getattr(dispatcher, "drop_and_pad", False) or getattr(
        config, "moe_router_padding_for_quantization", False
    )
    if module is None or padded:
        return None
    if "MoEAllGatherTokenDispatcher" in kinds:
        if dispatcher.tp_size > 1 or dispatcher.ep_size > 1:
            keys = module.gather_from_sequence_parallel_region(keys, group=dispatcher.tp_ep_group)
        return _by_expert(dispatcher.local_map, keys)
    if "MoEAlltoAllTokenDispatcher" not in kinds:
        return None
    rows = _by_expert(routing_map, keys)
    if dispatcher.ep_size > 1:
        rows = module.all_to_all(
            dispatcher.ep_group, rows, dispatcher.output_splits, dispatcher.input_splits
        )
    if dispatcher.tp_size > 1:
        splits = dispatcher.output_splits_tp
        rows = module.gather_from_sequence_parallel_region(
            rows,
            group=dispatcher.tp_group,
            output_split_sizes=None if splits is None else splits.tolist(),
        )
    if dispatcher.num_local_experts > 1:
        rows, _ = module.sort_chunks_by_idxs(
            rows,
            dispatcher.num_global_tokens_per_local_expert.ravel(),
            dispatcher.sort_input_by_local_experts,
        )
    return torch.as_tensor(rows)


def _by_expert(routing_map: Tensor, keys: Tensor) -> Tensor:
    """Keys of an expert's tokens after those of another's, each in the order of the tokens."""
    by_expert = routing_map.bool().T
    return keys.expand(by_expert.shape).masked_select(by_expert)
