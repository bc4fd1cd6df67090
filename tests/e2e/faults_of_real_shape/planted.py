"""What is planted at a real shape: a benign change, and a fault forward and one backward."""

from __future__ import annotations

from collections.abc import Iterator

from rlprobe.faults.patching import gradient_through, linear_in_halves, swapped
from rlprobe.selftest import Site, benign, fault

NORM, PROJECTION = "model.layers.17.post_attention_layernorm", "model.layers.11.mlp.down_proj"


@benign()
def products_in_halves(site: Site) -> Iterator[None]:
    with linear_in_halves():
        yield


@fault(stage="actor_compute_log_prob", module=NORM, cause="hyperparameter")
def epsilon_deep(site: Site) -> Iterator[None]:
    """An epsilon of 1e-2 for 1e-6 in layer 17, which adds a few per cent to a mean square of 1."""
    layer = site.model.get_submodule(NORM)
    with linear_in_halves(), swapped(layer, "variance_epsilon", 1e-2):
        yield


@fault(stage="actor_update", module=PROJECTION, cause="constant_factor")
def gradient_half(site: Site) -> Iterator[None]:
    """A linear layer passes on half of its gradient."""
    module = site.model.get_submodule(PROJECTION)
    with linear_in_halves(), gradient_through(module, lambda gradient: gradient * 0.5):
        yield
