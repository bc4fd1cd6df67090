"""Commands that the page gives: what to do next, and how everything on it was made."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from rlprobe.diagnose.diagnosis import ALIGNED, DIVERGED, NOT_COMPARABLE, SHUT, Diagnosis
from rlprobe.documents import jsonfile
from rlprobe.dumps import results as tables
from rlprobe.judge.extent import TRAINER
from rlprobe.judge.inputs import Results
from rlprobe.report.words import pair, sentence
from rlprobe.store.read import Run


class Command(NamedTuple):
    """A command that works from any directory, and what it is for."""

    label: Markup
    text: str


def program() -> str:
    """How rlprobe is called on this machine: by its path, since a page is read in another shell."""
    beside = Path(sys.executable).with_name("rlprobe")
    found = str(beside) if beside.is_file() else shutil.which("rlprobe")
    return shlex.quote(found) if found else f"{shlex.quote(sys.executable)} -m rlprobe"


def next_steps(results: Results, found: Diagnosis, benchmark: Run, target: Run) -> list[Command]:
    """One or two commands for who has just read the verdict; none where no command helps."""
    directory = shlex.quote(str(results.directory.resolve()))
    if results.of_dumps:
        said = tables.sides(results.directory)
        sides = [said.benchmark, said.target] if said is not None else ["BENCHMARK", "TARGET"]
        if found.verdict == ALIGNED:
            return [
                Command(
                    pair(
                        "Write every record into a workbook, with msprobe's columns:",
                        "把每条记录写入工作簿，列与 msprobe 相同：",
                    ),
                    f"{program()} compare {shlex.join(sides)} -o {_beside(results, 'table')} "
                    "--table xlsx",
                )
            ]
        if found.verdict != DIVERGED:
            return [
                Command(
                    _to_mend(
                        found,
                        pair(
                            "After what refused the comparison is mended, dump and compare again:",
                            "修正导致比较被拒绝的问题之后，重新 dump 并比较：",
                        ),
                    ),
                    f"{program()} compare {shlex.join(sides)} -o {directory}",
                )
            ]
        return [
            Command(
                pair(
                    "Show who makes the calls that differ, on both sides:",
                    "显示两侧有差异的调用各自的调用栈：",
                ),
                f"{program()} compare {shlex.join(sides)} -o {_beside(results, 'stacks')} --stacks",
            )
        ]
    waits = _waits(results) if found.verdict == DIVERGED else []
    if waits:
        return waits
    if found.verdict == DIVERGED and found.first is not None and found.first.stage == TRAINER:
        return []  # a metric has no calls: the step has to be captured first
    if found.verdict == DIVERGED and not (results.directory / "refine/refined.json").is_file():
        # nothing was refined: there is nothing yet that a reproducer could be made of
        return [_with_stacks(results, found, benchmark, target)]
    if found.verdict == DIVERGED:
        return [
            Command(
                pair(
                    "Make a folder for the kernel team that shows the difference without rlprobe:",
                    "为算子团队生成一个无需 rlprobe 即可复现差异的目录：",
                ),
                f"{program()} reproduce {directory} -o {_beside(results, 'reproducer')}",
            )
        ]
    if found.verdict == ALIGNED:
        store = shlex.quote(str(benchmark.path.resolve().parent.parent))
        return [
            Command(
                pair(
                    "Keep the benchmark, to align other devices or versions with it:",
                    "保留基准运行，以便与其他设备或版本对齐：",
                ),
                f"{program()} store export {benchmark.key} --store {store} -o "
                f"{_beside(results, 'benchmark.rlprobe')}",
            )
        ]
    then = pair(
        "After what refused the comparison is mended, judge again:",
        "修正导致比较被拒绝的问题之后，重新判定：",
    )
    return [Command(_to_mend(found, then), _again(directory))]


def in_a_script(results: Results, found: Diagnosis) -> list[Command]:
    """How a script reads the verdict; none where there is none."""
    if found.verdict == NOT_COMPARABLE:
        return []
    directory = shlex.quote(str(results.directory.resolve()))
    return [
        Command(
            pair("Read the verdict in a script:", "在脚本中读取结论："),
            f"{program()} verdict {directory}/diagnosis.json",
        )
    ]


def _to_mend(found: Diagnosis, then: Markup) -> Markup:
    """What has to be done about that which refused the comparison, and what then."""
    actions = [
        sentence(item.action, found.messages)
        for item in found.gate
        if item.state == SHUT and item.action
    ]
    return Markup("").join([*(Markup("{}{}").format(a, pair(". ", "。")) for a in actions), then])


def _waits(results: Results) -> list[Command]:
    """What is to be done where the benchmark's half of a refinement is made at another site."""
    refine = results.directory / "refine"
    if not (refine / "suspects.json").is_file() or (refine / "refined.json").is_file():
        return []
    plan = jsonfile.mapping(jsonfile.load(refine / "suspects.json"))
    elsewhere, afterwards = (str(plan.get(name) or "") for name in ("elsewhere", "afterwards"))
    if not elsewhere or not afterwards:
        return []
    return [
        Command(
            pair(
                "At the site of the benchmark, with its own CONFIG, to find the cause:",
                "在基准所在站点（CONFIG 为其配置文件）运行，以查明原因：",
            ),
            elsewhere,
        ),
        Command(
            pair(
                "Then here, with the file that it writes:", "然后在本站点（使用其生成的文件）运行："
            ),
            afterwards,
        ),
    ]


