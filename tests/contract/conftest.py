"""The collector's contract as a table: cells are tests, and what cannot be run here is a line too.

    make contract

runs every cell on real verl and prints the table; any cell that fails makes it exit non-zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.runs import Runs

RUN, CONTRACT, NOT_HERE = "run", "contract-tested", "not run here"

#: What this machine cannot show, and why.
ELSEWHERE = (
    ("back end", "CUDA", "no such device; hooks and settings are tested as text"),
    ("back end", "NPU", "no such device; hooks and settings are tested as text"),
    ("back end", "verl's Megatron engine", "needs CUDA; see megatron-core below"),
    ("engine", "vLLM in verl, a real server", "needs a GPU or an NPU; hooks are contract-tested"),
    ("engine", "SGLang in verl, a real server", "needs a GPU or an NPU; hooks are contract-tested"),
    ("trainer", "V1, LoRA with a critic", "verl 0.9.1 itself stops in it (disable_adapter)"),
    ("version", "0.7.1, training", "its environment was not made"),
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--contract-table"):
        config.pluginmanager.register(_Table(), "contract-table")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract-table", action="store_true", help="print the contract's table")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The runs; RLPROBE_CONTRACT_DIR names a directory that is kept (one that msprobe accepts)."""
    kept = os.environ.get("RLPROBE_CONTRACT_DIR")
    with Runs(Path(kept) if kept else tmp_path_factory.mktemp("contract")) as runs:
        yield runs


class _Table:
    """Collects cells and their outcomes, and prints them at the end."""

    def __init__(self) -> None:
        self._cells: dict[str, list[tuple[str, str, str]]] = {}
        self._outcomes: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = item.iter_markers("cell")
            self._cells[item.nodeid] = [mark.args for mark in marks]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes.setdefault(report.nodeid, []).append(report.outcome)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found: dict[tuple[str, str, str], list[str]] = {}
        for node, cells in self._cells.items():
            for cell in cells:
                found.setdefault(cell, []).extend(self._outcomes.get(node, ["not reached"]))
        rows = [(*cell, _result(outcomes)) for cell, outcomes in found.items()]
        rows += [(group, name, NOT_HERE, why) for group, name, why in ELSEWHERE]
        groups = list(dict.fromkeys(row[0] for row in rows))
        rows.sort(key=lambda row: groups.index(row[0]))
        heads = ("group", "what", "how", "result")
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(3)]
        terminalreporter.section("the collector's contract")
        for row in [heads, *rows]:
            columns = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
            terminalreporter.write_line("  ".join([*columns, row[3]]))


def _result(outcomes: list[str]) -> str:
    if set(outcomes) == {"passed"}:
        return f"passed ({len(outcomes)})" if len(outcomes) > 1 else "passed"
    return ", ".join(dict.fromkeys(o for o in outcomes if o != "passed"))
