"""msprobe's mapping files: does each kind pair what it names, and only that?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from rlprobe.compare.match import rules
from rlprobe.errors import ConfigError
from tests.msprobe import dumps
from tests.msprobe.dumps import call
from tests.unit.compare_helpers import Result, compared_data
from tests.unit.named_modules import assert_all_equal, leaf, modules


def _mapped(tmp_path: Path, benchmark: Any, target: Any, text: str) -> Result:
    file = tmp_path / "mapping.yaml"
    file.write_text(text)
    return compared_data(tmp_path, benchmark, target, rules=rules.load(file))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        # data mapping (-dm), and the mapping of calls that msprobe writes of a layer mapping
        (
            "Module.net.fc2.Dense.forward.0.input.0: Module.fc1.Linear.forward.0.input.0\n"
            "Module.net.fc2.Dense.forward.0.output.0: Module.fc1.Linear.forward.0.output.0\n"
            "Module.net.x.Dense.forward.0.output.0: N/A\n",
            "net.fc2.Dense",
        ),
        ("Module.net.fc2.Dense.forward.0: Module.fc1.Linear.forward.0\n", "net.fc2.Dense"),
        # cell mapping (-cm): the whole name, or a part of it
        ("net.fc2.Dense: fc1.Linear\n", "net.fc2.Dense"),
        ("Cell.net.fc2.Dense: Module.fc1.Linear\n", "net.fc2.Dense"),
        ("net.fc2: fc1\n", "net.fc2.Dense"),
        # layer mapping (-lm): child by child, in the old and the new word for the top
        ("TopLayer:\n  net.fc2: fc1\n", "net.fc2.Dense"),
        ("Cell:\n  net.fc2: fc1(1)\n", "net.fc2.Dense"),
    ],
)
def test_msprobes_mapping_files_are_read(tmp_path: Path, text: str, target: str) -> None:
    result = _mapped(tmp_path, modules("fc1.Linear"), modules(target), text)
    assert_all_equal(result, msprobe_mapping=2)


def test_a_mapping_goes_before_equal_names(tmp_path: Path) -> None:
    """The target's fc1 is the benchmark's fc2 and the other way round."""
    benchmark = modules("fc1.Linear", "fc2.Linear")
    target = modules("fc2.Linear", "fc1.Linear", "more.Linear")
    result = _mapped(
        tmp_path, benchmark, target, "fc1.Linear: fc2.Linear\nfc2.Linear: fc1.Linear\n"
    )
    assert result.records["error"].max() == 0
    assert result.summary["rules"] == {"msprobe_mapping": 4}


def test_a_mapping_holds_where_both_sides_have_the_same_names(tmp_path: Path) -> None:
    plain = modules("fc1.Linear", "fc2.Linear")
    swapped = dict(zip(plain, reversed(plain.values()), strict=True))
    text = "fc1.Linear: fc2.Linear\nfc2.Linear: fc1.Linear\n"
    result = _mapped(tmp_path, plain, swapped, text)
    assert result.records["error"].max() == 0
    assert result.summary["rules"] == {"msprobe_mapping": 4}


def test_a_layer_mapping_goes_down_by_class(tmp_path: Path) -> None:
    benchmark = modules(
        "layers.0.Layer", "layers.0.attention.Core", "layers.0.attention.out.Linear"
    )
    target = modules("blocks.0.Block", "blocks.0.att.Core", "blocks.0.att.proj.o.Linear")
    text = "TopLayer: {blocks: layers}\nBlock: {att: attention}\nCore: {proj.o: out}\n"
    result = _mapped(tmp_path, benchmark, target, text)
    assert_all_equal(result, msprobe_mapping=6)


def test_an_api_mapping_pairs_arguments_by_place(tmp_path: Path) -> None:
    benchmark = {"Functional.ln.0.forward": call([leaf(1.0), leaf(2.0)], [leaf(3.0)])}
    target = {"NPU.fused.0.forward": call([leaf(2.0), leaf(1.0), leaf(9.0)], [leaf(3.0)])}
    text = (
        "- {ms_api: NPU.fused, pt_api: Functional.ln, ms_args: [0, 1], pt_args: [1, 0],\n"
        "   ms_output: [0], pt_output: [0]}\n"
    )
    result = _mapped(tmp_path, benchmark, target, text)
    assert result.summary["rules"] == {"msprobe_mapping": 3}
    assert result.records["error"].max() == 0
    assert result.summary["counts"]["target_only"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {ms_api: A.b, pt_api: C.d, ms_args: [0, 1], pt_args: [0]}", "lists of one length"),
        ("- {ms_api: A.b, pt_api: 3}", "are names"),
        ("- {ms_api: A.b, pt_api: C.d}", "no argument or output is mapped"),
        ("TopLayer: {a: b}\nBlock: c\n", "'Block': a layer mapping has"),
        ("TopLayer: {a: 1}\n", "names are texts"),
        ("a: 1\n", "msprobe's data, cell, layer or api mappings"),
    ],
)
def test_a_mapping_file_that_is_none_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rules.parse(text, "mapping.yaml")


#: A file of rules, and what of it meets nothing where the target has ``net.fc2.Dense`` alone.
IDLE: dict[str, tuple[str, list[str]]] = {
    "cell": ("net.fc2.Dense: fc1.Linear\nnet.fc3.Dense: fc3.Linear\n", ["net.fc3.Dense"]),
    "part": ("net.fc2: fc1\nnet.fd: fd\n", ["net.fd"]),
    "call": (
        "Module.net.fc2.Dense.forward.0: Module.fc1.Linear.forward.0\n"
        "Module.net.fc2.Dense.forward.1: Module.fc1.Linear.forward.1\n",
        ["Module.net.fc2.Dense.forward.1"],
    ),
    "record": (
        "Module.net.fc2.Dense.forward.0.input.0: Module.fc1.Linear.forward.0.input.0\n"
        "Module.net.fc2.Dense.forward.0.output.7: Module.fc1.Linear.forward.0.output.7\n",
        ["Module.net.fc2.Dense.forward.0.output.7"],
    ),
    "layer": ("TopLayer:\n  net.fc2: fc1\n  net.fc9: fc9\n", ["TopLayer: net.fc9"]),
    "api": (
        "- {ms_api: mint.add, pt_api: Torch.add, ms_args: [0], pt_args: [0]}\n",
        ["mint.add"],
    ),
    "own": (
        "format: 1\nrename:\n  - {name: meets, replace: [['^net.fc2$', 'fc1']]}\n"
        "  - {name: idle, replace: [['^other', 'fc1']]}\n"
        "fuse:\n  - {name: apart, whole: kv, parts: [k, v]}\n",
        ["idle", "apart"],
    ),
    "all used": ("net.fc2.Dense: fc1.Linear\nfc4.Dense: N/A\n", []),
}


@pytest.mark.parametrize("kind", IDLE)
def test_what_of_a_file_of_rules_meets_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    text, idle = IDLE[kind]
    (tmp_path / "rules.yaml").write_text(text)
    # two ranks: what one of them alone uses is used
    for side, name in (("b", "fc1.Linear"), ("t", "net.fc2.Dense")):
        dumps.write(tmp_path / side / "step0/rank0", modules(name))
        dumps.write(tmp_path / side / "step0/rank1", modules("plain.Linear"))
    pair = [str(tmp_path / side) for side in "bt"]
    rest = ["-o", str(tmp_path / "o"), "--rules", str(tmp_path / "rules.yaml")]
    assert main(["compare", *pair, *rest]) in (0, 4)
    said = capsys.readouterr().err
    file = tmp_path / "rules.yaml"
    count = f"{len(idle)} {'entry' if len(idle) == 1 else 'entries'} of {file} met nothing: "
    assert (count + ", ".join(idle) in said) if idle else ("met nothing" not in said)
