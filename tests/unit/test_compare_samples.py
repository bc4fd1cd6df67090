"""Do the tokens of one sample meet, however the two runs batched, ordered and padded them?"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.compare.samples import sketches
from rlprobe.compare.samples.run import Samples
from rlprobe.dumps import key_data
from rlprobe.dumps.proof import Entry
from rlprobe.dumps.results import KEY_DATA, TOKEN_SKETCHES
from rlprobe.errors import DumpError
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.batches import (
    DIGESTS,
    SAMPLES,
    both,
    joined,
    log_probs,
    padded,
    ragged,
    save,
)


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


def token_sketches(store: Path, places: Sequence[tuple[Any, ...]]) -> None:
    """``token_sketches/actor_update.parquet`` of rows (rank, micro step, sample, token, sketch).

    A sixth number of a row is its call's, which is its micro-batch's otherwise.
    """
    calls = [p[5] if len(p) > 5 else p[1] for p in places]
    table = pl.DataFrame(
        {
            "step": [0] * len(places),
            "rank": [p[0] for p in places],
            "order": [4 + call for call in calls],
            "name": [f"Module.model.layers.0.Layer.forward.{call}.output.0" for call in calls],
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


def sketched(lost: Collection[tuple[int, int]] = (), per_batch: int = 2) -> list[Any]:
    """Rows of two blocks' worth of calls, without these tokens (sample, place) in any of them."""
    return [
        (0, sample // per_batch, sample % per_batch, token, np.full(17, 1.0 + token), call)
        for sample, (prompt, response) in enumerate(SAMPLES)
        for token in range(len(prompt) + len(response))
        for call in (2 * (sample // per_batch), 2 * (sample // per_batch) + 1)
        if (sample, token) not in lost
    ]


@pytest.mark.parametrize(
    ("benchmark", "target", "alone", "left_out"),
    [
        ([], [], 0, 0),
        ([], [(0, 0)], 1, 0),
        ([(0, 0)], [], 1, 0),
        ([], [(1, 2), (2, 1)], 2, 0),
        ([(1, 2)], [(1, 2)], 0, 0),
        # a whole sample, and the longest of a micro-batch, which fits no key data then
        ([], [(2, n) for n in range(3)], 3, 0),
        ([], [(0, n) for n in range(5)], 9, 1),
    ],
)
def test_tokens_that_one_side_has_in_no_record_are_counted(
    tmp_path: Path, benchmark: list[Any], target: list[Any], alone: int, left_out: int
) -> None:
    for side, lost in (("b", benchmark), ("t", target)):
        for micro in range(2):
            ragged(tmp_path / side / "data", (0, micro), [2 * micro, 2 * micro + 1])
        token_sketches(tmp_path / side, sketched(lost))
    found = both(tmp_path, stages.ACTOR_UPDATE).summary["token_sketches"]
    assert sum(found["alone"].values()) == alone and found["left_out"] == left_out


def test_replicas_of_one_side_are_no_tokens_that_the_other_lacks(tmp_path: Path) -> None:
    """Two ranks of one model have every token twice."""
    for side, ranks in (("b", 1), ("t", 2)):
        rows = [(rank, *row[1:]) for rank in range(ranks) for row in sketched()]
        for rank in range(ranks):
            for micro in range(2):
                ragged(tmp_path / side / "data", (rank, micro), [2 * micro, 2 * micro + 1])
        token_sketches(tmp_path / side, rows)
    assert both(tmp_path, stages.ACTOR_UPDATE).summary["token_sketches"]["alone"] == {}


def passes(samples: Sequence[int], wrong: tuple[int, int, int] | None = None) -> list[Any]:
    """An engine that is led through responses: each sample whole, its prompt, then token by token.

    Args:
        samples: a micro-batch each.
        wrong: sample, pass of it, and token of the pass of which one side makes something else.
    """
    rows, call = [], 0
    for micro, sample in enumerate(samples):
        prompt, response = (len(part) for part in SAMPLES[sample])
        spans = [range(prompt + response), range(prompt)]
        spans += [range(prompt + i, prompt + i + 1) for i in range(response - 1)]
        for turn, span in enumerate(spans):
            for token, place in enumerate(span):
                value = np.random.default_rng([sample, place]).standard_normal(17)
                # computed with a cache a token is not the same, on both sides
                value = value * (1 + 0.1 * turn + (0.01 if (sample, turn, token) == wrong else 0))
                rows.append((0, micro, 0, token, value, call))
            call += 1
    return rows


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (None, 0),
        ((3, 0, 5), 5),
        ((3, 1, 1), 1),
        ((3, 3, 0), 5),  # the second token that is decoded, of four
        ((1, 1, 0), 0),  # a prompt of one token
        ((1, 2, 0), 1),
    ],
)
def test_passes_of_one_sample_meet_in_their_order(
    tmp_path: Path, wrong: tuple[int, int, int] | None, place: int
) -> None:
    every = range(len(SAMPLES))
    for side, fault in (("b", None), ("t", wrong)):
        for micro in every:
            ragged(tmp_path / side / "data", (0, micro), [micro])
        token_sketches(tmp_path / side, passes(every, fault))
    found = both(tmp_path, stages.ACTOR_UPDATE)
    assert found.summary["notes"] == []
    table = found.tables[TOKEN_SKETCHES]
    assert table.height == len(passes(every))
    apart = table.filter(pl.col("error") > 1e-6).select("sample", "token").rows()
    assert apart == ([(DIGESTS[wrong[0]], place)] if wrong else [])


def test_a_block_that_runs_twice_on_a_batch_is_compared_with_itself(tmp_path: Path) -> None:
    """Of four micro-batches and of two: the second run of a sample is the other side's second."""
    lengths = [len(p) + len(r) for p, r in SAMPLES]
    for side, batches in (("b", [[0], [1], [2], [3]]), ("t", [[0, 1], [2, 3]])):
        rows = []
        for micro, some in enumerate(batches):
            ragged(tmp_path / side / "data", (0, micro), some)
            places = [(s, t) for s in some for t in range(lengths[s])]
            for turn in range(2):
                for at, (s, t) in enumerate(places):
                    value = np.random.default_rng([s, t, turn]).standard_normal(17)
                    rows.append((0, micro, 0, at, value, 2 * micro + turn))
        token_sketches(tmp_path / side, rows)
    table = both(tmp_path, stages.ACTOR_UPDATE).tables[TOKEN_SKETCHES]
    assert table.height == 2 * sum(lengths) and table["error"].max() == 0


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
