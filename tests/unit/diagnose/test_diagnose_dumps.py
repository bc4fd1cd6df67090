"""Two dumps and no alignment: is there a verdict, and is what they cannot say called unknown?"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from rlprobe.diagnose.gate.unmeasured import UNKNOWN
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor


def leaf(top: float, shape: tuple[int, ...] = (4, 8)) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), shape)


def model(wrong: float = 0.0, ids: int = 90, weight: float = 1.0) -> dict[str, Any]:
    """An embedding and four layers; from the second's output on numbers are ``wrong`` too large."""
    tokens = tensor((ids, 0, None, None), (4,), "torch.int64")
    data = {"Module.model.embed.Embedding.forward.0": call([tokens], [leaf(10.0)])}
    for n in range(4):
        given, made = (10.0 + n + k for k in (0, 1))
        given *= 1 + wrong * (n > 1)
        made *= 1 + wrong * (n >= 1)
        data[f"Module.model.layers.{n}.mlp.MLP.forward.0"] = call(
            [leaf(given)], [leaf(made)], parameters={"weight": leaf(weight, (8, 8))}
        )
    return data


def diagnosed(tmp_path: Path, benchmark: Any, target: Any, stage: str = "actor_update") -> Any:
    """The exit code of ``diagnose``, and what it wrote."""
    for side, data in (("b", benchmark), ("t", target)):
        dumps.write(tmp_path / side / stage / "step0/rank0", data)
    out = str(tmp_path / "out")
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", out, "-q"]) in (0, 4)
    code = main(["diagnose", out])
    return code, json.loads((tmp_path / "out/diagnosis.json").read_text())


def states(found: Any) -> dict[str, str]:
    return {item["item"]: item["state"] for item in found["gate"]}


@pytest.mark.parametrize("stage", ["actor_update", "mine"])
def test_the_verdict_names_the_first_that_parts(tmp_path: Path, stage: str) -> None:
    code, found = diagnosed(tmp_path, model(), model(0.01), stage)
    assert (code, found["verdict"]) == (0, "diverged")
    first = found["first"]
    assert (first["stage"], first["module"]) == (stage, "model.layers.1.mlp")
    assert found["stages"][-1]["state"] == "diverged"
    assert main(["verdict", str(tmp_path / "out")]) == 3


def test_equal_dumps_agree_as_far_as_they_say(tmp_path: Path) -> None:
    code, found = diagnosed(tmp_path, model(), model())
    assert (code, found["verdict"]) == (0, "aligned")
    assert main(["verdict", str(tmp_path / "out")]) == 0
    assert states(found)["weights"] == "open"
    # equal statistics are not equal tokens
    assert states(found)["tokens"] == "caveat"
    unknown = {i["item"] for i in found["gate"] if i["evidence"] == UNKNOWN}
    assert unknown >= {"mock proof", "sampling", "configuration", "precision", "repeats", "rewards"}
    assert all(i["state"] == "caveat" for i in found["gate"] if i["evidence"] == UNKNOWN)


@pytest.mark.parametrize(("wrong", "verdict"), [(0.0, "aligned"), (0.01, "diverged")])
@pytest.mark.parametrize("side", ["b", "t"])
def test_generation_on_one_side_is_no_lack(
    tmp_path: Path, side: str, wrong: float, verdict: str
) -> None:
    """A replay does not generate; that the stage is on one side alone is said all the same."""
    many = {f"Module.model.layers.{n}.mlp.MLP.forward.0": call([leaf(1.0)], [leaf(2.0)])
            for n in range(40)}  # fmt: skip
    dumps.write(tmp_path / side / "actor_generate_sequences/step0/rank0", many)
    code, found = diagnosed(tmp_path, model(), model(wrong))
    assert (code, found["verdict"]) == (0, verdict)
    assert states(found)["coverage"] == "open"
    (item,) = [item for item in found["gate"] if item["item"] == "stages and steps"]
    assert item["state"] == "caveat" and "actor_generate_sequences" in item["evidence"]
    extent = found["extent"]["actor_generate_sequences"]["0"]
    assert extent["judged"] == 0 and extent["unjudged"] == {"no_partner": extent["recorded"]}


@pytest.mark.parametrize("stage", ["actor_compute_log_prob", "critic_update"])
def test_another_stage_on_one_side_is_a_lack(tmp_path: Path, stage: str) -> None:
    many = {f"Module.model.layers.{n}.mlp.MLP.forward.0": call([leaf(1.0)], [leaf(2.0)])
            for n in range(40)}  # fmt: skip
    dumps.write(tmp_path / "b" / stage / "step0/rank0", many)
    code, found = diagnosed(tmp_path, model(), model())
    assert (code, found["verdict"]) == (4, "not_comparable")
    assert states(found)["coverage"] == "shut"


