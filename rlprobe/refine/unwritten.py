"""Memory that was reserved and not written yet: its numbers are whatever lay there.

A kernel that writes to what it is given is given such memory beside its inputs. Two sides' never
agree, and say nothing: held against each other they would pass for inputs that differ.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from rlprobe.refine.trace import Operator, Trace, Value

#: ATen's operators that reserve memory, and those that fill it without reading it.
_RESERVES = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
})  # fmt: skip
_FILLS = frozenset({"copy_", "fill_", "zero_"})
#: In place of a digest: such memory is alike on both sides.
_UNWRITTEN = "unwritten"


def known(trace: Trace) -> Trace:
    """A trace in which reserved memory is alike, and what a kernel is given of it to write to.

    ATen's operators in place read what they change; libraries' kernels are taken not to, where
    they are given memory that was reserved a moment ago and holds what it held then. Where it holds
    something else, a kernel that no dispatcher sees has written to it.
    """
    reserved: dict[int, str | None] = {}
    operators = []
    for op in trace.operators:
        made = {v.storage for v in op.outputs if v.storage >= 0}
        if _reserves(op):
            reserved |= {v.storage: v.digest for v in op.outputs if v.storage >= 0}
            op = structs.replace(op, outputs=[_without(v) for v in op.outputs])
        elif _writes(op):
            written = {storage: reserved.pop(storage) for storage in made & reserved.keys()}
            op = _blank(op, written) if _fills(op) else op
        operators.append(op)
    return replace(trace, operators=operators)


def _blank(op: Operator, reserved: dict[int, str | None]) -> Operator:
    if not reserved:
        return op

    def untouched(value: Value) -> bool:
        return value.digest is not None and reserved.get(value.storage) == value.digest

    arguments = [
        structs.replace(
            argument, tensors=[_without(v) if untouched(v) else v for v in argument.tensors]
        )
        for argument in op.arguments
    ]
    return structs.replace(op, arguments=arguments)


def _without(value: Value) -> Value:
    return structs.replace(
        value, digest=_UNWRITTEN, sketch=None, norm=None, max=None, min=None, nonfinite=None,
        elements=None,
    )  # fmt: skip


def _reserves(op: Operator) -> bool:
    space, name, overload = _parts(op)
    return space == "aten" and name in _RESERVES and overload != "out"


def _fills(op: Operator) -> bool:
    space, name, overload = _parts(op)
    return space != "aten" or name in _FILLS or "out" in overload


def _writes(op: Operator) -> bool:
    """Whether an operator changes what lies in memory of before: a view does not."""
    space, name, overload = _parts(op)
    return space != "aten" or name.endswith("_") or "out" in overload


def _parts(op: Operator) -> tuple[str, str, str]:
    space, _, rest = op.name.partition("::")
    name, _, overload = rest.partition(".")
    return space, name, overload
