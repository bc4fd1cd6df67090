"""Which runs does an alignment need, and when is a run the same run?"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlprobe import frameworks
from rlprobe.config import parse
from rlprobe.errors import ConfigError
from rlprobe.roles import ROLES
from rlprobe.runs import nodelocal
from rlprobe.runs.plan import FAULT_ENV, pairs, plan
from rlprobe.spec import RunSpec

RAW: dict[str, Any] = {
    "name": "a",
    "framework": "verl",
    "framework_version": "0.9.1",
    "model": {"path": "builtin:tiny-qwen2", "critic_path": "builtin:tiny-qwen2-critic"},
    "data": {"train_files": "builtin:arithmetic"},
    "steps": {"total": 2, "start": 0, "end": 1},
    "overrides": ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"],
    "controls": {"repeat": True, "repeat_target": True, "high_precision": True},
}
#: A key as an imported run has it.
KEY = "ab" * 32


def planned(environ: dict[str, str] | None = None, **changes: Any) -> dict[str, RunSpec]:
    return plan(parse({**copy.deepcopy(RAW), **changes}, "a.yaml"), environ or {})


def keys(runs: dict[str, RunSpec]) -> dict[str, str]:
    return {role: spec.key for role, spec in runs.items()}


def changed(before: dict[str, RunSpec], after: dict[str, RunSpec]) -> set[str]:
    return {role for role in ROLES if keys(before).get(role) != keys(after).get(role)}


def test_every_role_is_planned_and_replays_the_benchmark() -> None:
    runs = planned()
    assert tuple(runs) == ("benchmark", "target", "repeat", "high_precision", "repeat_target")
    assert runs["benchmark"].replay_of is None
    assert {spec.replay_of for role, spec in runs.items() if role != "benchmark"} == {
        runs["benchmark"].key
    }
    assert len(set(keys(runs).values())) == 5


def test_only_the_enabled_controls_are_planned_and_compared() -> None:
    runs = planned(controls={"repeat": False})
    assert tuple(runs) == ("benchmark", "target")
    assert pairs(runs) == {"target": ("benchmark", "target")}


def test_the_target_is_compared_with_its_own_repeat() -> None:
    assert pairs(planned())["repeat_target"] == ("target", "repeat_target")


def test_the_benchmark_generates_and_the_others_do_not() -> None:
    runs = planned()
    assert runs["benchmark"].stages == ("actor_generate_sequences", *runs["target"].stages)
    assert len(runs["target"].stages) == 5


def test_perturbed_controls_replay_the_benchmark_for_their_metrics_alone() -> None:
    runs = planned(controls={"perturbed": 2})
    assert set(runs) == {"benchmark", "target", "repeat", "perturbed1", "perturbed2"}
    assert len(set(keys(runs).values())) == 5
    for role in ("perturbed1", "perturbed2"):
        assert runs[role].replay_of == runs["benchmark"].key
        assert runs[role].stages == ()
    assert "perturbed1" not in str(pairs(runs)), "nothing of theirs is compared"
    assert keys(planned(controls={"perturbed": 3}))["perturbed2"] == keys(runs)["perturbed2"]
    assert keys(planned(controls={}))["repeat"] == keys(runs)["repeat"]


def test_perturbed_controls_of_an_imported_benchmark_are_imported() -> None:
    given = ["cd" * 32, "ef" * 32]
    runs = planned(benchmark={"run": KEY}, controls={"perturbed": given})
    assert [runs[f"perturbed{n}"].key for n in (1, 2)] == given
    with pytest.raises(ConfigError, match=r"controls\.perturbed: 2 replays .* give their keys"):
        planned(benchmark={"run": KEY}, controls={"perturbed": 2})
    for few in (1, given[:1], given[:1] * 2, 17, -1):
        with pytest.raises(ConfigError, match="perturbed"):
            planned(controls={"perturbed": few})


@pytest.mark.parametrize(
    ("benchmark", "high"), [("fp32", "fp64"), ("bf16", "fp32"), ("fp16", "fp32")]
)
def test_high_precision_is_one_step_above_the_benchmark(benchmark: str, high: str) -> None:
    runs = planned(benchmark={"precision": benchmark})
    assert runs["high_precision"].precision == high
    assert runs["repeat"].precision == benchmark


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({"seed": 2}, set(ROLES)),
        ({"deterministic": False}, set(ROLES)),
        ({"steps": {"total": 3, "end": 1}}, set(ROLES)),
        ({"framework_version": "0.9.2"}, set(ROLES)),
        ({"model": {"path": "builtin:tiny-llama"}}, set(ROLES)),
        ({"data": {"train_files": __file__}}, set(ROLES)),
        ({"overrides": [*RAW["overrides"], "critic.optim.lr=1"]}, set(ROLES)),
        ({"capture": {"sketch": False}}, set(ROLES)),
        ({"benchmark": {"environment": {"A": "1"}}}, set(ROLES)),
        ({"recompute_rewards": True}, set(ROLES) - {"benchmark"}),
        ({"target": {"precision": "bf16"}}, {"target", "repeat_target"}),
        ({"target": {"environment": {"A": "1"}}}, {"target", "repeat_target"}),
        ({"target": {"overrides": ["a=b"]}}, {"target", "repeat_target"}),
        ({"name": "b"}, set()),
        ({"store": "elsewhere"}, set()),
        ({"results": "elsewhere"}, set()),
        ({"coverage": 0.5}, set()),
        ({"fail_on_divergence": True}, set()),
        ({"target": {"resources": {"partition": "npu", "nodes": 1}}}, set()),
        ({"controls": {**RAW["controls"], "high_precision": False}}, {"high_precision"}),
    ],
)
def test_a_change_makes_exactly_the_runs_new_whose_numbers_it_can_change(
    changes: dict[str, Any], roles: set[str]
) -> None:
    assert changed(planned(), planned(**changes)) == roles


def test_common_overrides_come_before_the_sides_own() -> None:
    runs = planned(overrides=["a=1"], target={"overrides": ["a=2"]})
    assert runs["target"].overrides == ("a=1", "a=2")
    assert runs["benchmark"].overrides == ("a=1",)


FAULT = (
    "from rlprobe.faults import benign\n\n\n"
    "@benign()\ndef f(site):\n    yield\n\n\n"
    "@benign()\ndef g(site):\n    yield\n"
)


@pytest.fixture
def faults(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "faults.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_fault_is_in_the_target_and_its_repeat_only(faults: Callable[[str], str]) -> None:
    reference = f"{faults(FAULT)}:f"
    runs = planned(target={"fault": reference})
    assert changed(planned(), runs) == {"target", "repeat_target"}
    assert runs["target"].fault == runs["repeat_target"].fault == reference
    assert runs["benchmark"].fault is runs["repeat"].fault is None


def test_a_fault_is_known_by_its_content_and_name(
    faults: Callable[[str], str], tmp_path: Path
) -> None:
    first = planned(target={"fault": f"{faults(FAULT)}:f"})
    other_name = planned(target={"fault": f"{faults(FAULT)}:g"})
    edited = planned(target={"fault": f"{faults(FAULT + '#')}:f"})
    moved = tmp_path / "moved.py"
    moved.write_text(FAULT, encoding="utf-8")
    assert changed(first, other_name) == {"target", "repeat_target"}
    assert changed(first, edited) == {"target", "repeat_target"}
    assert changed(first, planned(target={"fault": f"{moved}:f"})) == set()


def test_a_fault_from_the_environment_counts_like_a_configured_one(
    faults: Callable[[str], str],
) -> None:
    reference = f"{faults(FAULT)}:f"
    configured = planned(target={"fault": reference})
    assert keys(planned({FAULT_ENV: reference})) == keys(configured)
    assert planned({FAULT_ENV: ""})["target"].fault is None


def test_an_imported_benchmark_needs_nothing_of_its_site() -> None:
    runs = planned(benchmark={"run": KEY, "device": "cuda", "lock": "not/here.txt"})
    assert runs["benchmark"].key == KEY
    assert runs["target"].replay_of == KEY
    assert set(runs) == {"benchmark", "target", "repeat_target"}


def test_controls_of_an_imported_benchmark_may_be_imported_too() -> None:
    runs = planned(benchmark={"run": KEY}, controls={"repeat": "cd" * 32})
    assert runs["repeat"].key == "cd" * 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"path": "nowhere"}}, r"model\.path: nowhere does not exist"),
        (
            {"model": {"path": "builtin:tiny-qwen2", "critic_path": "nowhere"}},
            r"model\.critic_path: nowhere does not exist",
        ),
        ({"model": {"path": "builtin:huge"}}, r"model\.path: builtin:huge .*builtin:tiny-qwen2,"),
        ({"model": {"path": "/etc"}}, r"model\.path: /etc holds no config\.json"),
        ({"data": {"train_files": "builtin:sums"}}, r"data\.train_files: .*builtin:arithmetic,"),
        ({"data": {"train_files": "no.parquet"}}, r"data\.train_files: no\.parquet does not exist"),
        ({"target": {"fault": "no.py:f"}}, r"target\.fault: no\.py does not exist"),
        ({"target": {"lock": "no.txt"}}, r"target\.lock: no\.txt does not exist"),
        (
            {"target": {"container": {"runtime": "apptainer", "image": "no.sif"}}},
            r"target\.container\.image: no\.sif does not exist",
        ),
        ({"model": {"path": "builtin:arithmetic"}}, r"is no builtin model of verl; .*tiny-qwen2,"),
        (
            {"data": {"train_files": "builtin:tiny-qwen2"}},
            r"is no builtin data of verl; accepted: builtin:arithmetic, or a path",
        ),
        ({"store": "/etc/passwd"}, r"store: /etc/passwd is no directory"),
        ({"results": "/etc/passwd/a"}, r"results: /etc/passwd is no directory"),
    ],
)
def test_what_does_not_exist_is_named_before_anything_runs(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned(**changes)


_IMAGE = {"container": {"runtime": "docker", "image": "some/image@sha256:0123"}}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"store": "st:ore", "target": _IMAGE}, "store"),
        ({"store": "a:b/store", "benchmark": _IMAGE}, "store"),
        ({"store": "st:ore", "analysis": {"image": "docker://some/image"}}, "store"),
        ({"results": "re:sults", "analysis": {"torch_image": "docker://some/image"}}, "results"),
        ({"data": {"train_files": "a:b/t.parquet"}, "target": _IMAGE}, r"data\.train_files"),
        ({"target": {"fault": "a,b/f.py:f", **_IMAGE}}, r"target\.fault"),
        # the host alone goes there
        ({"store": "st:ore"}, None),
        ({"results": "re:sults", "target": _IMAGE}, None),
        ({"target": {"fault": "faults,2.py:f", **_IMAGE}}, None),
        ({"store": "st:ore", "benchmark": {**_IMAGE, "run": KEY}, "controls": {}}, None),
    ],
)
def test_what_no_container_can_be_given_is_refused_before_a_job_waits_for_it(
    changes: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:b").mkdir()
    Path("a,b").mkdir()
    Path("a:b/t.parquet").write_bytes(b"rows")
    for name in ("a,b/f.py", "faults,2.py"):
        Path(name).write_text(FAULT)
    if refused is None:
        assert planned(**changes)
        return
    with pytest.raises(ConfigError, match=rf"{refused}: .* cannot be bound .*without ',' and ':'"):
        planned(**changes)


def test_a_working_directory_that_no_container_can_be_given_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "12:30").mkdir()
    monkeypatch.chdir(tmp_path / "12:30")
    planned(store="/somewhere/else")
    with pytest.raises(ConfigError, match=r"the working directory: .*12:30 cannot be bound"):
        planned(store="/somewhere/else", target=_IMAGE)


@pytest.mark.parametrize("base", ["/local:0", "scratch", "/tmp/my jobs", "/tmp/a,b", "/tmp/$(id)"])
@pytest.mark.parametrize("side", [{}, _IMAGE])
def test_a_place_for_jobs_directories_that_none_can_use_is_refused_before_a_job_waits(
    base: str, side: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"^RLPROBE_NODE_TMP: found .*; accepted: an absolute"):
        planned({nodelocal.BASE_ENV: base}, target=side)


def test_a_place_for_jobs_directories_leaves_room_for_ray_where_it_is_no_image_s() -> None:
    """An image has it as /tmp."""
    long = {nodelocal.BASE_ENV: "/local/scratch/of/some/user"}
    with pytest.raises(ConfigError, match=f"Ray's sockets .* set {nodelocal.BASE_ENV} to a short"):
        planned(long, benchmark=_IMAGE)
    assert planned(long, benchmark=_IMAGE, target=_IMAGE)
    assert planned({nodelocal.BASE_ENV: "/local/scratch"})


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (FAULT, "F", r"faults\.py has no F; it has: benign, f, g"),
        (FAULT + "STRENGTH = -(1.0)\n", "STRENGTH", "STRENGTH of .*faults.py is no function"),
        ("names = ['a', (1, 2)]\n", "names", "names of .*faults.py is no function"),
        ("import os.path\nfor a in ():\n    b = 1\n", "c", "has no c; it has: a, b, os"),
        ("class A:\n    def f(self):\n        g = 1\n", "f", "has no f; it has: A"),
        ("", "f", "has no f; it has: nothing"),
        ("def f(:\n", "f", r"faults\.py is no Python file: line 1: invalid syntax"),
        ("f = 1\0", "f", "is no Python file"),
    ],
)
def test_a_name_that_a_file_does_not_have_is_named_with_those_it_has(
    faults: Callable[[str], str], text: str, name: str, expected: str
) -> None:
    reference = f"{faults(text)}:{name}"
    with pytest.raises(ConfigError, match=f"target\\.fault: .*{expected}"):
        planned(target={"fault": reference})
    with pytest.raises(ConfigError, match=f"data\\.reward_function: .*{expected}"):
        planned(data={"train_files": "builtin:arithmetic", "reward_function": reference})


PLAIN = "def helper(site):\n    yield\n"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (FAULT + PLAIN, "helper", "under a decorator are: f, g$"),
        (PLAIN, "helper", "under a decorator are: none$"),
        ("class helper:\n    pass\n", "helper", "under a decorator are: none$"),
        # what another one calls is not declared by that
        (FAULT.replace("yield", "yield from helper(site)") + PLAIN, "helper", "are: f, g$"),
        # Python's own decorators mark nothing, and nor does what they are given
        (FAULT + f"import contextlib\n@contextlib.contextmanager\n{PLAIN}", "helper", "f, g$"),
        (FAULT + f"import functools\n@functools.lru_cache(maxsize=2)\n{PLAIN}", "helper", "f, g$"),
        (FAULT + "from collections.abc import Iterator as helper\n", "helper", "are: f, g$"),
        (FAULT + "import json as helper\n", "helper", "are: f, g$"),
        (FAULT, "benign", "are: f, g$"),
        # nothing is declared where rlprobe is out of reach
        ("def mark(f):\n    return f\n\n\n@mark\n" + PLAIN, "helper", "are: none$"),
        (PLAIN + "helper = print(helper) or helper\n", "helper", "are: none$"),
        ("import math\n" + PLAIN + "CASES = [helper]\n", "CASES", "are: none$"),
    ],
)
def test_a_function_that_declares_no_fault_is_refused_when_the_file_is_read(
    faults: Callable[[str], str], text: str, name: str, expected: str
) -> None:
    reference = f"{faults(text)}:{name}"
    said = f"target\\.fault: {name} of .* is declared neither a fault nor a benign .*{expected}"
    with pytest.raises(ConfigError, match=said):
        planned(target={"fault": reference})
    with pytest.raises(ConfigError, match=said):
        planned({FAULT_ENV: reference})
    # a reward function has no such mark
    assert planned(data={"train_files": "builtin:arithmetic", "reward_function": reference})


@pytest.mark.parametrize(
    "text",
    [
        FAULT + PLAIN + "helper = benign()(helper)\n",
        "from mine import mark\n" + PLAIN + "mark(helper)\n",
        FAULT + PLAIN + "for each in (helper,):\n    benign()(each)\n",
        FAULT + PLAIN + "CASES = {'a': helper}\n",
        FAULT + "def mark(f):\n    return benign()(f)\n@mark\n" + PLAIN,
        # it gives what it wraps the mark of another
        FAULT + "import functools\n@functools.wraps(f)\n" + PLAIN,
        FAULT + "import functools\n@functools.cache\n@benign()\n" + PLAIN,
        FAULT + "from functools import cache\ncache = benign()\n@cache\n" + PLAIN,
        "import importlib\n" + PLAIN + "importlib.import_module('mine').mark(helper)\n",
        "def load():\n    from . import mine\n    return mine.mark\n@load()\n" + PLAIN,
        "from mine import helper\n",
        "try:\n    from mine import helper\nexcept ImportError:\n    helper = None\n",
        "from mine import benign\n"
        "if True:\n    @benign()\n    def helper(site):\n        yield\nelse:\n    helper = 1\n",
    ],
)
def test_what_may_have_been_declared_elsewhere_in_the_file_passes(
    faults: Callable[[str], str], text: str
) -> None:
    assert planned(target={"fault": f"{faults(text)}:helper"})["target"].fault is not None


@pytest.mark.parametrize(
    "text",
    [
        "from os.path import *\n",
        "globals()['f'] = 1\n",
        "def __getattr__(name):\n    return 1\n",
        "try:\n    import mine as f\nexcept ImportError:\n    pass\n",
        "import mine\nif True:\n    (f, g) = mine.two()\n",
        "import mine\nwith mine.opened() as f:\n    pass\n",
    ],
)
def test_a_name_that_a_file_may_have_is_not_refused(
    faults: Callable[[str], str], text: str
) -> None:
    assert planned(target={"fault": f"{faults(text)}:f"})["target"].fault is not None


def test_another_image_or_lock_is_another_run(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("torch==2.13.0\n", encoding="utf-8")
    before = planned(target={"lock": str(lock)})
    lock.write_text("torch==2.14.0\n", encoding="utf-8")
    assert changed(before, planned(target={"lock": str(lock)})) == {"target", "repeat_target"}

    image = tmp_path / "a.sif"
    side = {"container": {"runtime": "apptainer", "image": str(image)}}
    image.write_bytes(b"one build")
    before = planned(target=side)
    image.write_bytes(b"one built")
    assert changed(before, planned(target=side)) == {"target", "repeat_target"}


def test_a_reference_with_a_digest_is_its_own_identity() -> None:
    side = {"container": {"runtime": "docker", "image": "verl@sha256:0123"}}
    assert planned(target=side)["target"].identities.environment == "verl@sha256:0123"


@pytest.mark.parametrize(
    ("steps", "joined"),
    [
        ({"total": 1}, ()),
        ({"total": 3, "start": 0, "end": 2}, (1, 2)),
        ({"total": 3, "start": 2, "end": 2}, (2,)),
    ],
)
def test_rejoining_makes_other_runs_of_all_where_a_later_step_is_captured(
    steps: dict[str, int], joined: tuple[int, ...]
) -> None:
    controls = {"repeat": True, "repeat_target": True, "high_precision": True}
    alone = planned(steps=steps, controls=controls)
    runs = planned(steps=steps, controls={**controls, "rejoin": True})
    assert {spec.joined_steps for spec in runs.values()} == {joined}
    assert changed(alone, runs) == (set(runs) if joined else set())


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni"])
def test_a_back_end_whose_states_are_not_kept_is_refused(strategy: str) -> None:
    overrides = [f"actor_rollout_ref.actor.strategy={strategy}"]
    with pytest.raises(ConfigError, match=rf"controls.rejoin: benchmark trains with {strategy}"):
        planned(controls={"rejoin": True}, overrides=overrides)


def test_slime_is_refused_states_of_an_old_policy_and_checkpoints_of_the_alignment() -> None:
    slime = frameworks.get("slime")
    spec = planned()["target"]
    slime.check(spec)
    joined = dataclasses.replace(spec, rejoin=True, overrides=("--lr 1e-3",))
    slime.check(joined)
    old = dataclasses.replace(joined, overrides=("--keep-old-actor",))
    with pytest.raises(ConfigError, match=r"controls.rejoin: target: --keep-old-actor"):
        slime.check(old)
    with pytest.raises(ConfigError, match=r"resume_from: x: .*--load"):
        slime.checkpoint_step("x")


def checkpoint(
    root: Path, world_size: int = 1, models: tuple[str, ...] = ("actor", "critic")
) -> Path:
    directory = root / "global_step_300"
    for name in models:
        (directory / name).mkdir(parents=True)
        for rank in range(world_size):
            shard = directory / name / f"model_world_size_{world_size}_rank_{rank}.pt"
            shard.write_bytes(b"weights")
    return directory


def test_both_sides_begin_from_the_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    alone, runs = planned(), planned(resume_from=str(directory))
    assert changed(alone, runs) == set(runs)
    assert {str(s.identities.checkpoint).partition(":")[0] for s in runs.values()} == {"300"}
    (directory / "actor/model_world_size_1_rank_0.pt").write_bytes(b"others!")
    assert changed(runs, planned(resume_from=str(directory))) == set(runs)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    directory.rename(moved / directory.name)
    again = planned(resume_from=str(moved / directory.name))
    assert keys(again) == keys(planned(resume_from=str(moved / directory.name)))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("absent/global_step_1", {}, "resume_from: .*does not exist"),
        ("", {}, "is not named global_step_N"),
        ("global_step_300", {"target": {"world_size": 2}}, "holds no model_world_size_2_rank_0.pt"),
        ("global_step_300", {"benchmark": {"world_size": 4}}, "benchmark has world_size 4"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_runs(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=said):
        planned(resume_from=str(tmp_path / name), **changes)


def test_a_checkpoint_without_the_critic_is_refused_where_one_is_trained(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, models=("actor",))
    with pytest.raises(ConfigError, match="holds no critic/"):
        planned(resume_from=str(directory))
    assert planned(resume_from=str(directory), overrides=["algorithm.adv_estimator=grpo"])
