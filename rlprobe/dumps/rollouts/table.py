"""A step's samples as a record table, and the numbers of their tokens as tensors.

``Rollout.{prompt}.{n}.{slot}.{key}``: the n-th sample of a prompt, which is named by eight digits
of its digest. :func:`meeting` numbers one side's samples as the other side's: those of equal
responses first, the rest in order.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rlprobe.dumps import records
from rlprobe.dumps.leafcolumns import encodable
from rlprobe.dumps.rollouts.files import Rollout
from rlprobe.dumps.rollouts.plain import Array
from rlprobe.dumps.rollouts.sample import Ids, Leaf, Unread
from rlprobe.dumps.schema import LEAF_SCHEMA, ROLLOUT, UNREADABLE_DTYPE
from rlprobe.dumps.tensors import dtypes
from rlprobe.dumps.tensors.source import TensorSource
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

#: What ids are called where a tensor's type would stand: 7 and 8 are no nearer than 7 and 90.
IDS = "ids"
#: Slot of a row that could not be read.
ENTRY = "entry"
_DIGITS = 8


@dataclass(frozen=True)
class Read:
    """A step's rollouts as records."""

    frame: pl.DataFrame
    tensors: TensorSource
    #: The digest of each sample's response, by its prompt and number.
    responses: dict[tuple[str, int], str]


def read(rollout: Rollout, step: int) -> Read:
    """The records of a step, in the order of its samples."""
    rows: list[dict[str, Any]] = []
    arrays: dict[str, TensorFile] = {}
    responses: dict[tuple[str, int], str] = {}
    met: Counter[str] = Counter()
    for sample in rollout.samples:
        prompt = sample.prompt[:_DIGITS]
        number = met[prompt]
        met[prompt] += 1
        responses[prompt, number] = sample.response
        for leaf in sample.leaves:
            name = _name(prompt, number, leaf.slot, leaf.name)
            row = _row(name, number, leaf.slot, leaf.name)
            rows.append(row | _content(leaf, f"{len(rows)}", arrays))
    for number, (where, why) in enumerate(rollout.unread):
        row = _row(f"{ROLLOUT}.unread.{where.replace(' ', '')}", number, ENTRY, where)
        rows.append(row | {"dtype": UNREADABLE_DTYPE, "value": encodable(why)})
    frame = records.finish(pl.DataFrame(rows, schema=LEAF_SCHEMA, orient="row"), step, 0)

    def find(name: str) -> TensorFile:
        if name not in arrays:
            raise TensorFileError("the rollouts hold no such array")
        return arrays[name]

    return Read(frame, TensorSource(find), responses)


def meeting(benchmark: Read, target: Read) -> pl.DataFrame:
    """The target's records, its samples numbered as those of the benchmark that they are compared
    with: of one prompt those of equal responses first, the rest in the order of the file.
    """
    new = _numbers(benchmark.responses, target.responses)
    frame = target.frame
    names = [_renamed(name, call, new) for name, call in frame.select("name", "call").iter_rows()]
    calls = [
        new.get((name.split(".", 2)[1], call), call)
        for name, call in frame.select("name", "call").iter_rows()
    ]
    return frame.with_columns(
        name=pl.Series(names, dtype=pl.String), call=pl.Series(calls, dtype=pl.Int32)
    )


def _renamed(name: str, call: int, new: dict[tuple[str, int], int]) -> str:
    head, prompt, _, rest = [*name.split(".", 3), ""][:4]
    number = new.get((prompt, call))
    return name if number is None else f"{head}.{prompt}.{number}.{rest}"


def _numbers(
    benchmark: dict[tuple[str, int], str], target: dict[tuple[str, int], str]
) -> dict[tuple[str, int], int]:
    """The number of each of the target's samples, by its prompt and the number it had."""
    sides = _by_prompt(benchmark), _by_prompt(target)
    found: dict[tuple[str, int], int] = {}
    for prompt, own in sides[1].items():
        free: dict[str, list[int]] = defaultdict(list)
        for number, response in sides[0].get(prompt, []):
            free[response].append(number)
        late = []
        for number, response in own:
            if free.get(response):
                found[prompt, number] = free[response].pop(0)
            else:
                late.append(number)
        left = sorted(number for numbers in free.values() for number in numbers)
        beyond = itertools.count(len(sides[0].get(prompt, [])))
        for number, other in zip(late, itertools.chain(left, beyond), strict=False):
            found[prompt, number] = other
    return found


def _by_prompt(responses: dict[tuple[str, int], str]) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for (prompt, number), response in responses.items():
        found[prompt].append((number, response))
    return found


def _name(prompt: str, number: int, slot: str, key: str) -> str:
    return encodable(f"{ROLLOUT}.{prompt}.{number}.{slot}.{key}")


def _row(name: str, number: int, slot: str, key: str) -> dict[str, Any]:
    return dict.fromkeys(LEAF_SCHEMA) | {
        "name": name, "op": ROLLOUT, "call": number, "direction": "forward", "slot": slot,
        "index": encodable(key),
    }  # fmt: skip


def _content(leaf: Leaf, file: str, arrays: dict[str, TensorFile]) -> dict[str, Any]:
    value = leaf.value
    if value is None:
        return {}
    if isinstance(value, Array):
        arrays[file] = _tensor(value)
        return _described(value) | {"data_name": file}
    if isinstance(value, Ids):
        return {"dtype": IDS, "value": value.text}
    if isinstance(value, Unread):
        return {"dtype": UNREADABLE_DTYPE, "value": encodable(f"{leaf.name}: {value.why}")}
    if isinstance(value, float):
        return {"dtype": "float", "value": repr(value)}
    return {"dtype": type(value).__name__, "value": encodable(str(value))}


def _tensor(value: Array) -> TensorFile:
    raw = np.ascontiguousarray(value.raw).reshape(-1)
    steps = [1]
    for length in reversed(value.raw.shape[1:]):
        steps.append(steps[-1] * length)
    strides = tuple(reversed(steps)) if value.raw.ndim else ()
    return TensorFile(value.dtype, value.raw.shape, strides, raw, 0)


def _described(value: Array) -> dict[str, Any]:
    """Type, shape and statistics, as a dump of a tensor has them."""
    found: dict[str, Any] = {
        "dtype": f"torch.{value.dtype.name}",
        "shape": list(value.raw.shape),
    }
    if value.dtype.kind != "float" or not value.raw.size:
        return found
    numbers = dtypes.numbers(np.ascontiguousarray(value.raw).reshape(-1), value.dtype, True)
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(numbers))
        return found | {
            "max": float(numbers.max()), "min": float(numbers.min()),
            "mean": float(numbers.mean()), "norm": norm,
        }  # fmt: skip
