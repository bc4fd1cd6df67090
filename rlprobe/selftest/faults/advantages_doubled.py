"""The actor is trained on other advantages than were computed."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause="data")
def advantages_doubled(site: Site) -> Iterator[None]:
    advantages = site.batch["advantages"]
    flat = advantages.values() if advantages.is_nested else advantages
    flat.mul_(1 + site.strength)
    yield
