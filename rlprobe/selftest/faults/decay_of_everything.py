"""Weight decay of 10 instead of 0.01."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("optimizer", "hyperparameter"))
def decay_of_everything(site: Site) -> Iterator[None]:
    groups = site.optimizer.param_groups
    kept = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = group["weight_decay"] + 10 * site.strength
    yield
    for group, decay in zip(groups, kept, strict=True):
        group["weight_decay"] = decay
