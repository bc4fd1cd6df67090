"""Does a key change exactly when something declared changes?"""

import hashlib
import json
import shutil
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprobe.errors import ConfigError
from rlprobe.store.keys import canonical_json, data_digest, model_id, run_key

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # lone surrogates too: YAML and JSON let them in
    | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_a_run_key_is_the_sha256_of_this_text():
    declared = {"b": [1, 2.5, None], "a": {"ü": True}}
    text = b'{"a":{"\\u00fc":true},"b":[1,2.5,null]}'
    assert canonical_json(declared) == text
    assert run_key(declared) == hashlib.sha256(text).hexdigest()


@settings(deadline=None)
@given(json_values)
def test_the_canonical_text_says_the_same_as_the_value(value):
    text = canonical_json(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    assert canonical_json(json.loads(text)) == text


@settings(deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=6), st.randoms())
def test_the_order_in_which_keys_were_declared_does_not_matter(declared, random):
    items = list(declared.items())
    random.shuffle(items)
    assert run_key(dict(items)) == run_key(declared)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_a_number_that_is_not_finite_has_no_key(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        run_key({"x": value})


def test_keys_that_json_would_merge_are_refused():
    with pytest.raises(TypeError, match="key 1 is not text"):
        run_key({"x": [{"1": 0, 1: 1}]})


# ------------------------------------------------------------------------------------------ models


def write_safetensors(path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"rms_norm_eps": 1e-6}')
    write_safetensors(path / "model.safetensors", {"embed": bytes(2_000_000), "norm": b"\1" * 1000})
    return path


def test_a_model_is_the_same_wherever_it_lies(model, tmp_path):
    shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    assert model_id(tmp_path / "elsewhere" / "copy") == model_id(model)


def test_a_fine_tuned_copy_with_equal_header_and_size_is_another_model(model):
    before = model_id(model)
    write_safetensors(
        model / "model.safetensors", {"embed": bytes(2_000_000), "norm": b"\2" * 1000}
    )
    assert model_id(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: (m / "config.json").write_text('{"rms_norm_eps": 1e-5}'),
        lambda m: (m / "tokenizer.json").write_text("{}"),
        lambda m: (m / "model.safetensors").rename(m / "other.safetensors"),
        lambda m: (m / "sub").mkdir() or (m / "sub" / "x.bin").write_bytes(b"1"),
    ],
)
def test_what_can_change_numbers_changes_the_id(model, change):
    before = model_id(model)
    change(model)
    assert model_id(model) != before


@pytest.mark.parametrize("name", ["README.md", "LICENSE", ".gitattributes", ".cache/x"])
def test_what_cannot_change_numbers_does_not_change_the_id(model, name):
    before = model_id(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("text")
    assert model_id(model) == before


def test_a_model_of_links_as_the_hub_cache_has_them_is_the_model(model, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert model_id(linked) == model_id(model)


def test_large_weights_of_unknown_format_count_by_size_and_samples(model):
    weights = model / "pytorch_model.bin"
    weights.write_bytes(bytes(3_000_000))
    before = model_id(model)
    weights.write_bytes(bytes(2_999_999) + b"\1")
    assert model_id(model) != before


def test_a_header_that_is_no_safetensors_is_sampled_like_any_file(model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(2_000_000))
    assert len(model_id(model)) == 64


def test_an_empty_directory_holds_no_model(tmp_path):
    with pytest.raises(ConfigError, match="holds no model"):
        model_id(tmp_path)


# -------------------------------------------------------------------------------------------- data


def test_data_count_by_content_and_order_not_by_name(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (tmp_path / name for name in "abc")
    assert data_digest([a, b]) == data_digest([c, b])
    assert data_digest([a, b]) != data_digest([b, a])
    assert data_digest([a]) != data_digest([a, a])


def test_a_missing_data_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data file .*nowhere: No such file"):
        data_digest([tmp_path / "nowhere"])
