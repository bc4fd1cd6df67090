"""Are a module's outputs kept, and given out in place of another's own?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlprobe.capture.trace import outputs


class Pair(nn.Module):
    """A module with two outputs, a nest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.inner(x)
        return y, {"more": y * 2}


class Model(nn.Module):
    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.pair, self.last = nn.Linear(4, 4), Pair(), nn.Linear(4, 4)
        self.wrong = wrong
        self.pair.register_forward_hook(lambda m, a, out: (out[0] * wrong, out[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, more = self.pair(self.first(x))
        found: torch.Tensor = self.last(y + more["more"])
        return found


X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))


def kept(tmp_path: Path, budget: int | None = None) -> Path:
    for part in (X[:2], X[2:]):  # two entries of a stage, as many calls
        with outputs.keeping([Model()], "pair", tmp_path / "b", budget):
            pass
        model = Model()
        with outputs.keeping([model], "pair", tmp_path / "b", budget):
            for row in part:
                model(row)
    return tmp_path / "b" / outputs.DIRECTORY


def report(tmp_path: Path) -> list[Any]:
    path = tmp_path / "t" / outputs.DIRECTORY / outputs.REPORT
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_after_it_computes_as_the_other_side_did(tmp_path: Path) -> None:
    source = kept(tmp_path)
    right, wrong = Model(), Model(wrong=1.5)
    assert not torch.equal(wrong(X[0]), right(X[0]))
    for rows in (X[:1], X[1:]):
        with outputs.substituting([wrong], "pair", source, tmp_path / "t"):
            for row in rows:
                assert torch.equal(wrong(row), right(row))
    assert [(line["calls"], line["failed"]) for line in report(tmp_path)] == [(1, []), (2, [])]
    # of its two outputs one is half as large again
    assert [line["apart"] for line in report(tmp_path)] == pytest.approx([0.5, 0.5])
    assert not torch.equal(wrong(X[0]), right(X[0])), "it ends with the body"


def test_gradients_pass_to_the_modules_own_output(tmp_path: Path) -> None:
    source = kept(tmp_path)
    gradients = []
    for model, inside in ((Model(), False), (Model(wrong=1.0), True)):
        if inside:
            with outputs.substituting([model], "pair", source, tmp_path / "t"):
                model(X[0]).sum().backward()
        else:
            model(X[0]).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(
    ("rows", "said"),
    [(torch.cat([X, X[:1]]), "call 3, output 0: the benchmark's was not kept"),
     (X[:, :2], "[2, 4] here, torch.float32 [5, 4] on the benchmark"),
     (X.double(), "torch.float64 [5, 4] here")],
)  # fmt: skip
def test_what_does_not_fit_is_left_as_it_is_and_said(
    tmp_path: Path, rows: torch.Tensor, said: str
) -> None:
    source = kept(tmp_path)
    model = Model(wrong=1.5).to(rows.dtype)
    plain = Model(wrong=1.5).to(rows.dtype)
    with outputs.substituting([model], "pair", source, tmp_path / "t"):
        last = [model(row) for row in rows][-1]
    assert torch.equal(last, plain(rows[-1]))
    assert said in report(tmp_path)[0]["failed"][0]


def test_a_budget_leaves_the_rest_out(tmp_path: Path) -> None:
    source = kept(tmp_path, budget=5 * 4 * 4 * 2)
    model = Model(wrong=1.5)
    with outputs.substituting([model], "pair", source, tmp_path / "t"):
        for row in X:
            model(row)
    found = report(tmp_path)[0]
    # of each entry, the first call's
    assert found["calls"] == 2 and "call 1, output 0: the benchmark's did" in found["failed"][0]


def test_recomputed_activations_are_said(tmp_path: Path) -> None:
    source = kept(tmp_path)
    model = Model(wrong=1.5)
    with outputs.substituting([model], "pair", source, tmp_path / "t"):
        made = checkpoint(model, X[0].requires_grad_(), use_reentrant=False)
        assert made is not None
        made.sum().backward()
    assert "recomputed" in report(tmp_path)[0]["failed"][0]


def test_numbers_of_every_format_come_back_as_they_were(tmp_path: Path) -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = Same()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.same(x)
            return found

    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64, torch.int64)):
        x = (100 * X[0]).to(dtype)
        where = tmp_path / str(number)
        with outputs.keeping([Model()], "same", where, None):
            pass
        model = Model()
        with outputs.keeping([model], "same", where, None):
            model(x)
        with outputs.substituting([model], "same", where / outputs.DIRECTORY, tmp_path / "t"):
            again = model(torch.zeros_like(x))
        (tmp_path / "t" / outputs.DIRECTORY / outputs.REPORT).unlink()
        assert torch.equal(again, x) and again.dtype == dtype
