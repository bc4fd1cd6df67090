"""Is a fault planted where it says, taken out again, and refused clearly when it is wrong?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlprobe.errors import ConfigError
from rlprobe.faults.declare import declaration
from rlprobe.faults.plant import load, load_file, planted, reference_of
from rlprobe.selftest import Site, benign, fault


def _site(stage: str) -> Site:
    return Site(
        role="actor",
        stage=stage,
        step=0,
        model={"weight": 1.0},
        optimizer=None,
        batch=None,
        rank=0,
        world_size=1,
        config=None,
    )


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    path = tmp_path / "faults.py"
    path.write_text(
        """
from rlprobe.selftest import benign, fault

@fault(stage="actor_update", module="lm_head", cause=("weights", "unknown"))
def heavier(site):
    old, site.model["weight"] = site.model["weight"], 2.0
    yield
    site.model["weight"] = old

@benign()
def nothing(site):
    site.model["seen"] = site.stage
    yield

def undeclared(site):
    yield
"""
    )
    return path


def test_it_is_planted_around_its_stage_and_taken_out(faults: Path) -> None:
    site = _site("actor_update")
    with planted(f"{faults}:heavier", site):
        assert site.model["weight"] == 2.0
    assert site.model["weight"] == 1.0


def test_it_is_planted_from_a_step_on(faults: Path) -> None:
    for step, weight in ((0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)):
        site = dataclasses.replace(_site("actor_update"), step=step)
        with planted(f"{faults}:heavier", site, from_step=2):
            assert site.model["weight"] == weight, step


def test_it_is_taken_out_when_the_stage_fails(faults: Path) -> None:
    site = _site("actor_update")
    with pytest.raises(ZeroDivisionError), planted(f"{faults}:heavier", site):
        1 / 0  # noqa: B018
    assert site.model["weight"] == 1.0


def test_it_is_not_planted_around_another_stage(faults: Path) -> None:
    site = _site("critic_update")
    with planted(f"{faults}:heavier", site):
        assert site.model["weight"] == 1.0


def test_a_benign_change_is_entered_before_every_stage(faults: Path) -> None:
    for stage in ("critic_update", "actor_compute_log_prob"):
        site = _site(stage)
        with planted(f"{faults}:nothing", site):
            assert site.model["seen"] == stage


def test_a_name_that_is_not_declared_is_refused_with_those_that_are(faults: Path) -> None:
    with pytest.raises(ConfigError, match="heavier, nothing"):
        load(f"{faults}:undeclared")


@pytest.mark.parametrize("reference", ["nofile", "missing.py:x", ":x", "a.py:"])
def test_a_reference_that_names_nothing_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        load(reference)


def test_a_file_that_fails_on_import_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1/0\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails on import: ZeroDivisionError"):
        load(f"{path}:x")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stage": "nowhere", "cause": "loss"}, "nowhere"),
        ({"stage": "actor_update", "cause": "bad luck"}, "bad luck"),
        ({"stage": "actor_update", "cause": "loss", "verdict": "aligned"}, "aligned"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fault(**wrong)


def test_slimes_stage_names_are_understood() -> None:
    @fault(stage="old_log_prob", cause="mask")
    def masked(site: Site) -> Any:
        yield

    declared = declaration(masked)
    assert declared is not None
    assert declared.stage == "actor_compute_log_prob"
    assert not declared.is_benign


def test_a_benign_declaration_expects_agreement() -> None:
    @benign(needs={"world_size": 2})
    def reordered(site: Site) -> Any:
        yield

    declared = declaration(reordered)
    assert declared is not None
    assert (declared.is_benign, declared.verdict) == (True, "aligned")
    assert declared.needs == {"world_size": 2}


def test_the_environment_plants_one_in_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_of(None) is None
    assert reference_of("a.py:b") == "a.py:b"
    monkeypatch.setenv("RLPROBE_FAULT", "c.py:d")
    assert reference_of("a.py:b") == "c.py:d"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("yield\n    yield", "yields more than once"),
        ("return\n    yield", "ended before its yield"),
        ("return None", "has no yield"),
    ],
)
def test_a_fault_yields_exactly_once(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        f"from rlprobe.selftest import benign\n\n@benign()\ndef wrong(site):\n    {body}\n"
    )
    with pytest.raises(ConfigError, match=said), planted(f"{path}:wrong", _site("actor_update")):
        pass


def test_a_file_may_have_dataclasses_and_helpers_beside_it(tmp_path: Path) -> None:
    (tmp_path / "_aside.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from _aside import VALUE\n"
        "from rlprobe.selftest import benign\n\n"
        "@dataclasses.dataclass\nclass Kept:\n    value: int = VALUE\n\n"
        "@benign()\ndef helped(site):\n    site.model['weight'] = Kept().value\n    yield\n"
    )
    site = _site("actor_update")
    with planted(f"{tmp_path / 'mine.py'}:helped", site):
        assert site.model["weight"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(3)", "fails on import"),
        ("@fault(stage='actor_update', cause=())\ndef f(site):\n    yield", "needs a cause"),
        ("@fault(stage='actor_generate_sequences', cause='loss')\ndef f(site):\n    yield",
         "cannot hold a fault"),
        ("@fault(stage='actor_update', cause='lose')\ndef f(site):\n    yield", "'lose'"),
    ],
)  # fmt: skip
def test_a_file_that_declares_nothing_usable_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from rlprobe.selftest import fault\n{text}\n")
    with pytest.raises(ConfigError, match=r"mine\.py") as raised:
        load_file(file)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@benign\ndef change(site):\n    yield\n", r"@benign is called: @benign\(\)"),
        ("@fault\ndef wrong(site):\n    yield\n", r"@fault is called"),
        ("@benign(needs=['moe'])\ndef change(site):\n    yield\n", r"a mapping .* \['moe'\]"),
        ("@benign()\ndef twice(site):\n    yield\n" * 2, "twice is declared twice"),
    ],
)
def test_a_slip_in_a_declaration_is_said_with_its_file(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "slip.py"
    file.write_text(f"from rlprobe.selftest import benign, fault\n\n\n{text}")
    with pytest.raises(ConfigError, match=rf"slip\.py.*{said}"):
        load_file(file)
