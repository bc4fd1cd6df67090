"""Recorded rollouts: what generation produced, kept without pickle and checked when read.

Imports numpy, h5py and the standard library only: it runs inside the vendors' images.
"""

from rlprobe.rollouts.digest import prompt_digest, prompt_identity, response_digest, sample_digest
from rlprobe.rollouts.model import Ragged, Rollouts, Sample, sample_ids

__all__ = [
    "Ragged",
    "Rollouts",
    "Sample",
    "prompt_digest",
    "prompt_identity",
    "response_digest",
    "sample_digest",
    "sample_ids",
]
