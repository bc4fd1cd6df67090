"""Experts run one by one on the tokens that chose them, instead of all at once on sorted tokens."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"model": "moe"})
def experts_one_by_one(site: Site) -> Iterator[None]:
    config = site.model.config
    if not hasattr(config, "num_experts"):  # the critic's
        yield
        return
    with swapped(config, "_experts_implementation", "eager"):
        yield
