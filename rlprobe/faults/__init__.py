"""Declaring faults and benign changes, and planting them in a run.

    from rlprobe.faults import fault, benign

What trains imports this room and never the self-test.
"""

from rlprobe.faults.declare import Declaration, Site, benign, fault

__all__ = ["Declaration", "Site", "benign", "fault"]
