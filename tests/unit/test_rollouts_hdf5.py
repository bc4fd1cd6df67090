"""Do recorded rollouts come back as they were, and is everything else refused?"""

import json
import time

import h5py
import numpy as np
import pytest

from rlprobe.errors import ReplayError
from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5, sample_ids
from rlprobe.rollouts.hdf5_layout import digest


def example() -> Rollouts:
    ids = sample_ids(2, ["sha256:aa", "sha256:aa", "sha256:bb"])
    return Rollouts(
        step=2,
        trainer_step=3,
        tensors={
            "responses": np.arange(12, dtype=np.int64).reshape(3, 4),
            "mask": np.array([[True, False], [False, True], [True, True]]),
            "rollout_log_probs": Ragged.from_rows(
                [np.array(row, np.float32) for row in ([-1, -2], [], [-3])]
            ),
            "hidden": np.array([[1], [2], [65535]], dtype=np.uint16),
            "empty": np.empty((3, 0), dtype=np.float16),
        },
        dtypes={"hidden": "bfloat16"},
        values={"uid": ["a", None, {"deep": [1, "é\u0000\ud83d"]}], "turns": [1, 2, 3]},
        value_dtypes={"turns": "int32"},
        meta={"reward_extra_keys": ["acc"]},
        sampling={"temperature": 1.0, "logprobs": "raw"},
        samples=[
            Sample.build(id, "sha256:aa", [1, 2], [3], "1+1=", "2", reward)
            for id, reward in zip(ids, (None, 0.5, float("nan")), strict=True)
        ],
    )


def assert_same(a: Rollouts, b: Rollouts) -> None:
    assert (a.step, a.trainer_step) == (b.step, b.trainer_step)
    assert set(a.tensors) == set(b.tensors)
    for name, one in a.tensors.items():
        other = b.tensors[name]
        if isinstance(one, Ragged):
            assert isinstance(other, Ragged)
            np.testing.assert_array_equal(one.offsets, other.offsets)
            one, other = one.values, other.values
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for part in ("dtypes", "values", "value_dtypes", "meta", "sampling"):
        assert getattr(a, part) == getattr(b, part)
    # repr, because a reward of NaN equals nothing
    assert repr(a.samples) == repr(b.samples)


def test_everything_comes_back(tmp_path):
    hdf5.write(tmp_path / "step2.h5", example())
    assert_same(hdf5.read(tmp_path / "step2.h5"), example())


def test_the_same_content_is_the_same_bytes_at_another_time(tmp_path):
    hdf5.write(tmp_path / "a.h5", example())
    time.sleep(1.1)  # a stored modification time has seconds
    hdf5.write(tmp_path / "b.h5", example())
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_only_numbered_files_are_steps(tmp_path):
    for name in ("step10.h5", "step2.h5", "stepx.h5", "step-1.h5", "other.h5", ".step3.h5.1.tmp"):
        (tmp_path / name).touch()
    assert list(hdf5.steps(tmp_path)) == [2, 10]


def test_a_failed_write_leaves_neither_file_nor_temporary(tmp_path):
    broken = example()
    broken.meta["when"] = object()
    with pytest.raises(ReplayError, match="meta has no JSON form"):
        hdf5.write(tmp_path / "step2.h5", broken)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.tensors.update(x=np.zeros(2)), "has 2 rows, samples 3"),
        (lambda r: r.tensors.update(x=np.float32(1).reshape(())), "it is a scalar"),
        (lambda r: r.tensors.update({"../x": np.zeros(3)}), "cannot name"),
        (lambda r: r.values.update(y=[1]), "has 1 rows, samples 3"),
        (lambda r: r.dtypes.update(responses="bfloat16"), "carried as uint16; found int64"),
        (lambda r: r.dtypes.update(hidden="int3"), "'int3' is unknown"),
        (lambda r: r.samples.append(r.samples[0]), "rows"),
        (lambda r: r.samples.__setitem__(1, r.samples[0]), "is used 2 times"),
        (lambda r: r.tensors.update(x=np.array(["a"] * 3, dtype=object)), "cannot be stored"),
        (lambda r: setattr(r, "step", -1), "count from 0"),
    ],
)
def test_inconsistent_rollouts_are_not_written(tmp_path, change, message):
    rollouts = example()
    change(rollouts)
    with pytest.raises(ReplayError, match=message):
        hdf5.write(tmp_path / "x.h5", rollouts)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [1, 2, 3, 3], [0, 1, 2, 4], [0, -1, 2, 3], []])
