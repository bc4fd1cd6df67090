"""Advantages keep their mean: a whitening that only scales."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause="data")
def advantages_not_centred(site: Site) -> Iterator[None]:
    advantages = site.batch["advantages"]
    flat = advantages.values() if advantages.is_nested else advantages
    flat.add_(0.3 * site.strength)
    yield
