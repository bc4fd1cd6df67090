"""Are equal numbers equal bytes, and is nothing lost?"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprobe.errors import DumpError
from rlprobe.store.canonical import dump_json, dump_path, stack_json

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["dump_data_dir", '"dump_data_dir": "x",', "a\\", "{"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dump_data_dir", "data", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def without(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "dump_data_dir"}


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["task", "data", "level", "x"]), json_values),
    st.none() | st.text(),
    st.integers(0, 4),
    st.sampled_from([None, 0, 1, 4]),
    st.booleans(),
)
def test_only_dump_data_dir_goes_wherever_it_stands(others, directory, place, indent, ascii_only):
    items = list(others.items())
    items.insert(place, ("dump_data_dir", directory))
    text = json.dumps(dict(items), indent=indent, ensure_ascii=ascii_only)
    result, removed = dump_json(text, "dump.json")
    # repr, because NaN equals nothing
    assert repr(json.loads(result)) == repr(without(dict(items)))
    assert removed == {"dump_data_dir": directory}
    assert dump_json(result, "dump.json") == (result, {})


def test_numbers_keep_every_digit_and_what_is_no_strict_json_stays():
    text = (
        '{"task": "statistics", "dump_data_dir": null, "data": {"a": [1.0000000000000000001, NaN, '
        "-Infinity, 1e400]}}"
    )
    result, _ = dump_json(text, "dump.json")
    assert result == text.replace('"dump_data_dir": null, ', "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"dump_data_dir": ',
        '{"dump_data_dir" "x"}',
        '{"dump_data_dir": 3}',
        '{"dump_data_dir": "a", "dump_data_dir": "b"}',
        '{3: "dump_data_dir"}',
        '{"data": ' + "[" * 100_000 + ', "dump_data_dir": "x"}',
    ],
)
def test_a_file_that_is_not_of_the_format_is_refused(text):
    with pytest.raises(DumpError, match=r"dump\.json"):
        dump_json(text, "dump.json")


# ------------------------------------------------------------------------------------------ stacks


def stack(*paths: str) -> str:
    frames = [f"File {path}, line {i}, in f, \n x = 1" for i, path in enumerate(paths, 1)]
    return json.dumps({"0": [["Module.a"], frames]}, indent=1)


def test_two_machines_have_the_same_stack():
    here = stack(
        "/opt/env/lib/python3.11/site-packages/torch/nn/module.py",
        "/opt/env/lib/python3.11/runpy.py",
        "/home/a/site/recipe/main.py",
        "/home/a/site/verl/trainer.py",
        "/tmp/ray/session_2026-01-01/runtime_resources/working_dir_files/_ray_pkg_1/entry.py",
    )
    there = stack(
        "/usr/lib/python3/dist-packages/../site-packages/torch/nn/module.py",
        "/usr/lib/python3.11/runpy.py",
        "/data/recipe/main.py",
        "/data/verl/trainer.py",
        "/scratch/ray/session_x/working_dir_files/_ray_pkg_2/entry.py",
    )
    assert stack_json(here)[0] == stack_json(there)[0]
    assert "<path-1>/recipe/main.py" in stack_json(here)[0]
    assert stack_json(here)[1]["<site-packages>"] == "/opt/env/lib/python3.11/site-packages"


def test_files_from_unrelated_directories_get_names_in_order_of_appearance():
    text, removed = stack_json(stack("/data/p/a.py", "/srv/q/b.py", "/data/p/sub/c.py"))
    assert removed == {"<path-1>": "/data/p", "<path-2>": "/srv/q"}
    assert "File <path-1>/sub/c.py, line 3" in text


def test_two_package_directories_stay_two():
    text, removed = stack_json(stack("/a/site-packages/x.py", "/b/site-packages/x.py"))
    assert removed == {
        "<site-packages>": "/a/site-packages",
        "<site-packages-2>": "/b/site-packages",
    }
    assert "<site-packages-2>/x.py" in text


def test_source_lines_that_look_like_frames_are_left_alone():
    text = json.dumps(
        {"0": [["a"], ['File /x/y.py, line 1, in f, \n print("File /z/w.py, line 2")']]}
    )
    assert r"\"File /z/w.py, line 2\"" in stack_json(text)[0]


segment = st.text(
    st.characters(exclude_characters="/,\n", exclude_categories=["Cs"]), min_size=1, max_size=4
) | st.sampled_from(["site-packages", "lib", "python3.11", "recipe"])
path = st.lists(segment, min_size=1, max_size=5).map(lambda parts: "/" + "/".join(parts))


@settings(deadline=None)
@given(st.lists(path, min_size=1, max_size=6))
def test_what_is_taken_out_gives_the_paths_back(paths):
    text, removed = stack_json(stack(*paths))
    for original, frame in zip(paths, json.loads(text)["0"][1], strict=True):
        short = frame.removeprefix("File ").rpartition(", line ")[0].partition(", line ")[0]
        name = short.partition("/")[0]
        # prefixes are kept as they stand in the file: JSON text
        prefix = json.loads(f'"{removed[name]}"') if name in removed else name
        assert prefix + short[len(name) :] == original.partition(", line ")[0]
    assert stack_json(text)[0] == text


# ------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("actor_update/step0/proc123/dump.json", "actor_update/step0/rank0/dump.json"),
        (
            "actor_update/step0/proc123/dump_tensor_data/x.pt",
            "actor_update/step0/rank0/dump_tensor_data/x.pt",
        ),
        ("actor_update/step0/rank3/dump.json", "actor_update/step0/rank3/dump.json"),
        ("proc1/step0/dump.json", "proc1/step0/dump.json"),
        ("a/step0/proc1", "a/step0/proc1"),
    ],
)
def test_a_process_number_becomes_a_rank(path, canonical):
    assert dump_path(path) == canonical
