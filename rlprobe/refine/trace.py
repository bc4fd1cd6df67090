"""Reading ``trace.jsonl``: the operators of a suspect as one side ran them.

What a line may hold is docs/diagnosis.md's; a trace may come from elsewhere, so that nothing in it
is taken for granted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlprobe import sketch
from rlprobe.errors import DumpError

NAME = "trace.jsonl"
FORMAT = 1
#: Where a value comes from that no traced operator made and that has no name.
ELSEWHERE = "elsewhere"
#: A trace is at most 20,000 lines of some kilobytes.
MAX_BYTES = 512 << 20
#: Round-offs (of the coarser format) within which two devices' values may be the same number.
ROUND_OFFS = 32.0


class Value(msgspec.Struct, frozen=True):
    """A tensor that an operator was given or made."""

    value: int = -1
    storage: int = -1
    dtype: str = ""
    shape: list[int] = []
    stride: list[int] | None = None
    digest: str | None = None
    norm: float | None = None
    max: float | str | None = None
    min: float | str | None = None
    sketch: str | None = None
    nonfinite: int | None = None
    elements: list[Any] | None = None
    #: Significant bits of the shortest format of which all its elements are numbers.
    bits: int | None = None
    #: Where it comes from, where no traced operator made it.
    origin: str | None = msgspec.field(name="from", default=None)
    #: File that holds it.
    data: str | None = None


class Argument(msgspec.Struct, frozen=True):
    """An argument of an operator: tensors, or a scalar."""

    name: str
    scalar: Any = None
    tensors: list[Value] = []
    #: Entries of a list of tensors, and which of them are tensors.
    entries: int | None = msgspec.field(name="list", default=None)
    places: list[int] | None = None
    default: bool = False


class Operator(msgspec.Struct, frozen=True):
    """One operator that ran."""

    n: int
    name: str
    direction: str = "forward"
    site: str | None = None
    #: The autograd node it ran in, and the forward operator that made the node.
    node: str | None = None
    of: int | None = None
    arguments: list[Argument] = []
    outputs: list[Value] = []
    #: False where it was run twice on the same and made something else; None: it was not.
    repeats: bool | None = None

    @property
    def inputs(self) -> list[Value]:
        return [value for argument in self.arguments for value in argument.tensors]

    @property
    def said(self) -> str:
        """Its name and place, in words."""
        if self.name.startswith("module::"):
            return f"the module {self.name[8:]}"
        where = f" ({self.site})" if self.site else ""
        where = f" (backward of {self.node.removesuffix('0')})" if self.node else where
        return f"{self.name}{where}"


class Again(msgspec.Struct, frozen=True):
    """What running the suspect again showed."""

    repeats: bool | None = None
    difference: float | None = None
    draws: bool | None = None
    failed: str | None = None
    wide: list[Value] = []
    wide_data: list[str | None] = []
    wide_failed: str | None = None
    #: By how much each token's output changes with each token's input, where that was tried.
    reach: Value | None = None
    reach_failed: str | None = None


class Gradient(Value, frozen=True):
    """A gradient that running the suspect's backward pass again has made."""

    name: str = ""


class AgainBackward(msgspec.Struct, frozen=True):
    """What running the suspect's backward pass again showed."""

    repeats: bool | None = None
    #: Gradients (``input 0``, or a parameter's name) that were others the second time.
    differs: list[str] = []
    difference: float | None = None
    draws: bool | None = None
    failed: str | None = None
    made: list[Gradient] = []
    wide: list[Gradient] = []
    wide_failed: str | None = None


@dataclass
class Trace:
    """One side's trace, of its first traced call."""

    kind: str
    module: str | None
    device: str
    versions: dict[str, str]
    operators: list[Operator] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    again: Again | None = None
    again_backward: AgainBackward | None = None
    #: An optimizer's groups before each step.
    settings: list[list[dict[str, Any]]] = field(default_factory=list)

    def live(self, *, numbers: bool = True) -> list[Operator]:
        """The forward operators that the outputs depend on, then those of the backward.

        What is computed and not used says nothing about a difference.

        Args:
            numbers: whether they may depend by a number that code took off a tensor.
        """
        forward = [op for op in self.operators if op.direction == "forward"]
        back = [op for op in self.operators if op.direction != "forward"]
        if self.outputs:
            forward = _needed(forward, self.outputs, numbers)
        return [op for op in (*forward, *back) if op.name not in _NOTHING]


#: Operators that make no number.
_NOTHING = frozenset({
    "aten::detach", "aten::alias", "aten::lift_fresh", "profiler::_record_function_enter_new",
    "profiler::_record_function_exit", "profiler::_record_function_exit._RecordFunction",
    "prim::device", "aten::set_.source_Storage",
})  # fmt: skip