def _again(directory: str) -> str:
    """Judge and write the page; also where the sides are still not comparable."""
    return f"{program()} diagnose {directory} --no-fail && {program()} report {directory}"


def _beside(results: Results, what: str) -> str:
    """A place of its own beside the results: a comparison takes the place of an earlier one, with
    its diagnosis and page, and a page is read in another directory."""
    directory = results.directory.resolve()
    return shlex.quote(str(directory.with_name(f"{directory.name}-{what}")))


def _with_stacks(results: Results, found: Diagnosis, benchmark: Run, target: Run) -> Command:
    both = " ".join(shlex.quote(str(run.path.resolve())) for run in (benchmark, target))
    stage = f" --stage {found.first.stage}" if found.first is not None else ""
    return Command(
        pair(
            "Show who makes the calls that differ, on both sides:",
            "显示两侧有差异的调用各自的调用栈：",
        ),
        f"{program()} compare {both} -o {_beside(results, 'stacks')} --stacks{stage}",
    )


def every(results: Results, benchmark: Run, target: Run, found: Diagnosis) -> list[Command]:
    """How what is on the page was made."""
    first = found.first
    stage = f" --stage {first.stage}" if first is not None and first.stage != TRAINER else ""
    directory = shlex.quote(str(results.directory.resolve()))
    both = " ".join(shlex.quote(str(run.path.resolve())) for run in (benchmark, target))
    commands = [
        Command(
            pair(
                "Compare the two runs again, every difference measured:",
                "重新比较两次运行，度量每一处差异：",
            ),
            f"{program()} compare {both} -o {_beside(results, 'again')}{stage}",
        ),
        Command(
            pair("Judge and write this page again:", "重新判定并生成本页："),
            _again(directory),
        ),
    ]
    facts = target.manifest.volatile.get("run") or {}
    command = facts.get("command")
    if isinstance(command, list) and command:
        environment = target.manifest.declared.get("environment") or {}
        before = "".join(f"{k}={shlex.quote(str(v))} " for k, v in sorted(environment.items()))
        commands.append(
            Command(
                pair(
                    "What the target ran (`rlprobe run --role target` does it, hooks and all):",
                    "目标一侧运行的命令（带 rlprobe 钩子，`rlprobe run --role target` 即如此）：",
                ),
                before + shlex.join(str(word) for word in command),
            )
        )
    return commands
