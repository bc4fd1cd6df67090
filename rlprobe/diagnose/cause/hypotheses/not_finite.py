"""NaN or infinity on one side alone."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.said import of_side, say


class OfRecord:
    """A record that is not finite on one side, everything before it being finite."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Whether it is."""
        row = difference.row
        if row.get("status") != "nonfinite":
            return None
        said = say(
            "the {side} is not finite at {name}; everything before it is",
            side=of_side(str(row.get("reason"))),
            name=row["name"],
        )
        return Fit("nonfinite", (said,))
