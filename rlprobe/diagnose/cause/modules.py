"""What the numbers of a module's forward code are consistent with.

Names of modules say where a look is worth while; a class comes of the numbers alone, or of what a
record is: an input called mask, a router's choice, a table of angles.
"""

from __future__ import annotations

import re

from rlprobe.diagnose.cause import attention, repeated, routers
from rlprobe.diagnose.cause.found import Found, unknown
from rlprobe.diagnose.cause.shape import Shape, times
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin
from rlprobe.judge.tokens import Profile

_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$|topk|moe|expert", re.IGNORECASE)
_INTEGER = re.compile(r"torch\.(u?int|long|short|bool)")


def forward(
    finding: Finding, origin: Origin, shape: Shape, profile: Profile | None = None
) -> Found:
    """The cause where a forward record parts first."""
    row = origin.row
    index, operator = str(row.get("index")), str(origin.operator or row.get("op"))
    module = origin.module or ""
    if row["slot"] == "input":
        named = _named_input(index, row)
        if named is not None:
            return named
    if shape.rounded_to is not None and repeated.rounds(finding, row):
        return Found("rounding_order", [shape.said_rounding()])
    if _ROTARY.search(operator):
        said = f"{operator} turns positions into angles, and its output differs"
        return Found("position", [said])
    # The last component of a path says what a module is for: `mlp.gate` and `q_norm`.
    what = f"{operator} {module.rpartition('.')[2]}"
    if _ROUTER.search(what):
        found = routers.cause(finding, origin, operator)
        if found is not None:
            return found
    if shape.permuted:
        return Found("layout", [
            f"max, min and norm are equal and the elementwise error is {shape.error:.2g}: as where "
            "the same numbers stand in other places"
        ])  # fmt: skip
    if shape.factor is not None and repeated.factors(finding, row) is not None:
        said = f"the {row['slot']} is {times(shape.factor)} times the benchmark's"
        return Found("constant_factor", [f"{said}, and nothing else differs"])
    if _ATTENTION.search(what):
        return attention.cause(finding, origin, shape, profile)
    if _ROUTER.search(what):
        return routers.output(finding, origin, operator)
    return unknown(*described(shape))


def described(shape: Shape) -> list[str]:
    """What a difference without a law looks like."""
    said = [f"an error of {shape.error:.2g}"]
    if shape.factor is not None:
        said[0] += f"; the norm is {times(abs(shape.factor))} times the benchmark's"
    if shape.offset is not None and abs(shape.offset) > 0.5 * shape.error:
        said.append(f"the mean is off by {shape.offset:.2g} of the root mean square")
    if shape.like_rounding is not None:
        said.append(
            f"the error is as large as a rounding to {shape.like_rounding} makes, and nothing "
            "shows that it is one"
        )
    return said


def _named_input(index: str, row: dict[str, object]) -> Found | None:
    if "mask" in index:
        return Found("mask", [f"the input {index} differs"])
    if "position" in index or _ROTARY.search(str(row.get("op"))):
        return Found("position", [f"the input {index} differs"])
    if _INTEGER.match(str(row.get("dtype_benchmark"))):
        return Found("data", [f"the integer input {index} differs"])
    return None
