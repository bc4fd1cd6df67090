"""A trainer's metrics in a file of lines: rlprobe's ``metrics.jsonl``, or verl's file logger's."""

from __future__ import annotations

from pathlib import Path

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.errors import DumpError

_MAX_BYTES = 1 << 30
NAME = "metrics.jsonl"


def read(path: Path) -> dict[str, dict[int, float]]:
    """Metrics by name and the trainer's own step.

    A line is ``{"step", "trainer_step", "metrics"}`` (rlprobe's) or ``{"step", "data"}`` (verl's
    ``trainer.logger=[file]``). What is no number is left out.

    Args:
        path: the file, or a run's directory, which holds ``metrics.jsonl``.

    Raises:
        DumpError: it cannot be read, a line is neither, or it holds no metric.
    """
    file = path / NAME if path.is_dir() else path
    found: dict[str, dict[int, float]] = {}
    try:
        lines = read_bytes(file, _MAX_BYTES).splitlines()
    except DocumentError as error:
        raise DumpError(f"{file} {error}; give a run's directory or its {NAME}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = jsonfile.mapping(jsonfile.parse(line, nonfinite=True))
        except DocumentError as error:
            raise DumpError(f"{file}, line {number}: {error}") from error
        if "format" in row:
            continue
        values, step = row.get("metrics", row.get("data")), row.get("trainer_step", row.get("step"))
        if not isinstance(values, dict) or not isinstance(step, int) or isinstance(step, bool):
            raise DumpError(
                f"{file}, line {number}: neither rlprobe's line of metrics (step, metrics) nor "
                "verl's (step, data)"
            )
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(str(name), {})[step] = float(value)
    if not found:
        raise DumpError(f"{file} holds no metric")
    return found
