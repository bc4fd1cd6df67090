"""From the host of an allocation into the place where a run happens.

One node: the run's script is started in the image, and the framework starts its own Ray. Several:
a Ray cluster is started over the nodes first (:mod:`rlprobe.runs.raycluster`), and the script runs
in the image beside its head. Either way nothing of the run is left afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlprobe.runs import bindings, containers, devices, nodelocal, raycluster, resources
from rlprobe.runs.process import MARK
from rlprobe.spec import RunSpec

#: CPU processes count as Ray's GPUs, because frameworks place their workers by GPU or NPU.
_CPU_AS = "GPU"
#: Ray's actors of one run, all small; a laptop has fewer cores than it has actors.
_LEAST_CPUS = 12.0


@dataclasses.dataclass(frozen=True)
class RunEnvironment:
    """What one run happens in: its image, variables, node-local directory and Ray."""

    spec: RunSpec
    scratch: Path
    binds: tuple[str, ...]
    job_id: str
    #: The run's variables, completed by what the host knows.
    variables: Mapping[str, str]
    cluster: raycluster.Cluster | None = None

    @property
    def contained(self) -> bool:
        """Whether the run happens in an image."""
        return self.spec.container.runtime != "none"

    @property
    def exported(self) -> dict[str, str]:
        """What the run's script exports.

        In an image PYTHONPATH is left to the command line, which joins it to the image's own.
        """
        kept = dict(self.variables)
        if self.contained:
            kept.pop("PYTHONPATH", None)
        return kept

    def argv(self, command: Sequence[str], run_id: str) -> list[str]:
        """The command line that runs ``command`` there.

        Args:
            command: as the image finds it.
            run_id: marks every process of the run, also those inside a container.
        """
        return containers.wrap(
            command,
            {**self.variables, MARK: run_id},
            self.spec.container,
            self.spec.device,
            self.binds,
            self.job_id,
            self.scratch,
        )

    def check(self) -> None:
        """Raise when a part of it is gone.

        Raises:
            RunError: a node's Ray ended.
        """
        if self.cluster is not None:
            self.cluster.check()

    def blame(self) -> None:
        """After the framework has failed: raise when a part of this is why.

        Raises:
            RunError: a node's Ray ended.
        """
        if self.cluster is not None:
            self.cluster.blame()


@contextlib.contextmanager
def enter(
    spec: RunSpec, scratch: Path, store: Path, environment: Mapping[str, str]
) -> Iterator[RunEnvironment]:
    """What one run happens in, until it has ended.

    Args:
        spec: the run.
        scratch: its scratch directory, seen by every node.
        store: the store, which the run reads rollouts and builtin models from.
        environment: the run's variables; the processes of several nodes inherit them from Ray.

    Raises:
        ConfigError: a path cannot be bound, or the allocation is too small.
        RunError: a node or device is missing, or a node did not join.
    """
    if spec.resources.nodes == 1:
        devices.require(spec.device, spec.world_size)
    job = nodelocal.job_id()
    local = nodelocal.of_job(job)
    nodelocal.sweep()
    local.make()
    local.own()
    network = devices.communication(spec.device, spec.resources.interface, None)
    variables = {**network, **resources.visible(spec.device, spec.resources), **environment}
    binds = (str(store), *bindings.paths(spec))
    entered = RunEnvironment(spec, scratch, binds, job, variables)
    try:
        if spec.resources.nodes == 1:
            yield entered
        else:
            with raycluster.running(_plan(entered), spec.resources.nodes) as cluster:
                inherited = {**variables, **cluster.environment()}
                yield dataclasses.replace(entered, variables=inherited, cluster=cluster)
    finally:
        try:
            containers.stop(spec.container, job)
        finally:
            local.remove()


def _plan(entered: RunEnvironment) -> raycluster.Plan:
    spec = entered.spec
    per_node = spec.world_size // spec.resources.nodes
    counted_as = devices.get(spec.device).ray_resource or _CPU_AS
    ray: dict[str, float] = {counted_as: per_node}
    if spec.device == devices.CPU:
        ray["CPU"] = max(_LEAST_CPUS, float(spec.resources.cpus or 0))
    elif spec.resources.cpus is not None:
        ray["CPU"] = spec.resources.cpus
    return raycluster.Plan(
        container=spec.container,
        device=spec.device,
        env=entered.variables,
        declared=spec.environment,
        binds=entered.binds,
        job_id=entered.job_id,
        scratch=entered.scratch,
        resources=ray,
        interface=spec.resources.interface,
    )
