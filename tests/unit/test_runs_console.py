"""What Snakemake's events become on a terminal: one line a job, and a failure with its reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rlprobe import terminal
from rlprobe.runs import console, workflowlock
from rlprobe.runs.console import Lines


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv(console.SUMMARY_FOLLOWS, raising=False)
    return Lines(nocolor=True)


def begin(lines: Lines, number: int, rule: str, message: str, **facts: Any) -> list[str]:
    info = {"event": "job_info", "jobid": number, "rule_name": rule, "rule_msg": message,
            "output": ["made"], **facts}  # fmt: skip
    return lines.of(logging.INFO, "", info)


def finish(lines: Lines, number: int, done: int, total: int) -> list[str]:
    assert lines.of(logging.INFO, "", {"event": "job_finished", "job_id": number}) == []
    return lines.of(logging.INFO, "", {"event": "progress", "done": done, "total": total})


def test_a_job_is_one_line_when_it_is_done(lines: Lines) -> None:
    assert begin(lines, 3, "compare", "compare target: actor_update") == []
    (line,) = finish(lines, 3, 4, 17)
    assert line.startswith("[ 4/17] compare target: actor_update  0.0 s")


def test_a_training_says_that_it_begins(lines: Lines) -> None:
    assert begin(lines, 1, "run_target", "target: verl on cpu, log x.log") == [
        "  …  target: verl on cpu, log x.log"
    ]


def test_jobs_that_end_together_are_numbered_in_turn(lines: Lines) -> None:
    begin(lines, 1, "compare", "one")
    begin(lines, 2, "compare", "two")
    lines.of(logging.INFO, "", {"event": "job_finished", "job_id": 1})
    assert [line.split("]")[0] for line in finish(lines, 2, 5, 9)] == ["[4/9", "[5/9"]


def test_a_target_that_makes_nothing_is_no_line(lines: Lines) -> None:
    begin(lines, 1, "all", "all", output=[])
    assert finish(lines, 1, 9, 9) == []


def test_the_verdict_is_told_unless_somebody_else_tells_it(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "verdict.txt"
    told.write_text("a: target and benchmark agree.\n")
    begin(lines, 1, "verdict", "verdict", output=[str(told)])
    assert finish(lines, 1, 1, 1)[1:] == ["a: target and benchmark agree."]
    monkeypatch.setenv(console.SUMMARY_FOLLOWS, "yes")
    begin(lines, 1, "verdict", "verdict", output=[str(told)])
    assert len(finish(lines, 1, 1, 1)) == 1


def test_a_failure_says_why_and_where_its_log_is(lines: Lines, tmp_path: Path) -> None:
    log = tmp_path / "compare.log"
    log.write_text("reading\nrlprobe: error: store/runs/x is damaged\nrun `rlprobe store verify`\n")
    begin(lines, 7, "compare", "compare target: actor_update")
    failed = lines.of(
        logging.ERROR, "Error in rule compare",
        {"event": "job_error", "jobid": 7, "rule_name": "compare",
         "log": [f"{log} (check log file(s) for error details)"]},
    )  # fmt: skip
    assert failed == [
        f"failed: compare target: actor_update (log: {log})",
        "    rlprobe: error: store/runs/x is damaged",
        "    run `rlprobe store verify`",
    ]


def test_what_ends_after_ctrl_c_has_not_failed(lines: Lines) -> None:
    begin(lines, 7, "compare", "compare target")
    said = lines.of(logging.WARNING, "Terminating processes on user request, this might", {})
    assert said == ["interrupted; what is done is kept, the same command goes on from there"]
    assert lines.of(logging.WARNING, "Cancelling snakemake on user request.", {}) == []
    told = {"event": "job_error", "jobid": 7, "rule_name": "compare", "log": []}
    assert lines.of(logging.ERROR, "Error in rule compare", told) == []
    assert lines.of(logging.ERROR, "RuleException:\nCalledProcessError", {}) == []


def test_ctrl_c_is_told_once_where_somebody_else_tells_it(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(console.SUMMARY_FOLLOWS, "yes")
    assert lines.of(logging.WARNING, "Terminating processes on user request, this might", {}) == []


def test_one_damaged_file_is_told_once(lines: Lines, tmp_path: Path) -> None:
    told = []
    for number, why in enumerate(["x is damaged", "x is damaged", "y is damaged"]):
        log = tmp_path / f"{number}.log"
        log.write_text(f"rlprobe: error: {why}\n")
        begin(lines, number + 1, "compare", f"compare {number}")
        facts = {"event": "job_error", "jobid": number + 1, "rule_name": "compare",
                 "log": [str(log)]}  # fmt: skip
        told += lines.of(logging.ERROR, "", facts)[1:]
    assert told == ["    rlprobe: error: x is damaged", "    for the same reason",
                    "    rlprobe: error: y is damaged"]  # fmt: skip


def test_what_only_gathers_is_not_counted(lines: Lines) -> None:
    stats = {"event": "run_info", "stats": {"compare": 2, "all": 1, "total": 3}}
    assert lines.of(logging.INFO, "Job stats:\n…", stats) == []
    begin(lines, 1, "compare", "one")
    assert [line.split("]")[0] for line in finish(lines, 1, 2, 3)] == ["[2/2"]


@pytest.mark.parametrize(
    ("held", "told"),
    [(workflowlock.UNKNOWN, "A workflow runs in x already"), (workflowlock.DEAD, "was killed")],
)
def test_a_lock_says_who_holds_it_and_never_to_take_it_from_somebody(
    held: int, told: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (held, "A workflow runs in x already: process 7 on this host.")
    monkeypatch.setattr(workflowlock, "look", lambda directory: found)
    snakemakes = "LockException:\nError: Directory cannot be locked. … the --unlock argument."
    (said,) = lines.of(logging.ERROR, snakemakes, {})
    assert told in said
    assert ("--unlock" in said) == (held == workflowlock.DEAD)


def test_a_wrong_alignment_is_told_without_places_in_the_workflow(lines: Lines) -> None:
    text = (
        'WorkflowError in file "/x/workflow/Snakefile", line 32:\noverrides: verl has no a.b\n'
        '  File "/x/workflow/Snakefile", line 32, in <module>'
    )
    assert lines.of(logging.ERROR, text, {}) == ["overrides: verl has no a.b"]
    other = 'SyntaxError in file "/x/workflow/Snakefile", line 3:\ninvalid syntax'
    assert lines.of(logging.ERROR, other, {}) == [other]


def test_a_training_that_failed_has_said_why_itself(lines: Lines, tmp_path: Path) -> None:
    log = tmp_path / "target.log"
    log.write_text("a thousand lines of a framework\n")
    begin(lines, 7, "run_target", "target: verl on cpu")
    failed = lines.of(
        logging.ERROR, "", {"event": "job_error", "jobid": 7, "rule_name": "run_target",
                            "log": [str(log)]},
    )  # fmt: skip
    assert failed == [f"failed: target: verl on cpu (log: {log})"]


@pytest.mark.parametrize(
    ("level", "text", "shown"),
    [
        (logging.INFO, "Building DAG of jobs...", []),
        (logging.INFO, "Nothing to be done (all requested files are present).",
         ["Nothing to be done (all requested files are present)."]),
        (logging.ERROR, "Exiting because a job execution failed. Look below", []),
        (logging.ERROR, "WorkflowError:\nAt least one job did not complete successfully.", []),
        (logging.ERROR, "no such file: \x1b[2Jx", ["no such file: \\x1b[2Jx"]),
        (logging.WARNING, "a job was retried", ["a job was retried"]),
    ],
)  # fmt: skip
def test_of_snakemakes_own_words_those_that_matter_are_kept(
    lines: Lines, level: int, text: str, shown: list[str]
) -> None:
    assert lines.of(level, text, {}) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.96, "1 min 00 s"), (125, "2 min 05 s"),
     (3599.6, "1 h 00 min"), (3720, "1 h 02 min")],
)  # fmt: skip
def test_times_are_told_as_a_reader_expects_them(seconds: float, shown: str) -> None:
    assert terminal.duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(6.2, "6 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3725.0, "1 h 02 min")],
)
def test_an_estimate_has_no_tenths(seconds: float, shown: str) -> None:
    assert terminal.duration(seconds, exact=False) == shown


class _Tty:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False),
     ({"FORCE_COLOR": "1"}, True)],
)  # fmt: skip
def test_colours_are_for_terminals_that_want_them(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    paint = terminal.Paint(_Tty())  # type: ignore[arg-type]
    assert ("\x1b[" in paint.bad("x")) is coloured
