"""NaN or infinity on one side alone."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit


class OfRecord:
    """A record that is not finite on one side, everything before it being finite."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Whether it is."""
        row = difference.row
        if row.get("status") != "nonfinite":
            return None
        said = f"the {row.get('reason')} is not finite at {row['name']}; everything before it is"
        return Fit("nonfinite", (said,))
