"""One gate out of those of several judged steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rlprobe.diagnose.diagnosis import CAVEAT, OPEN, SHUT, GateItem
from rlprobe.diagnose.gate.check import Gate
from rlprobe.diagnose.sentence import of_steps
from rlprobe.said import SEMICOLON, Said, joined, say

_WORSE = (OPEN, CAVEAT, SHUT)
#: Differing texts of one item that are spelled out.
_SHOWN = 3


def merged(gates: Mapping[int, Gate]) -> Gate:
    """The gates of judged steps as one: of each item the worst state, and the steps it is of.

    Args:
        gates: by step, in order; at least one.
    """
    steps = sorted(gates)
    if len(steps) == 1:
        return gates[steps[0]]
    # a later step has items that the first has not, in their place among the others
    names = dict.fromkeys(item.item for step in steps[::-1] for item in gates[step].items)
    items = []
    for name in names:
        found = {s: item for s in steps for item in gates[s].items if item.item == name}
        items.append(_item(found, steps))
    shut = next((gate.shut for gate in gates.values() if gate.shut is not None), None)
    return Gate(items, shut)


def _item(found: Mapping[int, GateItem], steps: Sequence[int]) -> GateItem:
    worst = max((item.state for item in found.values()), key=_WORSE.index)
    of_worst = {step: item for step, item in found.items() if item.state == worst}
    texts: dict[str, list[int]] = {}
    for step, item in of_worst.items():
        texts.setdefault(item.evidence, []).append(step)
    first = next(iter(of_worst.values()))
    if len(texts) == 1 and len(of_worst) == len(steps):
        return first
    said = [say("{steps}: {text}", steps=of_steps(own), text=text) for text, own in texts.items()]
    more = len(said) - _SHOWN
    shown: Said = joined(said[:_SHOWN], SEMICOLON)
    if more == 1:
        shown += say("; 1 further text")
    elif more > 1:
        shown += say("; {count} further texts", count=more)
    return msgspec.structs.replace(first, evidence=shown)
