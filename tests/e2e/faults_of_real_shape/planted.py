"""What is planted at a real shape: a benign change, and a fault forward and one backward.

All of the target computes its products in halves: this file is loaded before its first stage, and
a fault is in effect in its own stage alone. Without that the stages of one run would have unlike
kernels, and what an update was given would part from what it computes itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlprobe.faults.patching import gradient_through, linear_in_halves, swapped
from rlprobe.selftest import Site, benign, fault

NORM, PROJECTION = "model.layers.17.post_attention_layernorm", "model.layers.11.mlp.down_proj"
_HALVES = linear_in_halves()
_HALVES.__enter__()


@benign()
def products_in_halves(site: Site) -> Iterator[None]:
    yield


@fault(stage="actor_compute_log_prob", module=NORM, cause="hyperparameter")
def epsilon_deep(site: Site) -> Iterator[None]:
    """An epsilon of four times the mean square in layer 17, some 480 there.

    Less is below the floor: of a norm so deep in 16 bits it is 0.36, and correct devices were at
    0.07.
    """
    layer = site.model.get_submodule(NORM)
    with swapped(layer, "variance_epsilon", 2e3):
        yield


@fault(stage="actor_update", module=PROJECTION, cause="constant_factor")
def gradient_half(site: Site) -> Iterator[None]:
    """A linear layer passes on half of its gradient."""
    module = site.model.get_submodule(PROJECTION)
    with gradient_through(module, lambda gradient: gradient * 0.5):
        yield
