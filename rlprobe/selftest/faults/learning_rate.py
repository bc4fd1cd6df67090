"""The critic learns five per cent too fast: a schedule that is off by one."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("optimizer", "hyperparameter", "constant_factor"))
def learning_rate(site: Site) -> Iterator[None]:
    groups = site.optimizer.param_groups
    kept = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * (1 + 0.05 * site.strength)
    yield
    for group, rate in zip(groups, kept, strict=True):
        group["lr"] = rate
