"""A table that one side computes with in another format: is it said, and nothing that is right?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import buffers
from rlprobe.sketch import sketch
from rlprobe.stages import GENERATE, LOG_PROB
from rlprobe.store.parts import BUFFERS

Array = NDArray[Any]
TABLE = (10_000.0 ** (-np.arange(0, 32) / 32)).astype(np.float32)
NAME = "model.rotary_emb.inv_freq"


def bf16(values: Array) -> Array:
    """To nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def row(values: Array, **changes: Any) -> dict[str, Any]:
    kind = {"f": "torch.float32", "b": "torch.bool"}[values.dtype.kind]
    numbers = values.dtype.kind == "f" and bool(np.isfinite(values).all())
    return {
        "step": 0, "stage": LOG_PROB, "role": "actor", "rank": 0, "name": NAME, "dtype": kind,
        "shape": list(values.shape), "digest": f"sha256:{hash(values.tobytes()):x}",
        "norm": float(np.linalg.norm(values)) if numbers else None,
        "sketch": sketch(values.astype(np.float64)).tolist() if numbers else None,
    } | changes  # fmt: skip


def said(
    left: list[dict[str, Any]] | None,
    right: list[dict[str, Any]] | None,
    backends: tuple[str, str] = ("FSDP", "FSDP"),
    step: int = 0,
) -> GateItem | None:
    runs = []
    for rows, backend in zip((left, right), backends, strict=True):
        process = SimpleNamespace(
            role="actor", rank=0, backend=backend, tp=1, pp=1, cp=1, ep=1, chunks=None, stages=None
        )
        table = None if rows is None else pl.DataFrame(rows, schema=BUFFERS)
        runs.append(
            SimpleNamespace(
                buffers=lambda table=table: table, manifest=SimpleNamespace(layout=[process])
            )
        )
    by_role = dict(zip(("benchmark", "target"), runs, strict=True))
    return buffers.check(
        SimpleNamespace(  # type: ignore[arg-type]
            benchmark=runs[0],
            target=runs[1],
            results=SimpleNamespace(run=by_role.get),
            step=SimpleNamespace(number=step),
        )
    )


def test_the_same_and_what_a_device_computes_by_itself_agree() -> None:
    assert said(None, None) is None
    own = (TABLE * (1 + 1e-7 * np.sin(np.arange(32)))).astype(np.float32)
    for other in (TABLE, own):
        found = said([row(TABLE)], [row(other)])
        assert found is not None and found.state == "open", found
        assert found.evidence.startswith("1 buffers are the same")


@pytest.mark.parametrize(
    ("other", "changes", "text"),
    [
        (bf16(TABLE), {"dtype": "torch.bfloat16"}, "float32 and bfloat16) by 0.00"),
        # rounded and held in the right format again, as a model that was cast and cast back
        (bf16(TABLE), {}, "float32 and float32) by 0.00"),
        (TABLE * np.float32(0.5), {}, "by 0.5 of it"),
        (TABLE, {"dtype": "torch.float64"}, "float32 and float64"),
        (np.roll(TABLE, 1), {}, f"{NAME} ({LOG_PROB}, rank 0"),
        (np.zeros_like(TABLE), {}, "by 1 of it"),
    ],
)
def test_another_table_is_a_caveat_with_its_name_and_by_how_much(
    other: Array, changes: dict[str, Any], text: str
) -> None:
    found = said([row(TABLE)], [row(other, **changes)])
    assert found is not None and found.state == "caveat"
    assert NAME in found.evidence and text in found.evidence, found.evidence


def test_masks_and_what_is_not_finite_have_their_digests() -> None:
    mask = np.tri(4, dtype=bool)
    found = said([row(mask)], [row(mask.T.copy())])
    assert found is not None and found.state == "caveat" and "by its digest" in found.evidence
    never = np.where(mask, 0, -np.inf).astype(np.float32)
    found = said([row(never)], [row(never)])
    assert found is not None and found.state == "open"


def test_one_rank_of_two_is_found() -> None:
    alike = [row(TABLE), row(TABLE, rank=1)]
    found = said(alike, [row(TABLE), row(TABLE * 2, rank=1)])
    assert found is not None and found.state == "caveat" and "rank 1" in found.evidence
    # other numbers of ranks: each of the target's against what every rank of the benchmark has
    found = said([row(TABLE)], alike)
    assert found is not None and found.state == "open"


def test_other_back_ends_hold_tables_in_formats_of_their_own() -> None:
    unlike = ("FSDP", "megatron")
    rounded = row(bf16(TABLE), dtype="torch.bfloat16")
    found = said([row(TABLE)], [rounded], unlike)
    assert found is not None and found.state == "open"
    found = said([row(TABLE)], [row(TABLE * np.float32(1.1))], unlike)
    assert found is not None and found.state == "caveat"
    # engines are of one kind or have other names
    found = said([row(TABLE, stage=GENERATE)], [rounded | {"stage": GENERATE}], unlike)
    assert found is not None and found.state == "caveat"


def test_what_training_changes_is_held_against_the_other_side_at_the_first_step_alone() -> None:
    def running(by: float) -> list[dict[str, Any]]:
        later = np.full(4, 1 + by, dtype=np.float32)
        return [row(np.ones(4, dtype=np.float32)), row(later, step=1)]

    assert said(running(0.1), running(0.2)).state == "open"  # type: ignore[union-attr]
    found = said(running(0.1), running(0.2), step=1)
    assert found is not None and found.state == "open"
    assert "1 that change while training" in found.evidence
    first = [row(np.zeros(4, dtype=np.float32)), *running(0.2)[1:]]
    assert said(running(0.1), first).state == "caveat"  # type: ignore[union-attr]


def test_what_one_side_alone_has_or_recorded_is_said() -> None:
    found = said([row(TABLE)], [row(TABLE), row(TABLE, name="another")])
    assert found is not None and found.state == "open"
    assert "1 that one side alone has" in found.evidence
    found = said([row(TABLE)], None)
    assert found is not None and found.state == "caveat"
    assert "the target recorded no buffers" in found.evidence
