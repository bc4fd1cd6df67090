"""Adam's epsilon is a thousandth instead of 1e-8."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("optimizer", "hyperparameter"))
def adam_eps(site: Site) -> Iterator[None]:
    groups = site.optimizer.param_groups
    kept = [group["eps"] for group in groups]
    for group in groups:
        group["eps"] = group["eps"] + site.strength * 1e-3
    yield
    for group, eps in zip(groups, kept, strict=True):
        group["eps"] = eps
