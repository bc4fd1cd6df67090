"""Where a run's debug rollout files lie, for the launch and for the rollout manager."""

from __future__ import annotations

from pathlib import Path

#: What a collecting run saves, until it has become rollouts of ours.
RECORDED = "debug_rollouts"
#: What a replay loads, written from recorded rollouts.
REPLAYED = "replayed_rollouts"


def template(side: Path, kind: str) -> str:
    """The path that slime's flags are given; slime puts the rollout's number into it."""
    return str(side / kind / "{rollout_id}.pt")
