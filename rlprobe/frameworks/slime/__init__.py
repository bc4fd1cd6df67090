"""slime: hooks, recorded rollouts, key data, launch, and the SGLang side.

``activate`` is the one way in, by ``RLPROBE_CONFIG`` and the ``.pth`` file, in every process: the
driver, Ray's workers and the inference servers they spawn. It registers what to do when slime's
modules are imported and imports none of them. msprobe's own ``config.json`` additionally needs
``DUMP_ON=1``; without it nothing is registered and training is untouched.
"""

from __future__ import annotations

import os

_active = False


def activate() -> None:
    """Register the hooks in this process (idempotent)."""
    global _active
    from rlprobe.frameworks import forward, prompts
    from rlprobe.frameworks.slime import control, hooks

    if _active or not (control.switched_on(os.environ) or prompts.wanted(os.environ)):
        return
    _active = True
    hooks.register()
    forward.register()
