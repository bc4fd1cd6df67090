"""Where training's and the engine's records are."""

from __future__ import annotations

from rlprobe import stages
from rlprobe.compare.sides import Side
from rlprobe.compare.stage_sources import StageSource
from rlprobe.errors import NotComparableError

#: What the comparison is called: directory, stage and pair.
NAME = "train_infer"


def sources(run: Side, engine: Side | None) -> tuple[StageSource, StageSource]:
    """The engine's and the training's records.

    Args:
        run: holds the log-prob stage, and the generate stage too where ``engine`` is None.
        engine: the engine's own dump, of one stage whatever it is called.

    Raises:
        NotComparableError: a stage is missing.
    """
    training = run.stages.get(stages.LOG_PROB)
    # an engine that was led through samples ran their tokens in one forward, as training did
    inference = run.stages.get(stages.FORCED) or run.stages.get(stages.GENERATE)
    if engine is not None:
        found = list(engine.stages.values())
        inference = engine.stages.get(stages.GENERATE, found[0] if len(found) == 1 else None)
    for side, stage, found_stage in (
        (engine or run, stages.GENERATE, inference),
        (run, stages.LOG_PROB, training),
    ):
        if found_stage is None:
            raise NotComparableError(
                f"{side.name} has no stage {stage}; it has {', '.join(side.stages)}. "
                "Training against inference needs both: capture generation with token_range [0, 0] "
                "(actor_infer_dump in the collector), or name the engine's own dump with "
                "--engine-dump"
            )
    assert training is not None and inference is not None
    return inference, training
