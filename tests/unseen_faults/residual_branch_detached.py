"""No gradient flows back through one MLP (a detach too many); forward is right."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp"


@fault(stage="actor_update", module=PATH, cause="implementation")
def residual_branch_detached(site: Site) -> Iterator[None]:
    mlp = site.model.get_submodule(PATH)
    right = mlp.forward

    def forward(x):
        kept = 1 - site.strength
        return right(kept * x + (1 - kept) * x.detach() if kept else x.detach())

    with swapped(mlp, "forward", forward):
        yield
