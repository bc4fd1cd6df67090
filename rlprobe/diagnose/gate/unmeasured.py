"""Why nothing was compared of what two dumps' sides were given: parameters, and ids of tokens."""

from __future__ import annotations

import polars as pl

from rlprobe.judge import equipped
from rlprobe.said import Said, of_side, say

UNKNOWN = say("not known from dumps alone")
_ALIKE = say("dump both sides alike (level, scope and list of the configuration)")
_ONE_MODE = say("dump both sides with one summary_mode")
_IN_SUMMARY = say("what was not compared, and why, is in summary.json of the stage")


def ids(rows: pl.DataFrame) -> tuple[Said, Said]:
    """Why no ids of an embedding were compared, and what to do."""
    if (side := equipped.alone(rows)) is not None:
        text = say(
            "{unknown}: an embedding's ids were recorded on the {side} alone",
            unknown=UNKNOWN,
            side=of_side(side),
        )
        return text, _ALIKE
    if rows.is_empty():
        text = say("{unknown}: no embedding's ids were recorded on both sides", unknown=UNKNOWN)
        return text, say("dump the embedding too (level L0 or mix)")
    if equipped.unlike_checksums(rows):
        text = say(
            "{unknown}: the ids of embeddings have checksums of two kinds, which say nothing of "
            "each other",
            unknown=UNKNOWN,
        )
        return text, _ONE_MODE
    text = say(
        "{unknown}: of the ids that embeddings were given nothing could be compared; first {name}",
        unknown=UNKNOWN,
        name=str(rows.item(0, "name")),
    )
    return text, _IN_SUMMARY


def parameters(rows: pl.DataFrame | None) -> tuple[Said, Said]:
    """Why no parameters were compared, and what to do."""
    if rows is not None and (side := equipped.alone(rows)) is not None:
        text = say(
            "{unknown}: parameters were recorded on the {side} alone",
            unknown=UNKNOWN,
            side=of_side(side),
        )
        return text, _ALIKE
    if rows is None or rows.is_empty():
        text = say("{unknown}: no parameters were recorded on both sides", unknown=UNKNOWN)
        return text, say("dump modules (level L0 or mix), which have their parameters beside them")
    if equipped.unlike_checksums(rows):
        text = say(
            "{unknown}: the parameters have checksums of two kinds, which say nothing of each "
            "other",
            unknown=UNKNOWN,
        )
        return text, _ONE_MODE
    text = say(
        "{unknown}: of the recorded parameters nothing could be compared; first {name}",
        unknown=UNKNOWN,
        name=str(rows.item(0, "name")),
    )
    return text, _IN_SUMMARY
