"""Imported at interpreter start when ``RLPROBE_CONFIG`` is set (see the project's ``.pth`` file).

It must stay cheap and must not import a framework: it only registers what to do once one is
imported. It lies outside of every room, whose packages import what this environment may lack. A
configuration that cannot be read ends the process, because a run that trains without the capture
it was asked for is worse than one that does not start.
"""

from __future__ import annotations

import importlib
import os
import sys

from rlprobe import imports
from rlprobe.errors import RlprobeError


def main() -> None:
    """Activate the hooks of the frameworks that the configuration is for."""
    try:
        # what these import may be lacking in this environment
        from rlprobe.capture.session import ENV
        from rlprobe.frameworks import switch

        found = switch.read(os.environ[ENV])
        for framework in found.frameworks:
            importlib.import_module(f"rlprobe.frameworks.{framework}").activate()
    except RlprobeError as error:
        # site.py would print a traceback and carry on; a clear line and an exit is what is wanted
        sys.stderr.write(f"rlprobe: error: {error}\n")
        os._exit(error.exit_code)
    except ModuleNotFoundError as error:
        lacking = imports.lacking(error)
        if lacking is None:
            raise
        sys.stderr.write(f"rlprobe: error: {lacking}\n")
        os._exit(1)


main()
