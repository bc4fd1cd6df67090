"""What an engine's fused operators take and give, in training's terms.

Engines fuse what a training model computes module by module. Five shapes of it are known here, for
all models and engines alike, by what a call was given and gave:

- **residual pair**: a block or a norm takes what the part before it put out and, apart from it, the
  residual stream; it gives what it computed, and the stream after the addition. Training's module
  takes and gives the sum. (``fused_add_rms_norm`` of vLLM and SGLang; the first block, which has no
  stream yet, takes one tensor.) What the addition leaves of a norm is training's input of the same
  norm, so that it is compared once.
- **gate and up in one**: ``SiluAndMul`` and its relatives take both halves and give their product;
  training's activation takes the gate alone. Both are compared beside it: the input as what
  ``gate_up_proj`` puts out, the output as what ``down_proj`` takes.
- **all experts in one** (``FusedMoE``, ``MoERunner``): takes tokens and the router's logits, and
  chooses by itself; training's experts take the choice. Where it adds the shared experts too, what
  it gives is compared as what the block gives.
- **a shared expert and its gate in one**: the expert gives what its gate lets through. Told by the
  order of calls: in training the gate runs when the expert is done.
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
CHOOSES = (
    "the engine's experts take the router's logits and choose by themselves; they are compared as "
    "what the router gives"
)
SHARED = (
    "the engine adds shared experts to what the chosen ones give; the sum is compared as what the "
    "block gives"
)
LET_THROUGH = (
    "the engine's shared expert gives what its gate lets through; it is compared as what its last "
    "projection and its gate give"
)
STREAM = "the residual stream after the addition; it is compared as what the operator takes"

_BLOCK = re.compile(r"(^|\.)layers\.\d+$")
_NORM = re.compile(r"Norm\b")
_GATED = re.compile(r"(AndMul|^MulAnd)")
_EXPERTS = re.compile(r"FusedMoE|^MoERunner")
_SHARED = re.compile(r"(^|\.)shared_experts?$")
#: What the gate of a shared expert is called, beside it.
_GATE = "_gate"
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
    calls = list(_calls(records))
    done = {call.module: call.done for call in calls}
    for call in calls:
        call.gated(why)
        call.experts(index, why, any(_beside(call.module, other) for other in done))
        call.let_through(why, done.get(f"{call.module}{_GATE}"))
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

    @property
    def done(self) -> int:
        """When it gave its last output, in the order of execution."""
        return max((int(row["order"]) for row in self.outputs), default=-1)

    def experts(self, index: dict[str, str], why: dict[str, str], shared: bool) -> None:
        """All experts of a block, with those that every token has or without."""
        if not _EXPERTS.search(self.cls):
            return
        for row in self.inputs:
            if row["index"] == "hidden_states":
                index[row["name"]] = "0"
            elif row["index"] != "0":
                why[row["name"]] = CHOOSES
        if shared:
            why |= {row["name"]: SHARED for row in self.outputs}

    def let_through(self, why: dict[str, str], gate: int | None) -> None:
        """A shared expert whose gate was applied before it was done."""
        if gate is not None and _SHARED.search(self.module) and gate < self.done:
            why |= {row["name"]: LET_THROUGH for row in self.outputs}

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


def _beside(module: str, other: str) -> bool:
    """Whether another module is the shared expert of the same block."""
    return bool(_SHARED.search(other)) and other.rpartition(".")[0] == module.rpartition(".")[0]


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
