"""Where module calls come from: frames that look alike are told apart, equal ones are one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rlprobe.capture.light.stack import Stacks, Trace, lines, trace

CALLER = """
def called(what):
    return what()
"""


def _loaded(path: Path) -> ModuleType:
    path.write_text(CALLER)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_outside() -> Trace:
    return trace(None)


def test_a_call_from_one_place_is_one_stack_each_time() -> None:
    found = [_from_outside() for _ in range(3)]
    assert found[0].stack is found[1].stack is found[2].stack
    other = _from_outside()
    assert other.stack is not found[0].stack


def test_the_same_source_in_two_files_is_named_by_its_own_file(tmp_path: Path) -> None:
    first, second = (_loaded(tmp_path / name).called for name in ("one.py", "two.py"))
    assert first.__code__ == second.__code__
    found = [called(_from_outside) for called in (first, second)]
    said = [[text for text in lines(one.stack) if str(tmp_path) in text] for one in found]
    assert [len(one) for one in said] == [1, 1]
    assert "one.py, line 3, in called" in said[0][0]
    assert "two.py, line 3, in called" in said[1][0]


def test_a_nested_call_has_the_stack_of_the_call_around_it() -> None:
    def nested(outer: Trace) -> tuple[Trace, Trace]:
        return trace(outer), trace(None)

    def around() -> tuple[Trace, Trace]:
        return nested(trace(None))

    shared, walked = around()
    assert shared.stack is walked.stack
    stacks = Stacks()
    for name, one in (("a", shared), ("b", walked)):
        stacks.add(name, one.stack)
    assert stacks.text().startswith('{"0": [["a", "b"], ["File ')


def test_two_lines_of_one_function_are_two_stacks() -> None:
    def ask(what: Callable[[], Trace]) -> list[Trace]:
        return [
            what(),
            what(),
        ]

    one, two = ask(_from_outside)
    assert one.stack is not two.stack
    assert lines(one.stack) != lines(two.stack)
