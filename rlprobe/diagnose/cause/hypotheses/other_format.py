"""A record in another format than the one both sides were asked for."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit


class OfRecord:
    """Both sides have one precision, and the record has two formats."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Whether it has."""
        row = difference.row
        if not row.get("other_format"):
            return None
        said = (
            f"the output is {row['dtype_benchmark']} on the benchmark and {row['dtype_target']} on "
            "the target, although both were asked for one precision (an autocast, a cast, a "
            "module that was loaded in another format)"
        )
        return Fit("rounding_order", (said,))
