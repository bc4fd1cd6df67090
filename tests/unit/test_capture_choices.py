"""What a router chose, told by whatever it gives: ids, a map, or scores alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.choices import Routing
from rlprobe.capture.light.token_sketches import TokenSketches
from rlprobe.sketch import CHOSEN

EXPERTS, EACH, TOKENS = 60, 4, 50
PATH = "model.layers.0.mlp.gate"
SCORES = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
IDS = SCORES.topk(EACH, dim=-1).indices


def routing(**config: object) -> Routing | None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(num_experts=EXPERTS, num_experts_per_tok=EACH, **config)
    return Routing.of([model])


def chosen(output: object, path: str = PATH, **config: object) -> Tensor | None:
    found = routing(**config)
    assert found is not None
    return found.chosen(path, nn.Linear(2, 2), output)


def as_map(ids: Tensor) -> Tensor:
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)


def test_a_choice_is_the_same_however_it_is_told() -> None:
    told = [
        chosen((SCORES, SCORES.topk(EACH).values, IDS)),  # a training model of today
        chosen((SCORES, None)),  # an engine's gate
        chosen(SCORES.view(2, 25, EXPERTS)),
        chosen((torch.rand(TOKENS, EXPERTS), as_map(IDS))),  # Megatron's router
        chosen((SCORES, IDS.flip(-1).to(torch.int32))),  # in another order
    ]
    for one in told:
        assert one is not None and one.shape == (TOKENS, 17)
        assert torch.equal(one, told[0])  # type: ignore[arg-type]


def test_another_choice_is_another_number_for_that_token_alone() -> None:
    own = chosen((SCORES, IDS))
    for token in range(TOKENS):
        for slot in range(EACH):
            other = IDS.clone()
            free = next(e for e in range(token, token + EXPERTS) if e % EXPERTS not in IDS[token])
            other[token, slot] = free % EXPERTS
            differ = (chosen((SCORES, other)) != own).any(-1)  # type: ignore[operator, union-attr]
            assert differ.nonzero().flatten().tolist() == [token]


@pytest.mark.parametrize(
    "path", ["model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.gate_proj", "lm_head"]
)
def test_what_is_no_router_chooses_nothing(path: str) -> None:
    assert chosen((SCORES, None), path) is None


def test_scores_that_do_not_say_the_choice_are_not_taken_for_it() -> None:
    assert chosen((SCORES, None), n_group=8) is None
    found, biased = routing(), nn.Linear(2, 2)
    biased.e_score_correction_bias = nn.Parameter(torch.zeros(EXPERTS))
    assert found is not None and found.chosen(PATH, biased, (SCORES, None)) is None
    # but what is said is
    assert found.chosen(PATH, biased, (SCORES, IDS)) is not None


def test_a_dense_model_has_no_routing() -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(num_attention_heads=4)
    assert Routing.of([model]) is None and Routing.of([nn.Linear(2, 2)]) is None


def test_choices_lie_where_the_blocks_tokens_do(tmp_path: Path) -> None:
    context = StageContext("actor_compute_log_prob", 0, 0, tmp_path)
    written = TokenSketches(tmp_path, context, 1 << 20)
    codes = chosen((SCORES, IDS))
    assert codes is not None
    written.add_choice(f"Module.{PATH}.Gate.forward.0{CHOSEN}", 3, codes)
    written.add("Module.model.layers.0.Block.forward.0.output.0", 3, torch.randn(2, 25, 8))
    written.add_choice(f"Module.{PATH}.Gate.forward.1{CHOSEN}", 4, codes)  # no such tokens
    written.publish()
    with np.load(written.path, allow_pickle=False) as arrays:
        names, mine = arrays["names"], arrays["name"] == 1
        assert names[1].endswith(CHOSEN) and mine.sum() == TOKENS
        assert arrays["sample"][mine].tolist() == [0] * 25 + [1] * 25
        assert arrays["token"][mine].tolist() == [*range(25), *range(25)]
        assert np.array_equal(arrays["sketch"][mine], codes.numpy())
        assert arrays["left_out"] == TOKENS
