"""AdamW updates one tensor after the other instead of all at once."""

from collections.abc import Iterator

from rlprobe.selftest import Site, benign


@benign()
def optimizer_one_by_one(site: Site) -> Iterator[None]:
    groups = site.optimizer.param_groups if site.optimizer is not None else []
    kept = [group["foreach"] for group in groups]
    for group in groups:
        group["foreach"] = False
    yield
    for group, value in zip(groups, kept, strict=True):
        group["foreach"] = value
