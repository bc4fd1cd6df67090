"""A module that still computes with the weights of before an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from rlprobe.refine import stale
from rlprobe.refine.trace import Argument, Operator, Value
from rlprobe.spec import Suspects

MODULE = "model.layers.1.mlp.down_proj"
OLD, NEW, OTHER = ("ab" * 32, "cd" * 32, "ef" * 32)


def suspects(module: str | None = MODULE) -> Suspects:
    return Suspects("actor_update", 0, 0, (MODULE,), (2,), "r", trace="module", trace_module=module)


def traced(*digests: str, name: str = "weight") -> Any:
    """Operators that are given the module's weight, one after the other."""
    ops = [
        Operator(n, "aten::t", arguments=[Argument("self", tensors=[
            Value(origin=name, digest=digest[:32]), Value(digest="12" * 16), Value(origin="input")
        ])])
        for n, digest in enumerate(digests)
    ]  # fmt: skip
    return SimpleNamespace(operators=ops)


def run(
    digest: str | None, stage: str = "actor_update", rank: int = 0, leaf: str = "weight"
) -> Any:
    table = pl.DataFrame(
        {"stage": [stage], "step": [0], "rank": [rank], "name": [f"{MODULE}.{leaf}"],
         "digest": [f"sha256:{digest}"]}
    )  # fmt: skip
    return SimpleNamespace(weights=lambda: None if digest is None else table)


@pytest.mark.parametrize(
    ("benchmark", "target", "begun", "said"),
    [
        (NEW, OLD, OLD, "on the target alone"),
        (OLD, NEW, OLD, "on the benchmark alone"),
        (NEW, OTHER, OLD, None),  # other weights, and no older ones
        (OLD, OLD, OLD, None),  # before any update
        (NEW, OLD, NEW, "on the benchmark alone"),
        (NEW, OLD, None, None),  # nobody recorded what it began with
    ],
)
def test_a_side_that_still_has_the_first_weights_is_named(
    benchmark: str, target: str, begun: str | None, said: str | None
) -> None:
    found = stale.found((traced(benchmark), traced(target)), (run(begun), run(begun)), suspects())
    assert (found is None) if said is None else (found is not None and found.endswith(said))


def test_what_it_was_given_last_counts() -> None:
    both = traced(OLD, NEW), traced(OLD, OLD)
    found = stale.found(both, (run(OLD), run(OLD)), suspects())
    assert found is not None and found.startswith("weight is still what it was")


@pytest.mark.parametrize(
    "sides",
    [
        (run(OLD, stage="critic_update"), run(OLD, stage="critic_update")),
        (run(OLD, rank=1), run(OLD, rank=1)),
        (run(OLD, leaf="bias"), run(OLD, leaf="bias")),
    ],
    ids=["another stage", "another rank", "another parameter"],
)
def test_other_weights_say_nothing_of_it(sides: Any) -> None:
    assert stale.found((traced(NEW), traced(OLD)), sides, suspects()) is None
    assert stale.found((traced(NEW), traced(OLD)), (run(OLD), run(OLD)), suspects(None)) is None
