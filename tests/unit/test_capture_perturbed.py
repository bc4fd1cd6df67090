"""Are a perturbed control's weights disturbed in the last bit, everywhere, and always alike?"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlprobe.capture import perturbed

torch = pytest.importorskip("torch")


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
    made.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    return made


def weights(module: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 23), ("bf16", 7), ("fp16", 10)])
def test_every_weight_moves_by_its_last_bit_and_zeros_stay(precision: str, bits: int) -> None:
    made = model()
    before = weights(made)
    moved = perturbed.disturb(made, 1, precision)
    assert moved == sum(int((v != 0).sum()) for v in before.values())
    for name, new in weights(made).items():
        old = before[name]
        relative = ((new - old) / old)[old != 0]
        assert torch.allclose(relative.abs(), torch.full_like(relative, 2.0**-bits), rtol=0.51)
        assert (new[old == 0] == 0).all()
        if old.numel() > 64:
            assert 0.3 < float((relative > 0).float().mean()) < 0.7, "up and down by chance"


def test_replicas_move_alike_and_another_control_otherwise() -> None:
    one, replica, other = model(), model(), model()
    for made, number in ((one, 1), (replica, 1), (other, 2)):
        perturbed.disturb([made], number, "fp32")
    for name, value in weights(one).items():
        assert torch.equal(value, weights(replica)[name])
    assert not torch.equal(weights(one)["0.weight"], weights(other)["0.weight"])


def test_an_optimizer_that_keeps_copies_takes_the_new_weights() -> None:
    made = model().to(torch.bfloat16)

    class Optimizer:
        taken: dict[str, Any] | None = None

        def reload_model_params(self) -> None:
            self.taken = copy.deepcopy(weights(made))

    optimizer, before = Optimizer(), weights(made)
    assert perturbed.disturb(made, 1, "bf16", optimizer)
    assert optimizer.taken is not None
    assert not torch.equal(optimizer.taken["0.weight"], before["0.weight"])
    assert torch.equal(optimizer.taken["0.weight"], weights(made)["0.weight"])
