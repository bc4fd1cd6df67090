"""Which slime the stand-in imitates."""

import os


def is_old() -> bool:
    """As v0.2.2: no rollout is spared old_log_prob, and samples have no teacher."""
    return os.environ.get("STANDIN_SLIME") == "0.2.2"
