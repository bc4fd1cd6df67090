"""One sample's returns are off by a constant (a reward counted twice)."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause="data")
def returns_of_one_sample_off(site: Site) -> Iterator[None]:
    returns = site.batch["returns"]
    rows = returns.unbind()
    rows[2].add_(0.5 * site.strength)
    yield