def _needed(operators: list[Operator], outputs: list[Value], numbered: bool) -> list[Operator]:
    values = {value.value for value in outputs}
    storages = {value.storage for value in outputs}
    numbers: set[float] = set()
    kept = []
    for op in reversed(operators):
        given = {value.storage for value in op.inputs}
        # in place: what it wrote lies in a storage that is read later
        writes = any(o.storage in given and o.storage in storages for o in op.outputs)
        if writes or any(o.value in values for o in op.outputs) or taken(op) & numbers:
            kept.append(op)
            values |= {value.value for value in op.inputs}
            storages |= {value.storage for value in op.inputs}
            numbers |= _numbers(op) if numbered else set()
    return kept[::-1]


#: Whole numbers up to this one are everywhere: that one is an argument says nothing of its origin.
_SMALL = 2


def taken(op: Operator) -> set[float]:
    """The number that code took off a tensor (``.item()``); none of the smallest whole ones."""
    if op.name != "aten::_local_scalar_dense":
        return set()
    return {e for v in op.inputs for e in v.elements or () if _is_number(e)}


def _numbers(op: Operator) -> set[float]:
    return {a.scalar for a in op.arguments if _is_number(a.scalar)}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not (float(value).is_integer() and abs(value) <= _SMALL)


def read(path: Path) -> Trace | None:
    """Read a trace; None where there is no file.

    Raises:
        DumpError: it is damaged, of another format or too large.
    """
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise DumpError(f"{path} is larger than {MAX_BYTES} bytes: no trace")
    try:
        lines = list(_lines(path))
        return _parsed(lines, path)
    except (OSError, msgspec.MsgspecError, RecursionError, TypeError, KeyError) as error:
        raise DumpError(f"{path} is not a trace: {error}; refine again") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            raw = msgspec.json.decode(line)
            if not isinstance(raw, dict):
                raise TypeError("a line is no object")
            yield raw


def _parsed(lines: list[dict[str, Any]], path: Path) -> Trace:
    header = lines[0] if lines else {}
    if header.get("record") != "trace" or header.get("format") != FORMAT:
        raise DumpError(
            f"{path} has format {header.get('format')!r}; this rlprobe reads {FORMAT}: refine again"
        )
    trace = Trace(
        kind=str(header.get("kind")),
        module=header.get("module"),
        device=str(header.get("device")),
        versions=msgspec.convert(header.get("versions") or {}, dict[str, str]),
    )
    calls = 0
    for raw in lines[1:]:
        kind = raw.get("record")
        if kind == "call":
            calls += 1
        if calls > 1 and kind in ("outputs", "again"):
            continue  # the first call of a module that was traced in several micro-batches
        if kind == "operator" and (calls <= 1 or trace.kind != "module"):
            trace.operators.append(msgspec.convert(raw, Operator))
        elif kind == "outputs":
            trace.outputs += msgspec.convert(raw["outputs"], list[Value])
        elif kind == "settings":
            trace.settings.append(msgspec.convert(raw["groups"], list[dict[str, Any]]))
        elif kind == "again":
            trace.again = msgspec.convert(raw, Again)
        elif kind == "again_backward" and trace.again_backward is None:
            trace.again_backward = msgspec.convert(raw, AgainBackward)
    return trace


def fixed(one: Trace, *, backward: bool) -> bool:
    """Whether a suspect, run again, made the same of the same, with other random numbers too.

    A generator that is seeded anew at each call draws, and nothing of it is chance.

    Args:
        one: a side's trace.
        backward: its backward pass is the suspect, and was run again as well.
    """
    passes = [one.again, one.again_backward] if backward else [one.again]
    return all(
        found is not None and found.repeats is True and found.draws is False for found in passes
    )


def error(benchmark: Value, target: Value) -> float | None:
    """Relative L2 difference of two values, from sketches; 0 where digests agree, None unknown."""
    if benchmark.shape != target.shape:
        return None
    if benchmark.digest is not None and benchmark.digest == target.digest:
        return 0.0
    if benchmark.nonfinite != target.nonfinite:
        return float("inf")
    b, t = (decoded(value.sketch) for value in (benchmark, target))
    if b is None or t is None:
        # -inf of masks has no sketch; digests still tell that there is a difference
        return float("inf") if benchmark.digest and target.digest else None
    difference, size = float(np.linalg.norm(t - b)), benchmark.norm
    if not size:
        return difference
    return difference / size


def measurable(benchmark: Value, target: Value) -> bool:
    """Whether the size of a difference is known, and not only that there is one."""
    sketched = benchmark.sketch is not None and target.sketch is not None
    return sketched or benchmark.nonfinite != target.nonfinite


@functools.lru_cache(maxsize=1 << 14)
def decoded(text: str | None) -> npt.NDArray[np.float64] | None:
    """A value's sketch; None where it has none."""
    return None if text is None else sketch.decode(text).astype(np.float64)
