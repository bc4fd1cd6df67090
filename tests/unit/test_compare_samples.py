"""Do the tokens of one sample meet, however the two runs batched, ordered and padded them?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.compare.samples import sketches
from rlprobe.compare.samples.run import Compared, Samples
from rlprobe.dumps import key_data
from rlprobe.dumps.proof import Entry
from rlprobe.dumps.results import KEY_DATA, TOKEN_SKETCHES
from rlprobe.errors import DumpError
from rlprobe.rollouts.digest import sample_digest
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

#: Prompt and response tokens of four samples.
SAMPLES = [
    ([1, 2, 3], [10, 11]),
    ([4], [12, 13, 14]),
    ([5, 6], [15]),
    ([7, 8, 9, 1], [16, 17, 18]),
]
DIGESTS = [sample_digest(*sample) for sample in SAMPLES]


def log_probs(sample: int) -> np.ndarray[Any, Any]:
    """One number for each response token."""
    return -np.arange(1.0, len(SAMPLES[sample][1]) + 1) - 10 * sample


def save(data: Path, key: str, place: tuple[int, int], array: Any, **about: Any) -> None:
    rank, micro = place
    directory = data / key / "step0" / f"rank{rank}" / f"micro_step{micro}"
    directory.mkdir(parents=True)
    np.save(directory / f"{key}.npy", np.asarray(array))
    (directory / f"{key}.json").write_text(json.dumps({"data": about}))


def padded(
    data: Path, place: tuple[int, int], samples: Sequence[int], error: float = 0.0, pad: int = 6
) -> None:
    """A batch as older trainers have it: prompts padded left, responses right."""
    prompts, responses, masks, values = [], [], [], []
    for sample in samples:
        prompt, response = SAMPLES[sample]
        left, right = pad - len(prompt), pad - len(response)
        prompts.append([0] * left + prompt)
        responses.append(response + [0] * right)
        masks.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
        # padding holds whatever the device left there
        values.append([*(log_probs(sample) + error), *np.random.default_rng(pad).random(right)])
    save(data, "prompts", place, prompts)
    save(data, "responses", place, responses)
    save(data, "attention_mask", place, masks)
    save(data, "old_log_probs", place, values)


def ragged(data: Path, place: tuple[int, int], samples: Sequence[int], error: float = 0.0) -> None:
    """A batch as newer trainers have it: rows end to end."""
    for key, rows in (
        ("prompts", [SAMPLES[s][0] for s in samples]),
        ("responses", [SAMPLES[s][1] for s in samples]),
        ("input_ids", [SAMPLES[s][0] + SAMPLES[s][1] for s in samples]),
        ("old_log_probs", [log_probs(s) + error for s in samples]),
    ):
        ends = np.cumsum([len(row) for row in rows]).tolist()
        save(data, key, place, np.concatenate(rows), offsets=[0, *ends])


def both(tmp: Path, stage: str = stages.LOG_PROB) -> Compared:
    found = Samples(tmp / "b", tmp / "t").compare(stage)
    assert found is not None
    return found


def compared(tmp: Path, stage: str = stages.LOG_PROB) -> dict[str, Any]:
    return both(tmp, stage).summary


def joined(tmp: Path, stage: str = stages.LOG_PROB) -> pl.DataFrame:
    return both(tmp, stage).tables[KEY_DATA]


def test_other_batches_ranks_order_and_padding_are_the_same_samples(tmp_path: Path) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1, 2, 3], pad=6)
    padded(tmp_path / "t/data", (0, 0), [3, 1], pad=9)
    padded(tmp_path / "t/data", (1, 0), [2], pad=7)
    padded(tmp_path / "t/data", (1, 1), [0], pad=6)
    table = joined(tmp_path)
    assert table["status"].unique().to_list() == ["matched"]
    assert table["identical"].all() and table.height == 4 * 4
    found = table.filter(key="old_log_probs").sort("row_benchmark")
    assert found["sample"].to_list() == DIGESTS
    assert found.select("rank_target", "micro_step_target", "row_target").rows() == [
        (1, 1, 0),
        (0, 0, 1),
        (1, 0, 0),
        (0, 0, 0),
    ]
    assert found["tokens_benchmark"].to_list() == [2, 3, 1, 3]


def test_padded_rows_meet_ragged_ones(tmp_path: Path) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1, 2, 3])
    ragged(tmp_path / "t/data", (0, 0), [2, 3])
    ragged(tmp_path / "t/data", (0, 1), [0, 1])
    table = joined(tmp_path).filter(pl.col("key").is_in(["old_log_probs", "prompts", "responses"]))
    assert table.height == 12 and table["identical"].all()


def test_a_difference_is_found_at_its_token(tmp_path: Path) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    ragged(tmp_path / "t/data", (0, 0), [1, 0])
    place = tmp_path / "t/data/old_log_probs/step0/rank0/micro_step0/old_log_probs.npy"
    values = np.load(place)
    values[2] += 0.5  # the last token of sample 1
    np.save(place, values)
    table = joined(tmp_path).filter(key="old_log_probs")
    (row,) = table.filter(sample=DIGESTS[1]).iter_rows(named=True)
    assert (row["max_abs_err"], row["max_abs_token"], row["first_token"]) == (0.5, 2, 2)
    assert row["error"] == pytest.approx(0.5 / np.linalg.norm(log_probs(1)))
    assert table.filter(sample=DIGESTS[0])["identical"].all()


def test_key_data_of_mapped_steps_meet(tmp_path: Path) -> None:
    """The benchmark's step 0 is the target's step 5 after it was resumed."""
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    padded(tmp_path / "t/data", (0, 0), [1, 0])
    for key in (tmp_path / "t/data").iterdir():
        (key / "step0").rename(key / "step5")
    for more in ("step1", "step2"):
        (tmp_path / "b/data/prompts" / more).mkdir()
    (tmp_path / "t/data/prompts/step6").mkdir()
    nothing = Samples(tmp_path / "b", tmp_path / "t").compare(stages.LOG_PROB)
    assert nothing is not None and nothing.tables == {}
    (note,) = nothing.summary["notes"]
    assert "no step in common: the benchmark has steps 0 to 2, the target 5 to 6" in note
    assert "--map-step 0:5" in note
    mapped = Samples(tmp_path / "b", tmp_path / "t", {0: 5})
    found = mapped.compare(stages.LOG_PROB)
    assert found is not None
    assert found.summary["keys"]["old_log_probs"]["identical"] == 2
    assert found.tables[KEY_DATA]["step"].unique().to_list() == [0]


def test_a_sample_that_occurs_twice_is_paired_in_order(tmp_path: Path) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 0])
    padded(tmp_path / "t/data", (0, 0), [0])
    padded(tmp_path / "t/data", (1, 0), [0])
    table = joined(tmp_path).filter(key="old_log_probs")
    assert table["occurrence"].to_list() == [0, 1]
    assert table["rank_target"].to_list() == [0, 1]


def test_samples_of_one_side_are_said(tmp_path: Path) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    padded(tmp_path / "t/data", (0, 0), [1, 2])
    found = dict(joined(tmp_path).filter(key="old_log_probs").select("sample", "status").rows())
    assert found == {
        DIGESTS[0]: "benchmark_only",
        DIGESTS[1]: "matched",
        DIGESTS[2]: "target_only",
    }


def test_the_mock_proof_names_rows_without_tokens(tmp_path: Path) -> None:
    for side, order in (("b", [0, 1, 2, 3]), ("t", [3, 1, 0, 2])):
        padded(tmp_path / side / "dump/data", (0, 0), [0, 1, 2, 3])
        for micro in (0, 1):
            rows = [log_probs(s)[:1] for s in order[2 * micro : 2 * micro + 2]]
            save(tmp_path / side / "dump/data", "values", (0, micro), rows)
        entry = {"step": 0, "rank": 0, "stage": "critic_compute_values", "role": "critic"}
        samples = [DIGESTS[s] for s in order]
        proof = {"format": 1, "samples": [{**entry, "samples": samples}]}
        (tmp_path / side / "mock_proof.json").write_text(json.dumps(proof))
    table = joined(tmp_path, stages.VALUES).filter(key="values")
    assert table.height == 4 and table["identical"].all()


def test_rows_that_nothing_names_are_not_joined_by_position(tmp_path: Path) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0, 1])
        save(tmp_path / side / "data", "values", (0, 0), [[1.0], [2.0]])
    found = both(tmp_path, stages.VALUES)
    assert any("nothing names" in note for note in found.summary["notes"])
    table = found.tables[KEY_DATA].filter(key="values")
    assert sorted(table["status"].to_list()) == ["benchmark_only"] * 2 + ["target_only"] * 2


def test_an_empty_response_is_compared_as_well(tmp_path: Path) -> None:
    for side in "bt":
        for key, values in (("prompts", [1, 2]), ("responses", []), ("old_log_probs", [])):
            save(tmp_path / side / "data", key, (0, 0), np.array(values), offsets=[0, len(values)])
            path = tmp_path / side / "data" / key / "step0/rank0/micro_step0" / f"{key}.npy"
            np.save(path, np.array(values, dtype=np.int64))
    table = joined(tmp_path)
    assert table["status"].unique().to_list() == ["matched"] and table["identical"].all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_on_one_side(tmp_path: Path, value: float) -> None:
    ragged(tmp_path / "b/data", (0, 0), [0])
    ragged(tmp_path / "t/data", (0, 0), [0], error=value)
    table = joined(tmp_path).filter(key="old_log_probs")
    assert table["status"].to_list() == ["nonfinite"] and not table["identical"].any()


@pytest.mark.parametrize(
    "about", [{"offsets": [0, 99]}, {"offsets": [3, 1]}, {"offsets": "x"}, {"offsets": [-1, 2]}]
)
def test_offsets_outside_the_array_are_refused(tmp_path: Path, about: Any) -> None:
    save(tmp_path, "prompts", (0, 0), np.arange(5), **about)
    save(tmp_path, "responses", (0, 0), np.arange(5), offsets=[0, 5])
    with pytest.raises(DumpError, match="not key data"):
        key_data.KeyData(tmp_path).micro_batches(0)


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "prompts", (0, 0), np.array([{}], dtype=object))
    with pytest.raises(DumpError, match="not key data"):
        key_data.KeyData(tmp_path).micro_batches(0)


def token_sketches(
    store: Path, places: list[tuple[int, int, int, int, np.ndarray[Any, Any]]]
) -> None:
    """``token_sketches/actor_update.parquet`` of rows (rank, micro step, sample, token, sketch)."""
    table = pl.DataFrame(
        {
            "step": [0] * len(places),
            "rank": [p[0] for p in places],
            "order": [4 + p[1] for p in places],
            "name": [f"Module.model.layers.0.Layer.forward.{p[1]}.output.0" for p in places],
            "micro_step": [p[1] for p in places],
            "sample": [p[2] for p in places],
            "token": [p[3] for p in places],
            "sketch": [p[4].astype(np.float32).tolist() for p in places],
        },
        schema_overrides={
            **dict.fromkeys(("step", "rank", "order", "micro_step", "sample", "token"), pl.Int32),
            "sketch": pl.List(pl.Float32),
        },
    )
    (store / "token_sketches").mkdir(parents=True)
    table.write_parquet(store / "token_sketches/actor_update.parquet")


def test_token_sketches_meet_across_padding_packing_and_batches(tmp_path: Path) -> None:
    def sketch(sample: int, place: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([sample, place]).standard_normal(17)

    lengths = [len(p) + len(r) for p, r in SAMPLES]
    padded(tmp_path / "b/data", (0, 0), [0, 1], pad=6)
    padded(tmp_path / "b/data", (0, 1), [2, 3], pad=6)
    rows = []
    for micro, samples in ((0, [0, 1]), (1, [2, 3])):
        for row, sample in enumerate(samples):
            first = 6 - len(SAMPLES[sample][0])
            for position in range(12):
                inside = 0 <= position - first < lengths[sample]
                value = sketch(sample, position - first) if inside else np.ones(17)
                rows.append((0, micro, row, position, value))
    token_sketches(tmp_path / "b", rows)

    ragged(tmp_path / "t/data", (0, 0), [3, 0, 1])  # packed: one row of all tokens
    ragged(tmp_path / "t/data", (1, 0), [2])
    rows = []
    place = 0
    for sample in (3, 0, 1):
        for token in range(lengths[sample]):
            error = 1e-3 if (sample, token) == (0, 4) else 0.0
            rows.append((0, 0, 0, place, sketch(sample, token) * (1 + error)))
            place += 1
    rows += [(1, 0, 0, token, sketch(2, token)) for token in range(lengths[2])]
    token_sketches(tmp_path / "t", rows)

    found = both(tmp_path, stages.ACTOR_UPDATE)
    summary, table = found.summary, found.tables[TOKEN_SKETCHES]
    assert summary["token_sketches"]["tokens"] == sum(lengths) and summary["notes"] == []
    assert table.schema == sketches.SCHEMA
    differing = table.filter(pl.col("error") > 1e-6)
    assert differing.select("sample", "token").rows() == [(DIGESTS[0], 4)]
    assert differing["error"][0] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(0, 2, 5), (1, 2, 7)], {0: [0, 1], 1: [2, 3]}),  # rows padded to the longest
        ([(0, 1, 9), (1, 1, 10)], {0: [0, 1], 1: [2, 3]}),  # rows end to end
        ([(3, 1, 5), (4, 3, 7)], {3: [0], 4: [1, 2, 3]}),  # one row, then three
        ([(0, 2, 6), (1, 2, 7)], {}),  # of another width
        ([(0, 2, 5)], {}),  # samples left over
        ([(0, 4, 7), (1, 1, 3)], {}),  # more batches than samples
        ([(0, 1, 8), (1, 1, 11)], {}),  # a sample cut in two
    ],
)
def test_batches_are_cut_by_what_the_model_was_given(
    sizes: list[tuple[int, int, int]], expected: dict[int, list[int]]
) -> None:
    order = [(DIGESTS[i], len(p), len(r)) for i, (p, r) in enumerate(SAMPLES)]
    found = sketches.cut(order, sizes)
    assert {micro: batch.samples for micro, batch in found.items()} == {
        micro: [DIGESTS[i] for i in some] for micro, some in expected.items()
    }


def test_a_stage_with_other_micro_batches_is_joined_by_its_proof(tmp_path: Path) -> None:
    """The log-prob stage had two micro-batches of two, this stage one of four, reordered."""
    order = [2, 0, 3, 1]
    for side in "bt":
        ragged(tmp_path / side / "data", (0, 0), [0, 1])
        ragged(tmp_path / side / "data", (0, 1), [2, 3])
        rows = [
            (0, 0, row, t, np.full(17, 100.0 * s + t))
            for row, s in enumerate(order)
            for t in range(7)  # padded on the right
        ]
        token_sketches(tmp_path / side, rows)
        entry = {"step": 0, "rank": 0, "stage": "actor_update", "role": "actor"}
        samples = [DIGESTS[s] for s in order]
        proof = {"format": 1, "samples": [{**entry, "samples": samples}]}
        (tmp_path / side / "mock_proof.json").write_text(json.dumps(proof))
    found = both(tmp_path, stages.ACTOR_UPDATE)
    summary, table = found.summary, found.tables[TOKEN_SKETCHES]
    assert summary["token_sketches"]["tokens"] == sum(len(p) + len(r) for p, r in SAMPLES)
    assert table.filter(sample=DIGESTS[3])["token"].to_list() == list(range(7))


def test_the_command_joins_key_data_stage_by_stage(tmp_path: Path) -> None:
    for side in "bt":
        for stage in ("actor_compute_log_prob", "actor_update"):
            dumps.write(
                tmp_path / side / stage / "step0/rank0",
                {"Functional.linear.0.forward": call([tensor()], [tensor()])},
            )
        padded(tmp_path / side / "data", (0, 0), [0, 1])
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert main([*command, "--stage", "actor_compute_log_prob"]) == 0
    assert (tmp_path / "out/actor_compute_log_prob/key_data.parquet").is_file()
    summary = json.loads((tmp_path / "out/actor_compute_log_prob/summary.json").read_text())
    assert summary["samples"]["keys"]["old_log_probs"]["identical"] == 2
    assert main([*command, "--stage", "actor_update"]) == 0
    assert not (tmp_path / "out/actor_update/key_data.parquet").exists()
    assert json.loads((tmp_path / "out/actor_update/summary.json").read_text())["samples"] is None


def test_samples_named_beside_values_overrule_the_order_of_the_batch(tmp_path: Path) -> None:
    """A stage may run its micro-batches in another order than the proof has."""
    padded(tmp_path, (0, 0), [0, 1])
    padded(tmp_path, (0, 1), [2, 3])
    for micro, samples in enumerate([[2, 3], [0, 1]]):
        values = [[float(sample)] * 6 for sample in samples]
        save(tmp_path, "given_old_log_probs", (0, micro), values,
             samples=[DIGESTS[sample] for sample in samples])  # fmt: skip
    proof: list[Entry] = [{"step": 0, "stage": stages.ACTOR_UPDATE, "rank": 0, "samples": DIGESTS}]
    rows = key_data.KeyData(tmp_path, proof).rows("given_old_log_probs", 0)
    assert [row.sample for row in rows] == [DIGESTS[i] for i in (2, 3, 0, 1)]
    assert [float(row.values[0]) for row in rows] == [2.0, 3.0, 0.0, 1.0]
    assert [len(row.values) for row in rows] == [len(SAMPLES[i][1]) for i in (2, 3, 0, 1)]


def test_samples_that_are_no_digests_are_damage(tmp_path: Path) -> None:
    padded(tmp_path, (0, 0), [0])
    save(tmp_path, "given_old_log_probs", (0, 0), [[1.0]], samples=[1])
    with pytest.raises(DumpError, match="no list of digests"):
        key_data.KeyData(tmp_path, []).rows("given_old_log_probs", 0)


def single_save(data: Path, key: str, rows: Sequence[Sequence[float]], form: str) -> None:
    """One batch as msprobe's SingleSave, or the vendor's guide, has it: everything a float."""
    inner = data / key / "step0" / "rank0"
    if form in ("save", "guide", "list in micro-batch"):
        inner = inner / "micro_step0"
    inner.mkdir(parents=True)
    array = np.asarray(rows, dtype=np.float32)
    if form in ("list", "list in micro-batch"):
        for n, row in enumerate(array):
            np.save(inner / f"{key}.{n}.npy", row)
        (inner / f"{key}.json").write_text(json.dumps({"data": [{"max": 1.0}] * len(array)}))
        return
    name = f"{key.removesuffix('s')}0" if form == "guide" else key
    np.save(inner / f"{name}.npy", array)
    (inner / f"{name}.json").write_text(json.dumps({"data": {"max": 1.0, "shape": [2, 3]}}))


@pytest.mark.parametrize("form", ["save", "save_ex", "list", "list in micro-batch", "guide"])
def test_what_msprobes_own_single_save_leaves_is_joined(tmp_path: Path, form: str) -> None:
    """Token ids as floats, no micro-batch, a file a row, the guide's file names."""
    padded(tmp_path / "b/data", (0, 0), [1, 0], pad=3)
    ids = [SAMPLES[0], SAMPLES[1]]
    data = tmp_path / "t/data"
    single_save(data, "prompts", [[0] * (3 - len(p)) + p for p, _ in ids], form)
    single_save(data, "responses", [r + [0] * (3 - len(r)) for _, r in ids], form)
    mask = [[0] * (3 - len(p)) + [1] * (len(p) + len(r)) + [0] * (3 - len(r)) for p, r in ids]
    single_save(data, "attention_mask", mask, form)
    values = [[*log_probs(n), *[7.0] * (3 - len(r))] for n, (_, r) in enumerate(ids)]
    values[1][2] += 0.5
    single_save(data, "old_log_probs", values, form)
    table = joined(tmp_path)
    assert table["status"].unique().to_list() == ["matched"]
    found = table.filter(key="old_log_probs").sort("row_target")
    assert found["identical"].to_list() == [True, False]
    assert found["max_abs_err"].to_list() == [0.0, 0.5]
    assert found["max_abs_token"].to_list() == [None, 2]


