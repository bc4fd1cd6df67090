"""What happens to files that are missing, are not YAML, or say a thing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlprobe.config import load, read_yaml
from rlprobe.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_missing_file_is_one_message() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load("nowhere.yaml")


def test_a_file_that_is_no_yaml_is_named_with_the_place(tmp_path: Path) -> None:
    path = written(tmp_path, "name: [a\nframework: verl\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: line 2, column 10: not YAML"):
        load(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"line 3, column 1: not YAML: the key 'seed' was given"):
        load(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_said_to_be(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffname: a\n".encode(encoding))
    with pytest.raises(ConfigError, match=r"a\.yaml: is UTF-16, .* UTF-8"):
        load(path)


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_a_file_without_keys_is_refused_listing_the_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"accepted: a mapping with the keys name, framework"):
        load(written(tmp_path, text))


def test_numbers_mean_what_they_look_like(tmp_path: Path) -> None:
    path = written(tmp_path, "time: 12:30:00\ndate: 2026-01-01\nzero: 010\nrate: 1e-3\nplain: 3\n")
    assert read_yaml(path) == {
        "time": "12:30:00",
        "date": "2026-01-01",
        "zero": 10,
        "rate": 0.001,
        "plain": 3,
    }


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    path = written(tmp_path, "a: &side {device: cpu}\nb: {<<: *side, precision: fp32}\n")
    assert read_yaml(path)["b"] == {"device": "cpu", "precision": "fp32"}
