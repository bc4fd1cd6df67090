"""VeRL: hooks, replay, launch, and what verl lacks on a CPU.

``activate`` is the one way in: by ``RLPROBE_CONFIG`` and the ``.pth`` file, by
``VERL_USE_EXTERNAL_MODULES=rlprobe.frameworks.verl``, and by verl's ``verl.plugins`` entry points.
It registers what to do when verl's modules are imported and imports none of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_active = False


def activate() -> None:
    """Register the hooks in this process (idempotent)."""
    global _active
    if _active:
        return
    _active = True
    from rlprobe.frameworks import forward
    from rlprobe.frameworks.verl import control, hooks

    os.environ.setdefault(control.DRIVER_DIRECTORY, str(Path.cwd()))

    hooks.register()
    forward.register()


# verl only imports this package (VERL_USE_EXTERNAL_MODULES) or only loads the entry point's name,
# in both cases while it is being imported itself; elsewhere an import registers nothing.
if "verl" in sys.modules:
    activate()