def test_a_dict_of_tensors_is_a_key_each(tmp_path: Path) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0, 1])
        inner = tmp_path / side / "data/aux/step0/rank0/micro_step0"
        inner.mkdir(parents=True)
        for name in ("router", "balance"):
            np.save(inner / f"aux.{name}.npy", np.ones((2, 1)) * (2 if side == "t" else 1))
    keys = compared(tmp_path)["keys"]
    assert keys["aux.router"]["matched"] == keys["aux.balance"]["matched"] == 2
    assert keys["aux.router"]["max_error"] == 1.0


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.array([[1.5, 2.0]]), "prompts holds 1.5; ids are whole numbers"),
        (np.array([[np.nan, 2.0]]), "prompts holds nan"),
        (np.array([[float(1 << 25), 2.0]], np.float32), "not known exactly"),
        (np.array([["a", "b"]]), "plain numbers"),
    ],
)
def test_a_key_that_is_refused_is_named_and_the_rest_compared(
    tmp_path: Path, ids: Any, said: str
) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0], pad=3)
    place = tmp_path / "t/data/prompts/step0/rank0/micro_step0/prompts.npy"
    np.save(place, ids)
    found = compared(tmp_path)
    assert any(note.startswith("prompts, step 0: not compared") and said in note
               for note in found["notes"])  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--map-step", "3:4")])
