"""``snakemake --logger rlprobe``: one line a job. Snakemake finds loggers by a module's name."""

from rlprobe.runs.console import LogHandler

__all__ = ["LogHandler"]
