"""Looks at everything an alignment needs before anything is queued.

A wrong partition costs an hour in the queue, a missing image another, and a store that the NPU
nodes cannot see costs the whole first run. Each module here asks one kind of question and answers
with :class:`~rlprobe.doctor.item.Item` lines; none of them changes anything.
"""

from __future__ import annotations

from rlprobe.doctor.examine import examine
from rlprobe.doctor.item import Item, State

__all__ = ["Item", "State", "examine"]
