"""What Snakemake tells a terminal: one line a job, and a failure with its reason.

Snakemake's own log, with every rule, reason and command, is a file in ``.snakemake/log`` all the
same. A dry run is told in Snakemake's words: there the rules are what was asked for.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from rlprobe import redaction, terminal
from rlprobe.runs import workflowlock

#: What Snakemake says around a failure, which the failure itself says better.
_EMPTY = (
    "Exiting because a job execution failed",
    "At least one job did not complete successfully",
    "WorkflowError:\nAt least one job did not complete successfully",
    "Removing output files of failed job",
    "RuleException",
)
#: Said when somebody presses Ctrl-C: what fails after it is no failure.
_INTERRUPTED = ("Terminating processes on user request", "Cancelling snakemake on user request")
_KEPT = "interrupted; what is done is kept, the same command goes on from there"
_NOTHING = "Nothing to be done"
#: What Snakemake says of a lock advises to take it away, whoever holds it.
_LOCKED = "LockException"
#: Around what rlprobe found wrong in an alignment: places in the workflow, which is not at fault.
_PLACE = re.compile(r'^(?:WorkflowError in file ".*", line \d+:|  File ".*", line \d+, in .*)$')
#: Rules that make nothing, and gather what others make.
_GATHERING = ("all", "align", "collect")
#: Lines of a failed job's log that are shown.
_TAIL = 8
#: Jobs that tell their own progress, and their own failure.
_TALKING = ("run_", "refine_")
#: The job whose output is told, unless whoever started Snakemake tells it, as this variable says.
_VERDICT = "verdict"
SUMMARY_FOLLOWS = "RLPROBE_SUMMARY_FOLLOWS"


class LogHandler(LogHandlerBase):
    """Writes to stderr, as Snakemake's own handler does."""

    def __post_init__(self) -> None:
        self._lines = Lines(getattr(self.common_settings, "nocolor", False))
        self._plain: logging.Handler | None = None
        if self.common_settings.dryrun or self.common_settings.verbose:
            self._plain = _snakemakes_own(self.common_settings)

    def emit(self, record: logging.LogRecord) -> None:
        if self._plain is not None:
            if self._plain.filter(record):
                self._plain.emit(record)
            return
        try:
            for line in self._lines.of(record.levelno, record.getMessage(), record.__dict__):
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as logging has it: said, and no end of what is told
            self.handleError(record)

    writes_to_stream = True
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False


def _snakemakes_own(settings: Any) -> logging.Handler:
    from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter

    handler: logging.Handler = ColorizingTextHandler(
        nocolor=settings.nocolor, stream=sys.stdout if settings.stdout else sys.stderr
    )
    handler.setFormatter(DefaultFormatter(settings.quiet, settings.show_failed_logs))
    handler.addFilter(
        DefaultFilter(
            settings.quiet,
            settings.debug_dag,
            settings.verbose,
            settings.dryrun,
            settings.printshellcmds,
        )
    )
    return handler


@dataclass(frozen=True)
class _Job:
    """A job that runs."""

    rule: str
    what: str
    outputs: list[Path]
    since: float

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> _Job:
        rule = str(facts.get("rule_name"))
        what = str(facts.get("rule_msg") or rule)
        outputs = [Path(str(path)) for path in facts.get("output") or []]
        return cls(rule, what, outputs, time.monotonic())

    @property
    def talks(self) -> bool:
        """Whether it tells its own progress."""
        return self.rule.startswith(_TALKING)


