"""Why two devices part: a class of a closed list, with its evidence."""

from rlprobe.diagnose.cause.classify import classify

__all__ = ["classify"]
