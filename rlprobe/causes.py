"""Why two devices part: the closed list of cause classes, each with its meaning."""

from __future__ import annotations

#: Class -> what it means, in words for the report; docs/diagnosis.md has how each is recognised.
MEANINGS: dict[str, str] = {
    "rounding_order": "numbers are rounded at another place or to a shorter format",
    "accumulation": "gradients of micro-batches are summed otherwise",
    "mask": "tokens attend to other tokens",
    "position": "other positions or rotary angles",
    "layout": "the same numbers stand in other places",
    "weights": "parameters differ when a model first enters a stage",
    "stale_weights": "parameters are older on one side than on the other",
    "constant_factor": "a multiple of the benchmark's numbers",
    "hyperparameter": "the same computation with another constant",
    "saturation": "one side is cut off where the other goes on",
    "nonfinite": "NaN or infinity on one side alone",
    "routing": "tokens are sent to other experts, or experts are weighed otherwise",
    "sampling_semantics": "log-probabilities of another distribution from the same logits",
    "label_or_mask_shift": "other tokens count in a result",
    "reduction": "gradients are reduced over the ranks otherwise",
    "row_order": "samples change places",
    "optimizer": "parameters change otherwise although their gradients agree",
    "loss": "the loss makes other values or gradients of the same outputs",
    "data": "a stage was given other numbers",
    "nondeterministic": "one side does not repeat its own numbers, or draws others at random",
    "implementation": "other operators, or another kernel of the same one",
    "unknown": "nothing that is known of",
}
CAUSES: tuple[str, ...] = tuple(MEANINGS)
