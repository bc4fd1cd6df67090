"""Are methods wrapped where they live, once, and also in a user's own subclass?"""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlprobe.errors import HookError
from rlprobe.frameworks import imports, wrap

calls: list[tuple[str, str]] = []


def around(original: Any, self: Any, args: Any, kwargs: Any) -> Any:
    """What the tests wrap with: it notes who was called."""
    calls.append((type(self).__name__, original.__name__))
    return original(self, *args, **kwargs)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def test_a_wrapped_method_keeps_its_result_attributes_and_name() -> None:
    class Worker:
        def compute(self, x: int, *, y: int = 1) -> int:
            """Doc."""
            return x + y

        compute.registered = "dispatch"  # type: ignore[attr-defined]

    wrap.wrap_family(Worker, {"compute": around}, framework="test")
    assert Worker().compute(1, y=2) == 3
    assert Worker.compute.registered == "dispatch"  # type: ignore[attr-defined]
    assert Worker.compute.__doc__ == "Doc."
    assert calls == [("Worker", "compute")]


def test_an_overriding_subclass_is_wrapped_and_an_inheriting_one_is_wrapped_once() -> None:
    class Worker:
        def compute(self) -> str:
            return "base"

    wrap.wrap_family(Worker, {"compute": around}, framework="test")

    class Own(Worker):
        def compute(self) -> str:
            return "own"

    class Inherits(Worker):
        pass

    assert Own().compute() == "own"
    assert Inherits().compute() == "base"
    assert calls == [("Own", "compute"), ("Inherits", "compute")]


def test_a_class_with_its_own_init_subclass_keeps_it() -> None:
    seen: list[str] = []

    class Worker:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

        def compute(self) -> None: ...

    wrap.wrap_family(Worker, {"compute": around}, framework="test")
    type("Sub", (Worker,), {})
    assert seen == ["Sub"]


def test_wrapping_twice_calls_once() -> None:
    class Worker:
        def compute(self) -> None: ...

    wrap.wrap_family(Worker, {"compute": around}, framework="test")
    wrap.wrap_family(Worker, {"compute": around}, framework="test")
    Worker().compute()
    assert len(calls) == 1


def test_a_missing_method_is_named() -> None:
    class Worker:
        pass

    with pytest.raises(HookError, match=r"Worker has no method compute_log_prob"):
        wrap.wrap_family(Worker, {"compute_log_prob": around}, framework="test")


def test_a_wrapper_of_a_class_pickled_by_value_does_not_carry_the_hook_along() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Mine:\n    def compute(self):\n        return 7\n", namespace)
    mine = namespace["Mine"]
    mine.__module__ = "__main__"
    wrap.wrap_method(mine, "compute", around)
    there = pickle.loads(cloudpickle.dumps(mine))
    assert there().compute() == 7
    assert calls == [("Mine", "compute")]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "late_module_for_test.py").write_text(
        textwrap.dedent(
            """
            VALUE = 1
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "late_module_for_test"
    sys.modules.pop("late_module_for_test", None)
    imports._wanted.pop("late_module_for_test", None)


def test_a_callback_runs_right_after_the_import_and_not_before(package: str) -> None:
    seen: list[int] = []
    imports.when_imported(package, lambda module: seen.append(module.VALUE))
    assert seen == []
    __import__(package)
    assert seen == [1]


def test_a_module_already_imported_is_patched_at_once(package: str) -> None:
    __import__(package)
    seen: list[int] = []
    imports.when_imported(package, lambda module: seen.append(module.VALUE))
    assert seen == [1]


def test_an_import_that_fails_in_a_callback_fails_the_import(package: str) -> None:
    def refuse(module: Any) -> None:
        raise HookError("not this version")

    imports.when_imported(package, refuse)
    with pytest.raises(HookError, match="not this version"):
        __import__(package)
