"""The faults written blind are as their answers say, and patch what is there."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlprobe.causes import CAUSES
from rlprobe.stages import STAGES
from tests.blind_faults import lawless

HERE = Path(lawless.__file__).parent
ON_VERL = sorted((HERE / "on_verl").glob("*.py"))


def declared() -> dict[str, dict[str, Any]]:
    """The arguments of every ``@fault``, read and not run: importing verl takes long."""
    found = {}
    for file in ON_VERL:
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "fault":
                    assert node.name not in found, f"{node.name} is there twice"
                    found[node.name] = {
                        str(word.arg): ast.literal_eval(word.value) for word in call.keywords
                    }
    return found


def test_each_fault_is_declared_as_its_answer_says():
    faults, told = declared(), yaml.safe_load(lawless.ANSWERS.read_text())["verl"]
    assert len(faults) == 40
    assert faults.keys() == told.keys()
    for name, fault in faults.items():
        answer = told[name]
        assert fault["stage"] == answer["stage"], name
        assert fault.get("module") in answer["modules"], name
        assert fault["cause"] == answer["cause"], name
        assert fault.get("verdict", "diverged") == answer.get("verdict", "diverged"), name
        assert answer["cause"] not in answer.get("also_true", []), name
        assert {answer["cause"], *answer.get("also_true", [])} <= set(CAUSES), name


def test_they_are_spread_as_they_should_be():
    needs = [fault.get("needs") for fault in declared().values()]
    assert sum(need is None for need in needs) >= 24
    assert sum(need is not None for need in needs) >= 12


def names_of(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("package", "file", "name", "arguments"),
    [
        ("verl", "workers/engine/fsdp/transformer_impl.py", "_scale_logits_by_temperature",
         ["logits", "temperature"]),
        ("verl", "utils/torch_functional.py", "logprobs_from_logits", ["logits", "labels"]),
        ("verl", "utils/torch_functional.py", "entropy_from_logits", ["logits"]),
        ("verl", "trainer/ppo/core_algos.py", "compute_policy_loss_vanilla",
         ["old_log_prob", "log_prob", "response_mask", "loss_agg_mode"]),
        ("verl", "trainer/ppo/core_algos.py", "compute_value_loss",
         ["vpreds", "returns", "values", "response_mask", "cliprange_value"]),
        ("verl", "trainer/ppo/core_algos.py", "agg_loss", ["loss_mat", "loss_mask"]),
        ("verl", "workers/utils/padding.py", "no_padding_2_padding", ["tensor", "data"]),
        ("transformers", "models/qwen2/modeling_qwen2.py", "eager_attention_forward",
         ["query", "key", "value", "attention_mask", "scaling"]),
    ],
)  # fmt: skip
def test_what_is_replaced_is_there(package, file, name, arguments):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {package}")
    found = names_of(Path(spec.origin).parent / file)
    taken = {argument.arg for argument in found[name].args.args + found[name].args.kwonlyargs}
    assert set(arguments) <= taken


def test_thirty_cases_have_answers():
    told = lawless.answers()
    assert len(lawless.CASES) == 30
    assert lawless.CASES.keys() == told.keys()
    for name, answer in told.items():
        assert "unknown" in answer.may_say, name
        assert answer.may_say <= set(CAUSES), name
        assert answer.stage == lawless.CASES[name].stage, name
        assert answer.stage in STAGES, name
        assert answer.would_be_false, name


@pytest.mark.parametrize("name", lawless.CASES)
def test_a_case_disturbs_well_above_round_off(name):
    """On numbers like a projection's; the second call, as one case gives the first one's values."""
    drawn = np.random.default_rng(0)
    faults = lawless.CASES[name].device().faults
    modules = {re.sub(r"^.* ", "", word).removesuffix(".weight") for word in faults}
    assert modules & {str(m) for m in lawless.answers()[name].modules} or modules == {"answers"}
    for harm in faults.values():
        first, y = drawn.standard_normal((2, 2, 14, 32)).astype(np.float32)
        harm(first)
        before = y.copy()
        changed = np.asarray(harm(y))
        assert np.array_equal(y, before), "it changes what it was given"
        assert changed.shape == y.shape
        assert np.isfinite(changed).all()
        assert np.linalg.norm(changed - y) > 1e-3 * np.linalg.norm(y)


def test_a_device_made_anew_draws_the_same():
    y = np.random.default_rng(1).standard_normal((2, 14, 32)).astype(np.float32)

    def first_and_second() -> list[Any]:
        (harm,) = lawless.CASES["gaussian_noise"].device(3).faults.values()
        return [harm(y), harm(y)]

    one, other = first_and_second(), first_and_second()
    assert np.array_equal(one, other)
    assert not np.array_equal(one[0], one[1])
