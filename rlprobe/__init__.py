"""rlprobe: run the same reinforcement-learning steps on two devices and say where they part."""

__version__ = "0.1.0"
