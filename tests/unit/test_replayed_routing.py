"""Tokens are sent to the experts that another run chose."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe.capture.recorder import Recorder
from rlprobe.dumps import routing as tables
from rlprobe.errors import ReplayError
from tests.unit.capture_helpers import UPDATE, session

EXPERTS, WIDTH, EACH = 6, 8, 2
SAMPLES = [np.random.default_rng(length).integers(1, 40, length) for length in (5, 9, 4)]


class Router(nn.Module):
    """As transformers' are: scores, weights of the chosen, the chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, chosen = torch.topk(torch.softmax(logits, -1), EACH, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class MapRouter(Router):
    """As Megatron's are: a weight for every expert, and which are chosen."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = hidden @ self.weight.T
        weights, chosen = logits.topk(EACH, dim=1)
        every = torch.zeros_like(logits).scatter(1, chosen, torch.softmax(weights, -1))
        return every, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class Fused(Router):
    """Chooses in a kernel of its own."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.softmax(hidden @ self.weight.T, -1)
        order = scores.argsort(-1, descending=True)[:, :EACH]
        return scores, scores.gather(1, order), order


class Layer(nn.Module):
    def __init__(self, router: type[Router]) -> None:
        super().__init__()
        self.gate = router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, WIDTH)
        *_, weights, chosen = self.gate(flat)
        if chosen.dtype == torch.bool:
            every = weights
        else:
            every = torch.zeros(len(flat), EXPERTS).scatter(1, chosen, weights)
        result = torch.einsum("te,tw,ewv->tv", every, flat, self.experts)
        return hidden + result.reshape(hidden.shape)


