"""Does round-off start anew where a pipeline's next process takes over? It must not."""

from __future__ import annotations

import polars as pl
import pytest

from rlprobe.judge import layers

#: Each layer adds this much; modules outside layers add nothing.
OWN = 2.0


def _pass(
    numbers: list[int], direction: str = "forward", micro: int = 0
) -> list[dict[str, object]]:
    outer = ["model.embed_tokens"] if 0 in numbers and direction == "forward" else []
    inner = [f"model.layers.{number}.mlp" for number in numbers]
    outer_last = ["model.norm"] if direction == "forward" and max(numbers) == 3 else []
    return [
        {
            "module": module,
            "direction": direction,
            "micro_batch": micro,
            "own": OWN if "layers" in module else 0.0,
        }
        for module in [*outer, *inner, *outer_last]
    ]


def _table(rows: list[dict[str, object]]) -> pl.DataFrame:
    table = pl.DataFrame(rows).with_columns(_layer=layers.number())
    return table.with_columns(S=pl.col("own").cum_sum().over("micro_batch"))


def _depths(rows: list[dict[str, object]], every: set[int]) -> dict[tuple[str, str], float]:
    found = layers.elsewhere(_table(rows), every)
    return {(r["direction"][0], r["module"]): r["S"] / OWN for r in found.iter_rows(named=True)}


def test_one_process_with_all_layers_is_left_as_it_is() -> None:
    rows = _pass([0, 1, 2, 3]) + _pass([3, 2, 1, 0], "backward")
    before = _table(rows)
    assert layers.elsewhere(before, {0, 1, 2, 3}).equals(before)


@pytest.mark.parametrize("micro", [0, 1])
def test_the_second_half_begins_with_what_the_first_added(micro: int) -> None:
    depths = _depths(_pass([2, 3], micro=micro), {0, 1, 2, 3})
    assert depths["f", "model.layers.2.mlp"] >= 2
    assert depths["f", "model.layers.3.mlp"] >= 3
    assert depths["f", "model.norm"] == 4


def test_interleaved_chunks_count_the_layers_between_them() -> None:
    depths = _depths(_pass([0, 2]), {0, 1, 2, 3})
    assert depths["f", "model.embed_tokens"] == 0
    assert depths["f", "model.layers.0.mlp"] == 1, "nothing came before it but what is here"
    assert depths["f", "model.layers.2.mlp"] == 2


def test_gradients_have_come_through_every_layer_behind() -> None:
    rows = _pass([0, 1]) + _pass([1, 0], "backward")
    depths = _depths(rows, {0, 1, 2, 3})
    # forward through four, back through two and one more
    assert depths["b", "model.layers.1.mlp"] == 2 * 4 - 1 - 1
    assert depths["b", "model.layers.0.mlp"] == 2 * 4 - 1 - 0


def test_what_is_equal_everywhere_adds_nothing_elsewhere_either() -> None:
    rows = [{**row, "own": 0.0} for row in _pass([2, 3])]
    assert set(_depths(rows, {0, 1, 2, 3}).values()) == {0.0}


def test_pipelines_are_told_from_other_layouts_by_their_layers() -> None:
    first, second = (_table(_pass(numbers)) for numbers in ([0, 1], [2, 3]))
    assert layers.apart([first, second])
    assert not layers.apart([first, first]) and not layers.apart([first])