def test_offsets_that_do_not_cut_the_values_into_rows_are_refused(offsets):
    with pytest.raises(ReplayError, match="ragged"):
        Ragged(np.zeros(3), np.array(offsets, dtype=np.int64))


# ---------------------------------------------------------------------------------- damaged files


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "step2.h5"
    hdf5.write(path, example())
    return path


def refused(path, message):
    with pytest.raises(ReplayError, match=message) as caught:
        hdf5.read(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path / "step9.h5", r"step9\.h5: no such file")


@pytest.mark.parametrize("content", [b"", b"not hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_what_is_not_hdf5_is_refused(tmp_path, content):
    (tmp_path / "x.h5").write_bytes(content)
    refused(tmp_path / "x.h5", "not a readable rollout file")


def test_every_single_byte_flip_is_noticed_or_harmless(recorded):
    good = recorded.read_bytes()
    noticed = 0
    for position in range(0, len(good), 97):
        damaged = bytearray(good)
        damaged[position] ^= 0x20
        recorded.write_bytes(damaged)
        try:
            found = hdf5.read(recorded)
        except ReplayError:
            noticed += 1
        else:  # the byte was padding between objects
            assert_same(found, example())
    assert noticed > 10


def test_every_truncation_is_noticed(recorded):
    good = recorded.read_bytes()
    for length in range(0, len(good), 211):
        recorded.write_bytes(good[:length])
        refused(recorded, "rollouts")


def rewrite(path, name, data, **kwargs):
    with h5py.File(path, "a") as file:
        if name in file:
            del file[name]
        file.create_dataset(name, data=data, track_times=False, **kwargs)


def reindex(path, change):
    """An index that is consistent with itself: an attacker can compute digests too."""
    with h5py.File(path, "a") as file:
        index = json.loads(file["index"][...].tobytes())
        change(index)
        data = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
        del file["index"]
        file.create_dataset("index", data=data)
        file["index"].attrs["sha256"] = np.bytes_(digest("index", data).encode())


def test_changed_values_are_noticed(recorded):
    with h5py.File(recorded, "a") as file:
        file["tensors/responses"][0, 0] = 99
    refused(recorded, "/tensors/responses does not match its sha256")


def test_another_shape_with_the_same_bytes_is_noticed(recorded):
    rewrite(recorded, "tensors/responses", np.arange(12).reshape(4, 3))
    refused(recorded, "/tensors/responses does not match its sha256")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tensors/responses", "/tensors/responses is missing"),
        ("tensors/rollout_log_probs/offsets", "offsets is missing"),
        ("tensors", "/tensors is missing"),
        ("json/samples", "/json/samples is missing"),
        ("index", "/index is missing"),
    ],
)
def test_a_missing_dataset_is_named(recorded, name, complaint):
    with h5py.File(recorded, "a") as file:
        del file[name]
    refused(recorded, complaint)


def test_a_dataset_nobody_asked_for_is_refused(recorded):
    rewrite(recorded, "tensors/extra", np.zeros(3))
    refused(recorded, "/tensors/extra does not belong there")


@pytest.mark.parametrize(
    "link", [h5py.SoftLink("/tensors/mask"), h5py.ExternalLink("/etc/passwd", "/x")]
)
def test_links_are_refused(recorded, link):
    with h5py.File(recorded, "a") as file:
        del file["tensors/responses"]
        file["tensors/responses"] = link
    refused(recorded, "/tensors/responses is a link")


def test_a_virtual_dataset_is_refused(recorded, tmp_path):
    with h5py.File(tmp_path / "source.h5", "w") as source:
        source["x"] = np.arange(12).reshape(3, 4)
    layout = h5py.VirtualLayout((3, 4), dtype="i8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "source.h5"), "x", shape=(3, 4))
    with h5py.File(recorded, "a") as file:
        del file["tensors/responses"]
        file.create_virtual_dataset("tensors/responses", layout)
    refused(recorded, "/tensors/responses is not stored contiguously")


def test_external_storage_is_refused(recorded, tmp_path):
    (tmp_path / "outside").write_bytes(bytes(96))
    with h5py.File(recorded, "a") as file:
        del file["tensors/responses"]
        file.create_dataset(
            "tensors/responses", (3, 4), "i8", external=[(str(tmp_path / "outside"), 0, 96)]
        )
    refused(recorded, "keeps its data in another file")


def test_compressed_data_is_refused_so_that_no_bomb_is_unpacked(recorded):
    rewrite(recorded, "tensors/responses", np.zeros((3, 4), "i8"), compression="gzip")
    refused(recorded, "is not stored contiguously")


@pytest.mark.parametrize("shape", [(3, 2**50), (2**60,), (3, 2**29, 2**29)])
def test_a_shape_the_file_cannot_hold_is_refused_without_allocating(recorded, shape):
    with h5py.File(recorded, "a") as file:
        del file["tensors/responses"]
        file.create_dataset("tensors/responses", shape, "u1")
    refused(recorded, r"/tensors/responses claims \d+ bytes and holds")


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(3, dtype=[("a", "i8"), ("b", "f4")]),
        np.array([b"ab", b"c", b"d"]),
        np.zeros(3, dtype=complex),
        np.array([True, False, True]),  # h5py's bool is an enum with names of its own
    ],
)
def test_other_element_types_are_refused(recorded, data):
    rewrite(recorded, "tensors/responses", data)
    refused(recorded, "has element type .*, which is refused")