def test_generation_alone_is_no_comparison(tmp_path: Path) -> None:
    generated = "actor_generate_sequences"
    dumps.write(tmp_path / "b" / generated / "step0/rank0", model())
    dumps.write(tmp_path / "t/actor_update/step0/rank0", model())
    out = str(tmp_path / "out")
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", out, "-q"]) == 4
    assert main(["diagnose", out]) == 4


@pytest.mark.parametrize(
    ("target", "item", "said"),
    [
        (model(ids=91), "tokens", "Module.model.embed.Embedding.forward.0.input.0 differ"),
        (model(weight=1.5), "weights", "4 of 4 recorded parameters differ"),
        ({"Module.other.Other.forward.0": call([leaf(1.0)], [])}, "stages and steps", "nothing"),
    ],
)
def test_what_dumps_do_show_shuts_the_gate(
    tmp_path: Path, target: Any, item: str, said: str
) -> None:
    code, found = diagnosed(tmp_path, model(), target)
    assert (code, found["verdict"]) == (4, "not_comparable")
    shut = next(i for i in found["gate"] if i["item"] == item)
    assert shut["state"] == "shut" and said in shut["evidence"] and shut["action"]
    assert main(["verdict", str(tmp_path / "out")]) == 4


def test_norms_of_the_same_weights_may_be_accumulated_otherwise(tmp_path: Path) -> None:
    """Two devices add a norm's squares in another order; largest and smallest are elements."""
    target = model()
    for entry in target.values():
        if "parameters" in entry:
            entry["parameters"]["weight"]["Norm"] *= 1 + 1e-6
    _, found = diagnosed(tmp_path, model(), target)
    assert states(found)["weights"] == "open"


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_the_page_is_made_without_an_alignment(tmp_path: Path, wrong: float) -> None:
    diagnosed(tmp_path, model(), model(wrong))
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.html").read_text()
    body = re.sub(r"<script.*?</script>", "", page[page.index("<body") :], flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", " ", body))
    assert str(tmp_path / "b") in text and str(tmp_path / "t") in text
    assert UNKNOWN in text
    assert "On the same rollouts" not in text  # that is what dumps do not say
    assert "rlprobe reproduce" not in text
    assert ("First divergence" in text) == bool(wrong)


def test_a_directory_that_is_neither_says_what_was_sought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "alignment.json" in said and "summary.json" in said


INF = float("inf")


def bare(checksum: str) -> dict[str, Any]:
    """A tensor of which a checksum is all that is known."""
    return {k: v for k, v in tensor(md5=checksum).items() if k not in NAMES}


NAMES = ("Max", "Min", "Mean", "Norm")
#: Both sides of a record that is known to differ, while nothing says by how much.
UNSIZED: dict[str, tuple[Any, Any, str]] = {
    "checksums": (bare("0a0b0c0d"), bare("0a0b0c0e"), "checksums differ; there are no statistics"),
    "xor": (bare("0x11"), bare("0x12"), "checksums differ; there are no statistics"),
    "means alone": (
        tensor((None, None, 0.5, None)), tensor((None, None, 0.7, None)), "relative to what",
    ),
    "opposite infinities": (
        tensor((INF, 0.0, INF, INF)), tensor((1.0, -INF, -INF, INF)), "not the same",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSIZED)
def test_a_difference_of_unknown_size_is_no_agreement(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One record in a hundred: coverage is met, and all others agree."""
    same = {f"Functional.f.{n}.forward": call([leaf(3.0)], [leaf(2.0)]) for n in range(50)}
    b, t = (same | {"Functional.g.0.forward": call([value], [])} for value in UNSIZED[kind][:2])
    code, found = diagnosed(tmp_path, b, t)
    assert (code, found["verdict"]) == (4, "not_comparable")
    item = next(i for i in found["gate"] if i["item"] == "differences of unknown size")
    assert item["state"] == "shut"
    assert "1 record, first Functional.g.0.forward.input.0" in item["evidence"]
    assert UNSIZED[kind][2] in item["evidence"]
    capsys.readouterr()
    paths = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *paths, "-o", str(tmp_path / "again")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Known to differ, by how much nothing says: 1 record")
    assert "Nothing else parts" in printed


def test_a_divergence_of_known_size_is_one_all_the_same(tmp_path: Path) -> None:
    odd = [{"Functional.g.0.forward": call([bare(c)], [])} for c in ("0a0b0c0d", "0a0b0c0e")]
    code, found = diagnosed(tmp_path, model() | odd[0], model(wrong=0.3) | odd[1])
    assert (code, found["verdict"]) == (0, "diverged")
    assert states(found)["differences of unknown size"] == "caveat"


#: What either side recorded of a parameter, or of an embedding's ids, and what is said of it.
NOT_COMPARED: dict[str, tuple[Any, Any, str]] = {
    "checksums of two kinds": (bare("0a0b0c0d"), bare("0x11"), "checksums of two kinds"),
    "checksums of two kinds, turned": (bare("0x11"), bare("0a0b0c0d"), "checksums of two kinds"),
    "the benchmark's alone": (leaf(1.0), None, "recorded on the benchmark alone"),
    "the target's alone": (None, leaf(1.0), "recorded on the target alone"),
    "no statistics": (tensor((None,) * 4), tensor((None,) * 4), "nothing could be compared; first"),
    "checksum against nothing": (
        bare("0a0b0c0d"), tensor((None,) * 4), "nothing could be compared; first",
    ),
    "none": (None, None, "recorded on both sides"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_COMPARED)
@pytest.mark.parametrize("item", ["weights", "tokens"])
def test_why_nothing_was_compared_of_what_was_given_is_said(
    tmp_path: Path, kind: str, item: str
) -> None:
    pair = []
    for own in NOT_COMPARED[kind][:2]:
        given, beside = list[Any](), dict[str, Any]()
        if own is not None and item == "tokens":
            given = [own | {"dtype": "torch.int64"}]
        elif own is not None:
            beside = {"parameters": {"weight": own}}
        # nearly all of the records are others: too little was compared for another reason else
        rest = {f"Functional.f.{n}.forward": call([leaf(3.0)], [leaf(2.0)]) for n in range(50)}
        name = "Module.embed.Embedding.forward.0"
        pair.append(rest | {name: call(given, [leaf(2.0)]) | beside})
    gate = {one["item"]: one for one in diagnosed(tmp_path, pair[0], pair[1])[1]["gate"]}
    assert gate[item]["state"] == "caveat"
    assert NOT_COMPARED[kind][2] in gate[item]["evidence"], gate[item]


def test_equal_checksums_agree(tmp_path: Path) -> None:
    same = {f"Functional.f.{n}.forward": call([bare(f"{n:08x}")], []) for n in range(1, 9)}
    code, found = diagnosed(tmp_path, same, same)
    assert (code, found["verdict"]) == (0, "aligned")
    assert "differences of unknown size" not in states(found)


CONFIGURED = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}, "strategy": "fsdp"}}}


@pytest.mark.parametrize(
    ("changed", "state", "said", "verdict"),
    [
        ({}, "open", "2 settings compared", "aligned"),
        ({"optim": {"lr": 1e-5}}, "shut", "lr: 1e-06 -> 1e-05", "not_comparable"),
        ({"strategy": "fsdp2"}, "caveat", "strategy: fsdp -> fsdp2", "aligned"),
        (None, "caveat", "the target's configuration was not dumped", "aligned"),
        ("{", "caveat", "a configuration cannot be read", "aligned"),
    ],
)
def test_the_configuration_of_a_tree_is_known(
    tmp_path: Path, changed: Any, state: str, said: str, verdict: str
) -> None:
    """The vendor's tree has it beside the stages."""
    for side in "bt":
        (tmp_path / side).mkdir()
    (tmp_path / "b/configurations.json").write_text(json.dumps(CONFIGURED))
    if isinstance(changed, dict):
        actor = CONFIGURED["actor_rollout_ref"]["actor"] | changed
        own = {"actor_rollout_ref": {"actor": actor}}
        (tmp_path / "t/configurations.json").write_text(json.dumps(own))
    elif changed is not None:
        (tmp_path / "t/configurations.json").write_text(changed)
    _, found = diagnosed(tmp_path, model(), model())
    assert found["verdict"] == verdict, found["sentence"]
    (item,) = [i for i in found["gate"] if i["item"] == "configuration"]
    assert item["state"] == state and said in item["evidence"]


@pytest.mark.parametrize(
    ("kind", "benchmark", "target", "cause"),
    [
        ("float", 1e-05, 0.01, "hyperparameter"),
        ("float", 0.0, 0.1, "hyperparameter"),
        ("bool", True, False, "hyperparameter"),
        # a length is what was given, not what anybody chose
        ("int", 4, 5, "unknown"),
    ],
)
def test_an_argument_that_code_gave_otherwise_is_the_cause(
    tmp_path: Path, kind: str, benchmark: Any, target: Any, cause: str
) -> None:
    def side(value: Any, wrong: float) -> dict[str, Any]:
        found = model(wrong)
        before = dict(list(found.items())[:2])
        told = call([leaf(11.0), {"type": kind, "value": value}], [leaf(11.5 * (1 + wrong))])
        within = {"Functional.layer_norm.0.forward": told}
        return before | within | {name: found[name] for name in list(found)[2:]}

    code, found = diagnosed(tmp_path, side(benchmark, 0.0), side(target, 0.01))
    assert (code, found["verdict"]) == (0, "diverged")
    assert found["cause"]["class"] == cause, found["cause"]
    if cause == "hyperparameter":
        assert found["cause"]["known"] == "observed"
        assert f"is told {target} on the target and {benchmark} on the" in found["sentence"]
