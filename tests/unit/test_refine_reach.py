"""Who attends to whom is seen by changing tokens one by one; what only moves them is not it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.refine import experiments, reach  # noqa: E402
from tests.unit.traced import run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[[Tensor], Tensor]
PLACES = torch.arange(7)
CAUSAL = PLACES[:, None] >= PLACES[None]


def attention(seen: Any = CAUSAL, change: Callable[..., Any] = lambda k, v: (k, v)) -> Make:
    """Attention over the tokens that are seen; keys and values as ``change`` makes them."""

    def mixed(y: Tensor) -> Tensor:
        keys, values = change(y, y)
        scores = y @ keys.transpose(-1, -2) / 5
        return torch.softmax(scores.masked_fill(~seen, -1e9), -1) @ values

    return mixed


def rows_joined(y: Tensor) -> Tensor:
    """Samples attend to those before them."""
    flat = y.reshape(1, -1, y.shape[-1])
    places = torch.arange(flat.shape[1])
    return attention(places[:, None] >= places[None])(flat).reshape(y.shape)


def without_last(y: Tensor) -> Tensor:
    """By tiles of keys, the last one of which is not taken."""
    scores = (y @ y.transpose(-1, -2) / 5).masked_fill(~CAUSAL, -1e9)[..., :3]
    return torch.softmax(scores, -1) @ y[:, :3]


KINDS: dict[str, tuple[Make, bool]] = {
    "window": (attention(CAUSAL & (PLACES[:, None] - PLACES[None] < 3)), True),
    "not causal": (attention(torch.ones(7, 7, dtype=torch.bool)), True),
    "rows joined": (rows_joined, True),
    "last tile": (without_last, True),
    "keys a token late": (attention(change=lambda k, v: (k.roll(1, 1), v)), False),
    "values of the next row": (attention(change=lambda k, v: (k, v.roll(1, 0))), False),
    "another scale": (lambda y: attention()(y) * 1.1, False),
    "each to itself": (lambda y: y, True),
    "a token late, nothing first": (
        attention(change=lambda k, v: (torch.cat([0 * k[:, :1], k[:, :-1]], 1), v)),
        False,
    ),
    "by the largest of all": (lambda y: attention()(y / y.abs().max()), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_who_attends_to_whom_is_a_mask_where_it_accounts_for_the_difference(
    tmp_path: Path, name: str
) -> None:
    wrong, is_mask = KINDS[name]
    benchmark, target = (side(tmp_path / n, make) for n, make in (("b", attention()), ("t", wrong)))
    found = experiments.judge(benchmark, target, 1e-6)
    assert found.cause == ("mask" if is_mask else None), found
    if name == "window":
        assert "depend on inputs of tokens" in found.statement
        assert "on the benchmark alone; of the 12 tokens whose outputs do, 12 differ" in (
            found.statement
        )
    if not is_mask:
        assert not any("of the other" in said for said in found.evidence)


def side(root: Path, make: Make) -> experiments.Side:
    found, _ = run(root, wrapped(make))
    held = root.rglob("*.pt")
    kept = {path.name: torch.load(path).double().numpy() for path in held}
    again = found.again
    assert again.reach is not None and again.reach_failed is None
    return experiments.Side(
        again, [kept[v.data] for v in found.outputs], [], reach=kept[again.reach.data]
    )


def test_what_is_run_again_token_by_token_leaves_nothing_behind(tmp_path: Path) -> None:
    _, traced = run(tmp_path / "t", wrapped(attention()))
    _, plain = run(tmp_path / "p", wrapped(attention()), kind=None)
    assert all(torch.equal(traced[name], plain[name]) for name in plain)


def test_nothing_is_told_of_other_tokens() -> None:
    import numpy as np

    one = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 1.0]])
    outputs = np.ones((2, 4)), np.ones((2, 4))
    assert reach.judge(one, one, outputs, 0.0) is None
    assert reach.judge(one, one[:1], outputs, 0.0) is None
    assert reach.judge(one, one * np.array([1, 1, np.nan]), outputs, 0.0) is None
    assert reach.judge(one, one, (np.ones((3, 4)), np.ones((3, 4))), 0.0) is None
