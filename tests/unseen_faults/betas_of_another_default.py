"""The actor's Adam averages gradients with 0.8 instead of 0.9; it shows at the second update."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("optimizer", "hyperparameter"), needs={"updates": 2})
def betas_of_another_default(site: Site) -> Iterator[None]:
    groups = site.optimizer.param_groups
    kept = [group["betas"] for group in groups]
    for group in groups:
        first, second = group["betas"]
        group["betas"] = (first - 0.1 * site.strength, second)
    yield
    for group, betas in zip(groups, kept, strict=True):
        group["betas"] = betas
