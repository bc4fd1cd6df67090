"""``trace.jsonl`` beside dump.json: a header, then a line an operator, in the order they ran.

The format is docs/diagnosis.md's; :mod:`rlprobe.refine.trace` reads it.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from rlprobe.capture.engine import StageContext
from rlprobe.capture.files import append_line, append_lines

NAME = "trace.jsonl"
FORMAT = 1
#: Operators of one trace; what comes after is counted.
MOST = 20_000
_PACKAGES = ("torch_npu", "transformers", "flash_attn", "triton", "vllm", "megatron-core")


class TraceFile:
    """Lines on their way to the file.

    Args:
        context: of the stage on this rank.
        kind: what is traced: ``module``, ``outputs`` or ``update``.
        module: the path of the module, where it is one.
    """

    def __init__(self, context: StageContext, kind: str, module: str | None, device: str) -> None:
        self._path = context.directory / NAME
        self._lines: list[dict[str, Any]] = []
        self.count = 0
        self.left_out = 0
        append_line(self._path, {
            "record": "trace", "format": FORMAT, "stage": context.stage, "step": context.step,
            "rank": context.rank, "kind": kind, "module": module, "device": device,
            "versions": _versions(),
        })  # fmt: skip

    def operator(self, line: dict[str, Any]) -> bool:
        """Take an operator's line; False: the next one will not be taken."""
        self._lines.append(line)
        self.count += 1
        return self.count < MOST

    def add(self, line: dict[str, Any]) -> None:
        """Take any other line."""
        self._lines.append(line)

    def publish(self) -> None:
        """Write what has come since the last time."""
        append_lines(self._path, self._lines)
        self._lines.clear()


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
