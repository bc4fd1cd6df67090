"""Activation recomputation: a layer runs twice in an update, and one of the passes is the record's.

Reentrant checkpointing (Megatron's full recomputation, torch's older form) first runs without a
graph and, inside the backward pass, again with one: the second pass has the gradients and is
recorded. Non-reentrant checkpointing builds the graph in the first pass; what runs again inside the
backward only restores activations and is not recorded. So a run with recomputation has the records
of one without it.
"""

from __future__ import annotations

from collections import Counter

import torch


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class Recomputation:
    """Tells, call by call, which pass is left out.

    Args:
        trains: whether the stage has backward passes; in others every call counts.
    """

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        #: Passes left out so far that the backward will run again, by record prefix.
        self._owed: Counter[str] = Counter()

    def leaves_out(self, prefix: str) -> bool:
        """Whether the call that begins now is the pass without a record."""
        if not self._trains:
            return False
        if in_backward():
            if not self._owed[prefix]:
                return True
            self._owed[prefix] -= 1
            return False
        if torch.is_grad_enabled():
            return False
        self._owed[prefix] += 1
        return True