def test_key_data_alone_whose_steps_do_not_meet_say_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0])
    padded(tmp_path / "t/data", (0, 0), [0])
    for key in (tmp_path / "t/data").iterdir():
        (key / "step0").rename(key / "step7")
    (tmp_path / "b/data/prompts/step1").mkdir()
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), *arguments]) == 4
    said = capsys.readouterr().err
    assert "the benchmark has steps 0 to 1, the target 7" in said
    assert ("--map-step 3:4" if arguments else "--map-step 0:7") in said
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), "--map-step", "0:7"]) == 0


@pytest.mark.parametrize("error", [0.0, 0.25])
def test_key_data_alone_are_what_is_said_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1])
    padded(tmp_path / "t/data", (0, 0), [1, 0], error)
    sides = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No records of modules or functions were compared."
    agree = "Key data that agree, by sample: attention_mask, old_log_probs, prompts, responses"
    assert (agree in lines) is (error == 0)
    assert ("Key data that part:" in lines) is (error > 0)


def both_sides(tmp: Path) -> tuple[Path, Path]:
    """Key data of two samples, the same on both sides."""
    sides = tmp / "b/data", tmp / "t/data"
    for side in sides:
        padded(side, (0, 0), [0, 1])
    return sides


@pytest.mark.parametrize(
    ("dtype", "own", "other", "apart"),
    [
        (np.int64, 2**60, 2**60 + 1, 1.0),
        (np.int64, -(2**62), -(2**62) - 3, 3.0),
        (np.uint64, 2**64 - 1, 2**64 - 2, 1.0),
        (np.int64, 7, 7, 0.0),
        (np.int64, 2**60, 2**60 + 2**40, 2.0**40),
    ],
)
def test_whole_numbers_are_exact(
    tmp_path: Path, dtype: Any, own: int, other: int, apart: float
) -> None:
    sides = both_sides(tmp_path)
    for side, number in zip(sides, (own, other), strict=True):
        save(side, "index", (0, 0), np.array([[number], [5]], dtype))
    rows = joined(tmp_path).filter(key="index").sort("row_benchmark")
    assert rows["max_abs_err"].to_list() == [apart, 0.0]
    assert rows["identical"].to_list() == [apart == 0, True]
    assert (rows["error"][0] > 0) is (apart > 0)


