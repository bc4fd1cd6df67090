"""The recorder of slime's stages: slime's directory names, and steps that may have gaps."""

from __future__ import annotations

from pathlib import Path

from rlprobe.capture.recorder import Recorder
from rlprobe.frameworks.slime import plan


class SlimeRecorder(Recorder):
    """See :class:`rlprobe.capture.recorder.Recorder`."""

    def directory(self, stage: str, step: int) -> Path:
        """``{dump}/{slime's name of the stage}/step{step}/rank{rank}``."""
        own = Path(self.session.dump) / plan.DIRECTORIES[stage]
        return own / f"step{step}" / f"rank{self.rank}"

    def wants(self, stage: str, step: int) -> bool:
        """As the base class; msprobe's configuration may also list single steps."""
        listed = self.session.settings.get("steps")
        return (not listed or step in listed) and super().wants(stage, step)
