"""Memory of a stage: the vendors' snapshots on a device, process memory on a CPU.

``{dump}/memory_snapshot/{stage}/step{N}/rank{R}.pickle`` (CUDA and NPU: what
``torch.cuda.memory._dump_snapshot`` writes, for https://pytorch.org/memory_viz and the vendor's
viewer; rlprobe itself never loads it; a stage that is entered again in a step has
``rank{R}_1.pickle``, ``rank{R}_2.pickle``, …) or ``rank{R}.json`` (CPU: resident and peak memory
before and after each entry, in bytes).
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlprobe.capture.files import write_json
from rlprobe.capture.session import Session

_log = logging.getLogger("rlprobe.capture")

#: Allocations kept in a device's history: the viewers become slow beyond.
_MAX_ENTRIES = 100_000


def needs_layers(session: Session) -> str | None:
    """What to tell a user whose memory dump can take no snapshot; None when it can.

    Snapshots are taken around the stages whose layers are dumped.
    """
    if session.capture.memory and not session.capture.stages:
        return (
            "memory_dump is on but no model-layer dump is: no memory snapshot will be taken. "
            "Switch on reference_dump, actor_train_dump, actor_infer_dump or critic_train_dump"
        )
    return None


@contextlib.contextmanager
def recording(session: Session, stage: str, step: int, rank: int) -> Iterator[None]:
    """Take the snapshot of a stage around the body; nothing when memory is not captured."""
    if not session.capture.memory:
        yield
        return
    base = Path(session.dump) / "memory_snapshot" / stage / f"step{step}"
    device = _device_memory(session.device)
    if device is None:
        yield from _process(base / f"rank{rank}.json")
        return
    device._record_memory_history(max_entries=_MAX_ENTRIES)
    try:
        yield
        base.mkdir(parents=True, exist_ok=True)
        device._dump_snapshot(str(_next(base, rank)))
    finally:
        device._record_memory_history(enabled=None)


def _next(base: Path, rank: int) -> Path:
    """The file of a stage's next entry: an earlier entry's snapshot is not written over."""
    found = len([*base.glob(f"rank{rank}.pickle"), *base.glob(f"rank{rank}_*.pickle")])
    return base / (f"rank{rank}_{found}.pickle" if found else f"rank{rank}.pickle")


def _device_memory(device: str) -> Any:
    """The module with ``_record_memory_history`` of a device, or None on a CPU."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.memory
    npu = getattr(torch, "npu", None)
    if device == "npu" and npu is not None and npu.is_available():
        return npu.memory
    return None


def _process(path: Path) -> Iterator[None]:
    before = process_memory()
    yield
    entries = []
    if path.exists():
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
    entries.append({"before": before, "after": process_memory()})
    write_json(path, {"unit": "bytes", "entries": entries}, indent=1)


def process_memory() -> dict[str, int]:
    """Resident and peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":
        peak *= 1024
    resident = _resident()
    # Linux counts either by itself, and late by some pages
    return {"resident": resident, "peak": max(peak, resident)}


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