@pytest.mark.parametrize(
    "names",
    [
        ["old_log_probs.npy", "micro_step0/old_log_probs.npy"],
        ["micro_step0/old_log_probs.npy", "micro_step0/old_log_probs.0.npy"],
        ["micro_step0/old_log_prob0.npy", "micro_step0/old_log_probs.0.npy"],
        ["old_log_probs.0.npy", "micro_step0/old_log_prob0.npy"],
    ],
)
def test_a_micro_batch_in_two_forms_is_named_and_not_chosen_from(
    tmp_path: Path, names: list[str]
) -> None:
    _, target = both_sides(tmp_path)
    place = target / "old_log_probs/step0/rank0"
    kept = np.load(place / "micro_step0/old_log_probs.npy")
    (place / "micro_step0/old_log_probs.npy").unlink()
    for number, name in enumerate(names):
        np.save(place / name, kept + number)
    found = compared(tmp_path)
    assert "old_log_probs" not in found["keys"] and found["keys"]["responses"]["identical"] == 2
    (note,) = found["notes"]
    assert note.startswith("old_log_probs, step 0: not compared: a micro-batch is there twice, as ")
    assert all(str(place / name) in note for name in names)


@pytest.mark.parametrize(
    "names", [["entropys.pt"], ["entropy.npy", "entropys.json"], ["e1.npy", "e2.npy", "f", "g"]]
)
def test_files_that_are_no_arrays_of_msprobe_are_named(tmp_path: Path, names: list[str]) -> None:
    for side in both_sides(tmp_path):
        place = side / "entropys/step0/rank0/micro_step0"
        place.mkdir(parents=True)
        for name in names:
            (place / name).write_bytes(b"")
    notes = compared(tmp_path)["notes"]
    assert [note.partition(" (")[0] for note in notes] == [
        f"entropys, step 0: not read of the {side}: no array entropys.npy or entropys.0.npy among "
        "its files"
        for side in ("benchmark", "target")
    ]
    assert names[0] in notes[0] and (", …" in notes[0]) is (len(names) > 3)


