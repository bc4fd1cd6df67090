"""What judging an alignment many times need not read each time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rlprobe.dumps import results as tables
from rlprobe.dumps.key_data import BatchKey, KeyData, MicroBatch, Row
from rlprobe.dumps.key_names import TOKENS
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET
from rlprobe.selftest.blind.quantities import (
    BUFFER,
    CHOICE,
    COORDINATE,
    ENVIRONMENT,
    JOINED,
    KEY_DATA,
    METRIC,
    PLACE,
    PROOF,
    SETTING,
    TABLE,
    TOKEN,
    WEIGHT,
    Quantity,
)
from rlprobe.store.read import Run


class Touched(KeyData):
    """A run's key data of which the files of one key were changed; the others are as they were."""

    def __init__(self, now: KeyData, was: KeyData, key: str) -> None:
        """
        Args:
            now: as they lie there.
            was: as they were, which remembers its rows.
            key: what was changed; names no samples.
        """
        super().__init__(now.data, now.proof)
        self._was, self._key = was, key
        self._now = functools.cache(super().rows)

    def micro_batches(self, step: int) -> dict[BatchKey, MicroBatch]:
        return self._was.micro_batches(step)

    def rows(self, key: str, step: int) -> list[Row]:
        return self._now(key, step) if key == self._key else self._was.rows(key, step)

    def samples(self, key: str, step: int) -> frozenset[str | None]:
        return super().samples(key, step) if key == self._key else self._was.samples(key, step)

    def contradicted(self, step: int) -> dict[str, str]:
        wrong = self.contradiction(self._key, step)
        rest = {key: why for key, why in self._was.contradicted(step).items() if key != self._key}
        return rest | ({} if wrong is None else {self._key: wrong})


def of_one_key(quantity: Quantity) -> bool:
    """Whether nothing but one key's own values changes: no tokens, which name samples, and no
    parts of a list or mask that several stages share."""
    shared = (*TOKENS, "loss_mask")
    return quantity.kind == KEY_DATA and quantity.key not in shared


#: What judging asks a run for many times, and reads from a file each time; and of which a
#: quantity's kind is a part.
REMEMBERED = frozenset(
    {
        *("weights", "gradients", "mock_proof", "environment", "metrics", "buffers", "optimizers"),
        *("joined", "token_sketches", "logical", "routing", "generated"),
    }
)
_MADE_OF = {
    WEIGHT: "weights",
    PROOF: "mock_proof",
    METRIC: "metrics",
    BUFFER: "buffers",
    SETTING: "optimizers",
    TOKEN: "token_sketches",
    CHOICE: "routing",
    ENVIRONMENT: "environment",
    JOINED: "joined",
    PLACE: "gradients",
    COORDINATE: "logical",
}


def made_of(quantity: Quantity) -> frozenset[str]:
    """What is read anew once a quantity has changed; of a whole file whatever may be in it."""
    if quantity.kind == TABLE:
        return REMEMBERED
    return frozenset({_MADE_OF.get(quantity.kind, "")})


@dataclass(frozen=True)
class Compared(Results):
    """An alignment of which the target's comparison of one stage at most is read anew; all others
    lie in memory, held once against what their summaries say of them."""

    #: The stage; None for none.
    changed: str | None = None
    _held: dict[tuple[str, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def table(self, pair: str, stage: str, name: str = tables.RECORDS) -> pl.LazyFrame | None:
        def read() -> pl.DataFrame | None:
            lazy = super(Compared, self).table(pair, stage, name)
            return None if lazy is None else lazy.collect()

        if (pair, stage) == (TARGET, self.changed):
            return super().table(pair, stage, name)
        found: pl.DataFrame | None = self._once((pair, stage, name), read)
        return None if found is None else found.lazy()

    def summary(self, pair: str, stage: str) -> tables.Summary | None:
        def read() -> tables.Summary | None:
            return super(Compared, self).summary(pair, stage)

        if (pair, stage) == (TARGET, self.changed):
            return read()
        found: tables.Summary | None = self._once((pair, stage), read)
        return found

    def _once(self, at: tuple[str, ...], read: Callable[[], Any]) -> Any:
        if at not in self._held:
            self._held[at] = read()
        return self._held[at]


def remember(run: Run) -> None:
    """Read once what judging asks a run for many times."""
    vars(run).update({name: functools.cache(getattr(run, name)) for name in REMEMBERED})
    remember_rows(run)


def remember_rows(run: Run) -> None:
    """The same of its key data."""
    if run.recorded is not None:
        vars(run.recorded)["rows"] = functools.cache(run.recorded.rows)
