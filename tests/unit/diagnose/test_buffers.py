"""What a module keeps beside its parameters is the same on both sides, or the sides part there."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from rlprobe import sketch, stages
from rlprobe.diagnose.diagnosis import Diagnosis, GateItem
from rlprobe.diagnose.gate import buffers as gate
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.planted import EPSILON
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

RATES = (1e4 ** (-np.arange(16) / 16)).astype(np.float32)
STATISTICS = np.linspace(0.1, 2.0, 24, dtype=np.float32)
MASK = np.tril(np.ones((8, 8), dtype=bool))
ROTARY, NORM, ATTENTION = (
    "model.rotary_emb.inv_freq",
    "model.layers.1.input_layernorm.running_var",
    "model.layers.0.self_attn.causal_mask",
)
EVERY = {ROTARY: RATES, NORM: STATISTICS, ATTENTION: MASK}
ROLES = {stages.REFERENCE: "ref", stages.LOG_PROB: "actor", stages.ACTOR_UPDATE: "actor"}


def in_bf16(values: Any) -> Any:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def record(name: str, values: Any, dtype: str | None = None, **other: Any) -> dict[str, Any]:
    kind = "torch.bool" if values.dtype == bool else "torch.float32"
    wide = values.astype(np.float64)
    finite = bool(np.isfinite(wide).all())
    return {
        "name": name,
        "dtype": dtype or kind,
        "shape": list(values.shape),
        "digest": "sha256:" + hashlib.sha256(values.tobytes()).hexdigest(),
        "norm": float(np.linalg.norm(wide)) if finite else None,
        "sketch": sketch.sketch(wide).tolist() if finite else None,
        "logical": True,
    } | other


def kept(
    *others: dict[str, Any], at: tuple[str, ...] = tuple(ROLES), backend: str | None = None
) -> dict[str, Any]:
    """A device's faults: what it keeps, these instead in these stages."""
    found = {}
    for stage, role in ROLES.items():
        own = {name: record(name, values) for name, values in EVERY.items()}
        if stage in at:
            own |= {one["name"]: one for one in others}
        found[role, stage] = list(own.values())
    return {"buffers": found, **({"backend": backend} if backend else {})}


def held(align: Align, target: dict[str, Any], benchmark: dict[str, Any] | None = None
) -> Diagnosis:  # fmt: skip
    both = Device(split=True, faults=target), Device(faults=benchmark or kept())
    return align(both[0], benchmark=both[1]).diagnose()


def item(found: Diagnosis) -> GateItem | None:
    return next((item for item in found.gate if item.item == gate.ITEM), None)


def test_the_same_buffers_are_open(align: Align) -> None:
    found = held(align, kept())
    said = item(found)
    assert found.verdict == "aligned" and said is not None and said.state == "open", found.sentence
    assert said.evidence.endswith(": 3")


@pytest.mark.parametrize(
    ("other", "module", "cause"),
    every_second(
        [
            (
                record(ROTARY, in_bf16(RATES), "torch.bfloat16"),
                "model.rotary_emb",
                "rounding_order",
            ),
            (record(ROTARY, in_bf16(RATES)), "model.rotary_emb", "position"),
            (
                record(NORM, STATISTICS * np.float32(1.001)),
                "model.layers.1.input_layernorm",
                "weights",
            ),
            (record(ATTENTION, np.tril(MASK, -1)), "model.layers.0.self_attn", "mask"),
        ]
    ),
)
def test_other_numbers_that_nothing_computed_shows_are_found_where_they_are_kept(
    align: Align, other: dict[str, Any], module: str, cause: str
) -> None:
    found = held(align, kept(other))
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.module) == (stages.REFERENCE, module), found.sentence
    assert found.cause is not None
    assert (found.cause.class_, found.cause.known) == (cause, "observed")
    assert other["name"] in found.cause.statement
    said = item(found)
    assert said is not None and said.state == "caveat"


def test_another_device_s_power_is_no_fault(align: Align) -> None:
    near = np.nextafter(RATES, np.float32(2))
    assert held(align, kept(record(ROTARY, near))).verdict == "aligned"


def test_a_format_that_holds_the_same_numbers_is_said_and_no_divergence(align: Align) -> None:
    ones = record(NORM, np.ones(24, dtype=np.float32))
    shorter = record(NORM, np.ones(24, dtype=np.float32), "torch.bfloat16", digest="sha256:0")
    found = held(align, kept(shorter), kept(ones))
    said = item(found)
    assert found.verdict == "aligned" and said is not None and said.state == "caveat"
    assert "bfloat16" in said.evidence