@pytest.mark.parametrize("kind", [h5py.string_dtype(), h5py.vlen_dtype(np.int32), h5py.ref_dtype])
def test_object_types_are_refused(recorded, kind):
    with h5py.File(recorded, "a") as file:
        del file["tensors/responses"]
        file.create_dataset("tensors/responses", (3,), dtype=kind)
    refused(recorded, "has element type .*, which is refused")


def test_a_scalar_where_rows_are_expected_is_refused(recorded):
    rewrite(recorded, "tensors/responses", np.int64(3))
    refused(recorded, "has 0 axes")


def test_an_unknown_version_is_refused(recorded):
    with h5py.File(recorded, "a") as file:
        file.attrs["version"] = np.int64(2)
    refused(recorded, "made by a newer rlprobe: its format is 2")


@pytest.mark.parametrize("value", ["text of varying length", np.zeros(4), np.float64(1)])
def test_an_attribute_of_another_type_is_refused(recorded, value):
    with h5py.File(recorded, "a") as file:
        del file.attrs["version"]
        file.attrs["version"] = value
    refused(recorded, "attribute 'version' has an unknown type")


def test_someone_elses_hdf5_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = np.zeros(3)
    refused(tmp_path / "x.h5", "attribute 'format' is missing; this is not a rollout file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(rows=4), "says 4 rows, samples are 3"),
        (lambda i: i.update(step=-5), "count from 0"),
        (lambda i: i.update(step="0"), "step that is no int"),
        (lambda i: i.update(step=True), "step that is no int"),
        (lambda i: i.pop("rows"), "members of this format"),
        (lambda i: i["tensors"].update({"../../x": {}}), "cannot name a tensor"),
        (lambda i: i["tensors"].update(responses={"kind": "sparse", "dtype": "int64"}), "unknown"),
        (lambda i: i["tensors"]["responses"].update(dtype="pickle"), "'pickle' is unknown"),
        (lambda i: i["tensors"]["responses"].update(dtype="bool"), "not the bool"),
        (lambda i: i["digests"].pop("tensors/mask"), "does not match"),
    ],
)
def test_an_index_that_lies_is_refused(recorded, change, message):
    reindex(recorded, change)
    refused(recorded, message)


def replace_json(path, part, value):
    data = np.frombuffer(value, dtype=np.uint8)
    rewrite(path, f"json/{part}", data)
    reindex(path, lambda i: i["digests"].update({f"json/{part}": digest(f"json/{part}", data)}))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("samples", b"{}", "/json/samples is not a list"),
        ("samples", b"[1,2,3]", "sample does not have the members"),
        ("values", b"[]", "/json/values is not a mapping"),
        ("values", b'{"x": 3}', "not a column"),
        ("meta", b"\xff\xfe", "/json/meta: is UTF-16"),
        ("meta", b"\x80", "/json/meta: byte 0: not JSON"),
        ("meta", b"[" * 200_000, "/json/meta: nests deeper than 64 levels"),
        ("value_dtypes", b'{"turns": "O"}', "unknown element type 'O'"),
    ],
)
def test_json_of_another_form_is_refused(recorded, part, value, message):
    replace_json(recorded, part, value)
    refused(recorded, message)


def test_rows_that_overrun_their_values_are_refused(recorded):
    name = "tensors/rollout_log_probs/offsets"
    offsets = np.array([0, 2**62, 2**62, 3], dtype=np.int64)
    rewrite(recorded, name, offsets)
    reindex(recorded, lambda i: i["digests"].update({name: digest(name, offsets)}))
    refused(recorded, "ragged offsets must rise from 0 to 3")
