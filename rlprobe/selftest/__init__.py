"""Planted faults and benign changes, and the score of a diagnosis over them.

    from rlprobe.selftest import fault, benign

    @fault(stage="actor_compute_log_prob", module="model.layers.1.input_layernorm",
           cause="hyperparameter")
    def rms_eps(site):
        layer = site.model.get_submodule("model.layers.1.input_layernorm")
        old, layer.variance_epsilon = layer.variance_epsilon, 1e-2
        yield
        layer.variance_epsilon = old

``RLPROBE_FAULT=FILE:NAME`` (or ``target: {fault: FILE:NAME}``) plants one in a run.
"""

from rlprobe.faults import Declaration, Site, benign, fault

__all__ = ["Declaration", "Site", "benign", "fault"]