def test_what_nothing_measures_is_said(align: Align) -> None:
    masks = [record(ATTENTION, np.where(MASK, 0.0, low).astype(np.float32)) for low in
             (-np.inf, -1e9)]  # fmt: skip
    found = held(align, kept(masks[1]), kept(masks[0]))
    said = item(found)
    assert found.verdict == "aligned" and said is not None
    assert "nothing says by how much" in said.evidence


def test_what_a_step_changes_is_held_as_its_model_first_enters(align: Align) -> None:
    late = record(NORM, STATISTICS * np.float32(1.5))
    benchmark = kept(record(NORM, STATISTICS * np.float32(1.4)), at=(stages.ACTOR_UPDATE,))
    assert held(align, kept(late, at=(stages.ACTOR_UPDATE,)), benchmark).verdict == "aligned"
    # what stays on both sides is held in every stage
    found = held(align, kept(late, at=(stages.LOG_PROB, stages.ACTOR_UPDATE)))
    assert found.first is not None and found.first.stage == stages.LOG_PROB, found.sentence


@pytest.mark.parametrize(
    "other",
    every_second(
        [
            record(NORM, STATISTICS * np.float32(1.5)),
            record(ROTARY, RATES * np.float32(0.5)),
            record(ATTENTION, np.tril(MASK, -1)),
        ]
    ),
)
@pytest.mark.parametrize("side", ["target", "benchmark"])
def test_what_changes_on_one_side_alone_is_found_in_its_stage(
    align: Align, other: dict[str, Any], side: str
) -> None:
    changed = kept(other, at=(stages.ACTOR_UPDATE,))
    found = held(align, *((changed, kept()) if side == "target" else (kept(), changed)))
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert found.first.stage == stages.ACTOR_UPDATE
    assert found.first.module == other["name"].rpartition(".")[0]


def without(name: str) -> dict[str, Any]:
    rest = kept()
    rest["buffers"] = {
        at: [one for one in own if one["name"] != name] for at, own in rest["buffers"].items()
    }
    return rest


ALONE = f"{NORM} is kept on the target alone"


@pytest.mark.parametrize(
    ("target", "benchmark", "said"),
    [
        (without(ROTARY), kept(), f"{ROTARY} is kept on the benchmark alone"),
        (kept(), without(NORM), ALONE),
        (kept(record(ATTENTION, np.tril(np.ones((9, 9), dtype=bool)))), kept(),
         f"{ATTENTION} has the shape [9, 9] on the target instead of [8, 8]"),
        (kept(record(NORM, STATISTICS) | {"norm": 9.0}), kept(),
         f"{NORM} has one digest and other numbers"),
        (kept(record(ROTARY, RATES) | {"sketch": None}), kept(),
         f"{ROTARY} has one digest and other numbers"),
        ({"buffers": {}}, kept(), "no buffers were recorded on the target"),
        (kept(backend="megatron"), without(NORM) | {"backend": "fsdp2"}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_said(
    align: Align, target: dict[str, Any], benchmark: dict[str, Any], said: str | None
) -> None:
    found = held(align, target, benchmark)
    at = item(found)
    assert found.verdict == "aligned", found.sentence
    if said is None:
        assert at is None or "alone" not in at.evidence
    else:
        assert at is not None and at.state == "caveat" and said in at.evidence


def test_a_record_of_another_module_that_parts_before_is_the_first(align: Align) -> None:
    other = kept(record("model.norm.running_var", STATISTICS * 2))
    benchmark = kept(record("model.norm.running_var", STATISTICS))
    found = held(align, {**other, **EPSILON.faults}, benchmark)
    assert found.first is not None and found.first.module != "model.norm", found.sentence


@pytest.mark.parametrize(("logical", "verdict"), [(True, "diverged"), (False, "aligned")])
def test_between_unlike_back_ends_only_the_model_s_own_is_held(
    align: Align, logical: bool, verdict: str
) -> None:
    other = record(ROTARY, in_bf16(RATES), "torch.bfloat16", logical=logical)
    found = held(align, kept(other, backend="megatron"), kept(backend="fsdp"))
    assert found.verdict == verdict, found.sentence
