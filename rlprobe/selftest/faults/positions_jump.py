"""From the 20th token on, rotary positions are one too large (a cache that was counted twice)."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.rotary_emb"


@fault(stage="critic_update", module=PATH, cause="position")
def positions_jump(site: Site) -> Iterator[None]:
    rotary = site.model.get_submodule(PATH)
    right = rotary.forward

    def forward(x, position_ids):
        late = (position_ids >= 20).float()
        return right(x, position_ids.float() + site.strength * late)

    with swapped(rotary, "forward", forward):
        yield
