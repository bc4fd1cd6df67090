"""Entropies are told in bits instead of nats."""

import math
from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", cause="constant_factor")
def entropy_in_bits(site: Site) -> Iterator[None]:
    import verl.utils.torch_functional as functional

    right = functional.entropy_from_logits
    factor = 1 + site.strength * (1 / math.log(2) - 1)

    with swapped(functional, "entropy_from_logits", lambda logits: right(logits) * factor):
        yield
