"""The mock proof: which samples each process worked on, as its stages say."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError

NAME = "mock_proof.json"


class Entry(TypedDict):
    """One process's samples in one step and stage, in the order of its batches."""

    step: int
    #: Canonical name.
    stage: str
    rank: int
    #: Their digests.
    samples: list[str]


def entries(values: Any) -> list[Entry]:
    """Entries as they stand in JSON.

    Raises:
        DocumentError: they are no list of entries.
    """
    if not isinstance(values, list):
        raise DocumentError("its samples are no list")
    return [_entry(jsonfile.mapping(value)) for value in values]


def _entry(entry: dict[str, Any]) -> Entry:
    whole = all(type(entry.get(key)) is int for key in ("step", "rank"))
    samples = entry.get("samples")
    texts = isinstance(samples, list) and all(isinstance(sample, str) for sample in samples)
    if not whole or not texts or not isinstance(entry.get("stage"), str):
        raise DocumentError("an entry does not say step, rank, stage and samples")
    return cast("Entry", entry)
