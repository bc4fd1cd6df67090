"""A CPU as VeRL's device.

Importing this package (``VERL_USE_EXTERNAL_MODULES``) registers the platform.
"""

from rlprobe.frameworks.verl.cpu import platform as platform
