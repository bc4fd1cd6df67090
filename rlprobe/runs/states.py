"""States of the benchmark that replays begin captured steps from (``controls.rejoin``)."""

from __future__ import annotations

from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.spec import RunSpec
from rlprobe.store import listing
from rlprobe.store.read import STATES, Run


def require(spec: RunSpec, store: Path, *, whole: bool = True) -> None:
    """The benchmark kept a state of every step that a replay is to be joined at.

    Args:
        spec: any run; only a replay that is to be joined needs a state.
        store: where the benchmark's run is.
        whole: that every byte of them is as it was committed, as well.

    Raises:
        StoreError: the run is not there, or kept none of a step; or a file of one was changed.
    """
    if spec.replay_of is None or not spec.joined_steps:
        return
    run = Run.open(store, spec.replay_of)
    kept = run.states
    missing = [str(step) for step in spec.joined_steps if step not in kept]
    if missing:
        raise StoreError(
            f"controls.rejoin: {spec.role} is to begin step {', '.join(missing)} from the state of "
            f"the benchmark's run {spec.replay_of[:12]}, which was collected without: collect it "
            "again with controls.rejoin: true (where it was imported: at its own site, with "
            "`rlprobe run --role benchmark`, then export and import it), or leave rejoin off"
        )
    for step in spec.joined_steps if whole else ():
        # what is wrong in an optimizer's state would show as a divergence of the update
        listing.checked_below(run.path, f"{STATES}/step{step}")
