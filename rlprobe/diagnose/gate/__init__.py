"""What must be the same on both sides before numbers can be judged."""

from rlprobe.diagnose.gate.check import Gate, check

__all__ = ["Gate", "check"]
