"""The disturbances of ``harms.py`` on real verl, where ``answers.yaml`` places them.

Those by chance draw of a generator that no seed of a run brings back. None has a strength between.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from rlprobe.faults.patching import gradient_through, output_of, swapped
from rlprobe.selftest import Site, fault

_THIRD = Path(__file__).parents[1]
sys.path.insert(0, str(_THIRD))
try:
    from harms import HARMS
finally:
    sys.path.remove(str(_THIRD))


class _Disturbed(torch.autograd.Function):
    """Other numbers forward, the same gradient backward."""

    @staticmethod
    def forward(ctx, x, change):
        return change(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _on_tensors(name: str) -> Callable[[Any], Any]:
    harm = HARMS[name](np.random.default_rng())

    def change(x: Any) -> Any:
        return torch.from_numpy(np.asarray(harm(x.detach().double().numpy()))).to(x.dtype)

    return change


@contextlib.contextmanager
def _weight_gradient(linear: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    def forward(x):
        weight = linear.weight.view_as(linear.weight)
        if weight.requires_grad:
            weight.register_hook(change)
        return torch.nn.functional.linear(x, weight, linear.bias)

    with swapped(linear, "forward", forward):
        yield


def _log_probs(change: Callable[[Any], Any]) -> Any:
    from verl.workers.engine.fsdp import transformer_impl

    right = transformer_impl.logprobs_from_logits
    wrong = lambda **given: change(right(**given))  # noqa: E731
    return swapped(transformer_impl, "logprobs_from_logits", wrong)


def _planted(site: Site, words: str, change: Callable[[Any], Any]) -> Any:
    """Disturb what the words of ``Device.faults`` name."""
    if words == "answers":
        return _log_probs(change)
    what, _, path = words.rpartition(" ")
    module = site.model.get_submodule(path.removesuffix(".weight"))
    if what == "output":
        return output_of(module, lambda output: _Disturbed.apply(output, change))
    return {"backward": gradient_through, "weight gradient": _weight_gradient}[what](module, change)


def declared(name: str, answer: dict[str, Any]) -> Callable[[Site], Iterator[None]]:
    """The fault of one answer."""

    def plant(site: Site) -> Iterator[None]:
        with _planted(site, answer["at"], _on_tensors(name)):
            yield

    plant.__name__ = name
    declare = fault(stage=answer["stage"], module=answer["modules"][0], cause=answer["cause"])
    return declare(plant)


globals().update(
    (name, declared(name, answer))
    for name, answer in yaml.safe_load((_THIRD / "answers.yaml").read_text(encoding="utf-8"))[
        "lawless"
    ].items()
)
