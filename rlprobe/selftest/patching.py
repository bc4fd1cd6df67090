"""Where fault files find :mod:`rlprobe.faults.patching`, which was here once.

Fault files are users' own, and those written for an earlier version have this name in them.
"""

from rlprobe.faults.patching import attention_of, blended, gradient_through, output_of, swapped

__all__ = ["attention_of", "blended", "gradient_through", "output_of", "swapped"]