@pytest.mark.parametrize(
    ("key", "rows", "said"),
    [
        ("entropys", 1, "1 row in a micro-batch of 2 samples, rank 0, micro-batch 0"),
        ("entropys", 5, "5 rows in a micro-batch of 2 samples, rank 0, micro-batch 0"),
        # of another stage, which may cut its micro-batches otherwise
        ("update_log_probs", 1, "no tokens in their micro-batches, no mock proof"),
    ],
)
def test_rows_that_do_not_fit_their_micro_batch_say_so(
    tmp_path: Path, key: str, rows: int, said: str
) -> None:
    """As where a file of a list is lost: which of them belongs to which sample nobody knows."""
    benchmark, target = both_sides(tmp_path)
    save(benchmark, key, (0, 0), np.zeros((2, 2)))
    save(target, key, (0, 0), np.zeros((rows, 2)))
    (note,) = compared(tmp_path, key_data.stage_of(key))["notes"]
    assert f"({said}); they are not joined" in note


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        ([0], [0, 1], "step 1 is on the target only"),
        ([0, 2, 3], [0], "steps 2 to 3 are on the benchmark only"),
        ([0], [4], "step 0 of the benchmark is compared with step 4"),
        ([0], [0], None),
    ],
)
def test_steps_of_key_data_that_are_not_the_same_are_said(
    tmp_path: Path, benchmark: list[int], target: list[int], said: str | None
) -> None:
    sides = both_sides(tmp_path)
    for side, steps in zip(sides, (benchmark, target), strict=True):
        for key in side.iterdir():
            (key / "step0").rename(key / "first")
            for step in steps:
                shutil.copytree(key / "first", key / f"step{step}")
    notes = compared(tmp_path)["notes"]
    assert notes == ([] if said is None else [f"key data: {said}"])
    known = Samples(tmp_path / "b", tmp_path / "t").compare(stages.LOG_PROB, (str(said),))
    assert known is not None and known.summary["notes"] == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_both_sides_is_said_though_it_agrees(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in both_sides(tmp_path):
        save(side, "entropys", (0, 0), np.array([[1.0, value, 0, 0, 0, 0], [2.0, 3.0, 1, 0, 0, 0]]))
    argv = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "entropys (not finite on both sides at 1 of 5 values), " in said
    assert "old_log_probs (" not in said


@pytest.mark.parametrize(
    ("more", "table"),
    [(["--table"], True), (["--table", "both"], True), (["--stacks"], False), (["-q"], False)],
)
def test_no_option_makes_key_data_alone_incomparable(
    tmp_path: Path, more: list[str], table: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    both_sides(tmp_path)
    argv = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")]
    result = tmp_path / "result.json"
    assert main([*argv, *more, "--json", str(result)]) == 0
    assert json.loads(result.read_text())["comparable"] is True
    assert ("there is no table" in capsys.readouterr().err) is table
    assert not list((tmp_path / "o").rglob("table.*"))
