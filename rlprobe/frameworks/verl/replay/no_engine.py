"""The rollout engine of a replay: there is none.

verl builds a replica and a worker-side adapter for every rollout engine; these start nothing and
copy no weights, so a replay costs neither an inference engine's memory nor its start-up.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica


class NoEngineReplica(RolloutReplica):
    """A replica without servers."""

    async def launch_servers(self) -> None:
        self.servers: list[Any] = []
        self._server_handle = None
        self._server_address = f"replay://{self.replica_rank}"


class NoEngineAdapter(BaseRollout):
    """The training worker's side: accepts weights and drops them unread."""

    async def resume(self, tags: Any) -> None:
        """Nothing to wake."""

    async def release(self) -> None:
        """Nothing to free."""

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        """The generator is not consumed on any rank, so no collective runs."""
