"""What an engine's fused operators take and give, in training's terms.

Engines fuse what a training model computes module by module. Three shapes of it are known here, for
all models and engines alike, by what a call was given and gave:

- **residual pair**: a block or a norm takes what the part before it put out and, apart from it, the
  residual stream; it gives what it computed, and the stream after the addition. Training's module
  takes and gives the sum. (``fused_add_rms_norm`` of vLLM and SGLang; the first block, which has no
  stream yet, takes one tensor.) What the addition leaves of a norm is training's input of the same
  norm, so that it is compared once.
- **gate and up in one**: ``SiluAndMul`` and its relatives take both halves and give their product;
  training's activation takes the gate alone. Both are compared beside it: the input as what
  ``gate_up_proj`` puts out, the output as what ``down_proj`` takes.
- **positions first**: a block takes token positions as its first argument, training's as
  ``position_ids``.

``qkv_proj`` and ``gate_up_proj`` themselves are rules of matching (``fuse`` in
:mod:`rlprobe.compare.match.rules`), because they hold between two engines as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

#: What a record is called in every pass: module, slot and index.
Key = tuple[str, str, str]

GATED = (
    "the engine computes the activation and its product with the other half in one operator; what "
    "it takes is compared as the output of the projection before it, what it gives as the input of "
    "the one after"
)
STREAM = "the residual stream after the addition; it is compared as what the operator takes"

_BLOCK = re.compile(r"(^|\.)layers\.\d+$")
_NORM = re.compile(r"Norm\b")
_GATED = re.compile(r"(AndMul|^MulAnd)")
_FLOATS = ("torch.float", "torch.bfloat", "torch.half", "torch.double")


@dataclass(frozen=True)
class Described:
    """The records of an engine's pass, made ready to be matched with training's."""

    #: Those with a counterpart, under the index that training gives it.
    records: pl.DataFrame
    #: Those without one, with their reason in column ``why``.
    apart: pl.DataFrame
    #: The record that a renamed one is, by its new name.
    renamed: Mapping[str, Key]
    #: What is added to a record's values, so that they are training's.
    addends: Mapping[Key, Key]


def describe(records: pl.DataFrame) -> Described:
    """What the operators of a pass take and give.

    Args:
        records: columns of :data:`rlprobe.compare.match.pairs.LOADED`, of one pass and tensors
            only.
    """
    index: dict[str, str] = {}
    why: dict[str, str] = {}
    addends: dict[Key, Key] = {}
    for call in _calls(records):
        call.gated(why)
        call.pair(index, why, addends)
        call.positions(index)
    names = records.get_column("name").to_list()
    spelled = {name: _with_index(name, index[name]) for name in names if name in index}
    keyed = records.select("name", "module", "slot", "index").rows()
    held = records.filter(~pl.col("name").is_in(list(why)))
    return Described(
        held.with_columns(
            name=pl.col("name").replace(spelled),
            index=pl.col("name").replace_strict(index, default=pl.col("index")),
        ),
        records.filter(pl.col("name").is_in(list(why))).with_columns(
            why=pl.col("name").replace_strict(why, default=None, return_dtype=pl.String)
        ),
        {
            spelled[name]: (module, slot, number)
            for name, module, slot, number in keyed
            if name in spelled
        },
        addends,
    )


@dataclass(frozen=True)
class _Call:
    """The tensors of one module's call: inputs and outputs in order."""

    module: str
    #: The module's class.
    cls: str
    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]

    def gated(self, why: dict[str, str]) -> None:
        if _GATED.search(self.cls):
            why |= {row["name"]: GATED for row in (*self.inputs, *self.outputs)}

    def pair(self, index: dict[str, str], why: dict[str, str], addends: dict[Key, Key]) -> None:
        """A residual pair's halves are added; the parts that are not asked for stand apart."""
        block, norm = _BLOCK.search(self.module), _NORM.search(self.cls)
        if not (block or norm) or len(self.outputs) != 2 or not _alike(self.outputs):
            return
        taken = [row for row in self.inputs if _alike([self.outputs[0], row])]
        if not 1 <= len(taken) <= 2:
            return
        if taken[0]["index"] != "0":
            index[taken[0]["name"]] = "0"
        if len(taken) == 2:
            addends[self._key(taken[0])] = self._key(taken[1])
            why[taken[1]["name"]] = STREAM
        why[self.outputs[1]["name"]] = STREAM
        if block:
            addends[self._key(self.outputs[0])] = self._key(self.outputs[1])

    def positions(self, index: dict[str, str]) -> None:
        first = next((row for row in self.inputs if row["index"] == "0"), None)
        if _BLOCK.search(self.module) and first is not None and not _is_float(first):
            index[first["name"]] = "position_ids"

    def _key(self, row: Mapping[str, Any]) -> Key:
        return self.module, row["slot"], row["index"]


def _calls(records: pl.DataFrame) -> Iterator[_Call]:
    columns = ("name", "module", "op", "slot", "index", "dtype", "shape", "order")
    tensors = records.filter(
        pl.col("module").is_not_null()
        & pl.col("shape").is_not_null()
        & pl.col("slot").is_in(["input", "output"])
    )
    for (module, cls), rows in tensors.select(columns).group_by(
        "module", "op", maintain_order=True
    ):
        found = rows.sort("order").rows(named=True)
        yield _Call(
            str(module),
            str(cls or ""),
            [row for row in found if row["slot"] == "input"],
            [row for row in found if row["slot"] == "output"],
        )


def _is_float(row: Mapping[str, Any]) -> bool:
    return str(row["dtype"]).startswith(_FLOATS)


def _alike(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tensors are of one shape, and all floating point."""
    return all(_is_float(row) and row["shape"] == rows[0]["shape"] for row in rows)


def _with_index(name: str, index: str) -> str:
    return f"{name.rpartition('.')[0]}.{index}"