class Model(nn.Module):
    def __init__(self, router: type[Router]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList([Layer(router), Layer(router)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def batch(rows: list[int], width: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, number in enumerate(rows):
        own = SAMPLES[number]
        ids[row, width - len(own) :], mask[row, width - len(own) :] = torch.from_numpy(own), 1
    return ids, mask


def trained(
    root: Path,
    batches: list[tuple[Tensor, Tensor]],
    router: type[Router] = Router,
    recorded: Path | None = None,
    moved: float = 0.0,
) -> tuple[Any, list[Tensor], Model]:
    """Chosen experts, outputs (tokens only) and the model after one backward pass."""
    model = Model(router)
    with torch.no_grad():
        for layer in model.layers:
            # another device, so to speak, whose routers decide otherwise
            layer.gate.weight += moved * torch.randn(EXPERTS, WIDTH)
    told = dataclasses.replace(session(root), routing=None if recorded is None else str(recorded))
    capture = Recorder(told, role="actor", rank=0, world_size=1)
    outputs = []
    with capture.stage(UPDATE, 0, 1, model) as scope:
        for number, (ids, mask) in enumerate(batches):
            scope.micro_step(number)
            output = model(ids, mask)[mask.bool()]
            output.square().sum().backward()
            outputs.append(output.detach())
    table = tables.read(root / "side", {UPDATE}).get(UPDATE)
    return table, outputs, model


WHOLE = [batch([0, 1, 2], 9)]
#: The same samples, in other micro-batches, order and padding.
OTHERWISE = [batch([2, 1], 12), batch([0], 5)]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("benchmark")
    trained(root, WHOLE)
    directory = root / "side" / "routing"
    shutil.copy(directory / f"{UPDATE}-step0-rank0.npz", directory / f"{UPDATE}-step0.npz")
    return directory


def chosen(table: Any) -> dict[tuple[str, int], list[int]]:
    columns = ("module", "token", "chosen")
    return {(m, t): c for m, t, c in table.select(columns).iter_rows()}


def test_choices_are_recorded_by_token_in_any_layout(benchmark: Path, tmp_path: Path) -> None:
    first, _, _ = trained(tmp_path / "1", WHOLE)
    other, _, _ = trained(tmp_path / "2", OTHERWISE)
    mapped, _, _ = trained(tmp_path / "3", OTHERWISE, MapRouter)
    assert len(chosen(first)) == 2 * 18 and set(first["module"]) == {"layers.0.gate",
                                                                     "layers.1.gate"}  # fmt: skip
    assert chosen(first) == chosen(other)
    assert set(first["experts"]) == {EXPERTS}
    # the first router sees the same numbers in either kind
    assert {k: v for k, v in chosen(first).items() if k[0] == "layers.0.gate"} == {
        k: v for k, v in chosen(mapped).items() if k[0] == "layers.0.gate"
    }


@pytest.mark.parametrize("batches", [WHOLE, OTHERWISE], ids=["alike", "otherwise"])
def test_replaying_its_own_choices_changes_no_bit(
    batches: Any, benchmark: Path, tmp_path: Path
) -> None:
    _, plain, one = trained(tmp_path / "1", batches)
    _, replayed, two = trained(tmp_path / "2", batches, recorded=benchmark)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    for name, parameter in one.named_parameters():
        other = dict(two.named_parameters())[name]
        assert torch.equal(parameter.grad, other.grad), name  # type: ignore[arg-type]
    for layer in two.layers:
        assert not layer.gate._forward_hooks and not layer.gate._forward_pre_hooks


@pytest.mark.parametrize("router", [Router, MapRouter])
def test_tokens_go_where_the_benchmark_sent_them(
    router: type[Router], benchmark: Path, tmp_path: Path
) -> None:
    table = tables.part(benchmark / f"{UPDATE}-step0-rank0.npz", 0, 0)
    wanted = chosen(table)
    own, plain, _ = trained(tmp_path / "1", OTHERWISE, router, moved=0.3)
    sent: dict[str, list[Any]] = {}

    def seen(module: nn.Module, args: Any, output: Any, path: str) -> None:
        sent.setdefault(path, []).append(output[-1].detach().clone())

    register = nn.Module.register_forward_hook
    model_of = Model.__init__

    def watched(self: Model, kind: type[Router]) -> None:
        model_of(self, kind)
        for number, layer in enumerate(self.layers):
            path = f"layers.{number}.gate"
            register(layer.gate, lambda m, a, o, path=path: seen(m, a, o, path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "__init__", watched)
        kept, outputs, _ = trained(tmp_path / "2", OTHERWISE, router, benchmark, moved=0.3)
    mine = {key for key in wanted if chosen(own)[key] != wanted[key]}
    assert 0.02 < len(mine) / len(wanted) < 0.9
    # every token was sent to the recorded experts
    actual = [
        sorted(map(int, row.nonzero()[:, 0] if row.dtype == torch.bool else row))
        for layer in ("layers.0.gate", "layers.1.gate")
        for ids, mask, part in zip(*zip(*OTHERWISE, strict=True), sent[layer], strict=True)
        for row in part[mask.reshape(-1).bool()]
    ]
    order = tables.part(tmp_path / "2" / "side" / "routing" / f"{UPDATE}-step0-rank0.npz", 0, 0)
    keys = sorted(chosen(order), key=lambda key: key[0])
    expected = [wanted[key] for key in keys]
    assert sorted(actual) == sorted(expected) and len(actual) == len(expected)
    # what is recorded is what they would have chosen themselves: in the first layer as without
    first = {key for key in wanted if key[0] == "layers.0.gate"}
    assert {key: chosen(kept)[key] for key in first} == {key: chosen(own)[key] for key in first}
    assert any(not torch.equal(a, b) for a, b in zip(plain, outputs, strict=True))


def test_a_router_that_does_not_choose_by_topk_is_refused(benchmark: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"layers.0.gate .Fused. does not choose by torch.topk"):
        trained(tmp_path, WHOLE, Fused, benchmark)


def test_damaged_choices_are_refused_in_a_sentence(tmp_path: Path) -> None:
    directory = tmp_path / "routing"
    directory.mkdir()
    (directory / f"{UPDATE}-step0.npz").write_bytes(b"nothing")
    with pytest.raises(ReplayError, match="routing is to be replayed"):
        trained(tmp_path / "run", WHOLE, recorded=directory)
