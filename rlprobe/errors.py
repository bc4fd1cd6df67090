"""Every error rlprobe raises on purpose, in one hierarchy.

    RlprobeError                 exit 1
     +-- ConfigError             exit 2   a configuration file or value is wrong
     |    +-- UsageError         exit 2   a command line is wrong
     +-- RunError                exit 1   a framework run did not do what it was asked
     |    +-- HookError          exit 1   a hook point is missing or a stage was not captured
     |    +-- ReplayError        exit 1   recorded rollouts do not fit the run that wants them
     +-- DumpError               exit 1   a dump file cannot be read as what it claims to be
     +-- StoreError              exit 1   the store lacks something or holds something damaged
     |    +-- IncompleteRunError exit 1   a run ended well, but what it left cannot be a run
     +-- NotComparableError           exit 4   nothing could be compared

The command line prints ``str(error)`` and exits with ``exit_code``: a message therefore says what
was sought, what was found and what to do next. Anything else that escapes is a defect of rlprobe
and keeps its traceback.
"""

from __future__ import annotations


class RlprobeError(Exception):
    """Base of every deliberate error."""

    exit_code = 1


class ConfigError(RlprobeError):
    """A configuration names a key, value or file that is not accepted."""

    exit_code = 2


class UsageError(ConfigError):
    """A command was called with arguments that make no sense together."""


class RunError(RlprobeError):
    """A framework run failed or finished without what it was asked for."""


class HookError(RunError):
    """A hook point does not exist in this framework version, or an expected stage never ran."""


class ReplayError(RunError):
    """Recorded rollouts are missing, damaged, or belong to other prompts."""


class DumpError(RlprobeError):
    """A dump directory or file is missing, truncated or not in a known format."""


class StoreError(RlprobeError):
    """The store lacks a run or object, or holds one whose digest is wrong."""


class IncompleteRunError(StoreError):
    """A run ended well, but left nothing, or half of something: no later commit mends that."""


class NotComparableError(RlprobeError):
    """Nothing, or too little, could be compared; never to be read as agreement."""

    exit_code = 4