class Lines:
    """Snakemake's events as lines for a reader."""

    def __init__(self, nocolor: bool = False) -> None:
        self._paint = terminal.Paint(sys.stderr, off=nocolor)
        self._running: dict[int, _Job] = {}
        self._finished: list[tuple[_Job, float]] = []
        self._interrupted = False
        self._gathering = 0
        self._reasons: set[tuple[str, ...]] = set()

    def of(self, level: int, text: str, facts: Mapping[str, Any]) -> list[str]:
        """What a log record says to somebody who waits.

        Args:
            level: of :mod:`logging`.
            text: its message.
            facts: its attributes, with ``event`` and what belongs to it.
        """
        if not self._interrupted and text.strip().startswith(_INTERRUPTED):
            self._interrupted = True
            return [] if os.environ.get(SUMMARY_FOLLOWS) else [_KEPT]
        if self._interrupted and level >= logging.WARNING:
            return []
        told = {
            LogEvent.RUN_INFO: self._planned,
            LogEvent.JOB_INFO: self._began,
            LogEvent.JOB_FINISHED: self._ended,
            LogEvent.PROGRESS: self._progress,
            LogEvent.JOB_ERROR: self._failed,
            LogEvent.GROUP_ERROR: self._failed,
        }.get(facts.get("event"))  # type: ignore[arg-type]
        if told is not None:
            return told(facts)
        if _NOTHING in text:
            return [text]
        return self._warned(level, text) if level >= logging.WARNING else []

    def _planned(self, facts: Mapping[str, Any]) -> list[str]:
        counts = facts.get("stats") or {}
        self._gathering = sum(int(counts.get(rule) or 0) for rule in _GATHERING)
        return []

    def _began(self, facts: Mapping[str, Any]) -> list[str]:
        job = _Job.of(facts)
        self._running[int(facts["jobid"])] = job
        return [f"  …  {terminal.safe(job.what)}"] if job.talks else []

    def _ended(self, facts: Mapping[str, Any]) -> list[str]:
        done = self._running.pop(int(facts["job_id"]), None)
        if done is not None:
            self._finished.append((done, time.monotonic() - done.since))
        return []

    def _progress(self, facts: Mapping[str, Any]) -> list[str]:
        done, total = int(facts["done"]), int(facts["total"]) - self._gathering
        width = len(str(total))
        lines = []
        first = done - len(self._finished)
        for number, (job, seconds) in enumerate(self._finished, first + 1):
            place = self._paint.dim(f"[{number:>{width}}/{total}]")
            took = self._paint.dim(terminal.duration(seconds))
            if job.outputs:  # a target that only gathers others is no work
                lines.append(f"{place} {terminal.safe(job.what)}  {took}")
            if job.rule == _VERDICT and not os.environ.get(SUMMARY_FOLLOWS):
                lines += [terminal.message(line) for out in job.outputs for line in _lines(out)]
        self._finished.clear()
        return lines

    def _failed(self, facts: Mapping[str, Any]) -> list[str]:
        name = str(facts.get("rule_name") or "a group of jobs")
        job = self._running.pop(int(facts.get("jobid") or -1), None)
        what = name if job is None else job.what
        logs = [str(log).split(" (", 1)[0] for log in facts.get("log") or []]
        unsaid = [log for log in logs if log not in what]
        where = f" (log: {', '.join(unsaid)})" if unsaid else ""
        lines = [self._paint.bad("failed: ") + terminal.safe(f"{what}{where}")]
        if not name.startswith(_TALKING):
            reason = tuple(f"    {line}" for log in logs for line in tail(Path(log)))
            # one damaged file may fail many jobs
            lines += ["    for the same reason"] if reason in self._reasons else reason
            self._reasons.update({reason} if reason else ())
        return lines

    def _warned(self, level: int, text: str) -> list[str]:
        shown = text.strip()
        if not shown or shown.startswith(_EMPTY):
            return []
        if shown.startswith(_LOCKED):
            shown = _locked(Path.cwd()) or shown
        own = [line for line in shown.splitlines() if not _PLACE.match(line)]
        if shown.startswith("WorkflowError in file") and own:
            shown = "\n".join(own)
        said = terminal.message(redaction.text(shown, names=False))
        return [self._paint.bad(said) if level >= logging.ERROR else said]


def _locked(directory: Path) -> str:
    state, said = workflowlock.look(directory)
    if state == workflowlock.DEAD:
        return (
            f"The last workflow in {directory} was killed, and its lock is left: "
            "`snakemake --unlock`, then the same command again."
        )
    return said


def tail(log: Path) -> list[str]:
    """The end of a job's log, or from its own message of failure on."""
    lines = _lines(log)
    own = next((n for n in range(len(lines) - 1, -1, -1) if "rlprobe: error: " in lines[n]), None)
    shown = lines[own:] if own is not None else lines
    return [terminal.message(line) for line in shown[-_TAIL:]]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
