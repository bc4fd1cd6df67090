"""A record in another format than the one both sides were asked for."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.said import say


class OfRecord:
    """Both sides have one precision, and the record has two formats."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Whether it has."""
        row = difference.row
        if not row.get("other_format"):
            return None
        said = say(
            "the output is {dtype_benchmark} on the benchmark and {dtype_target} on "
            "the target, although both were asked for one precision (an autocast, a "
            "cast, a module that was loaded in another format)",
            dtype_benchmark=row["dtype_benchmark"],
            dtype_target=row["dtype_target"],
        )
        return Fit("rounding_order", (said,))
