"""Inside an allocation of two nodes: start Ray over them and say where two actors ran.

    python two_nodes.py SCRATCH [--interface NAME] [--hold FILE] [--fails FILE] [--timeout SECONDS]
                        [--head-only]

Without --interface each node finds its own. --hold keeps the cluster until FILE exists, then asks
Ray once more. --fails waits until FILE exists, and goes on as if a framework had failed then.
--head-only starts Ray on the first node alone, as if the other never came. Prints
JSON lines.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rlprobe.config import ContainerSection
from rlprobe.errors import RlprobeError
from rlprobe.runs import nodelocal, raycluster

_ASK = """
import json, os, ray
ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_gpus=1)
class Actor:
    def where(self):
        return [os.environ["SLURMD_NODENAME"], os.environ["GLOO_SOCKET_IFNAME"]]

actors = [Actor.remote() for _ in range(2)]
print(json.dumps(sorted(ray.get([actor.where.remote() for actor in actors]))))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--interface")
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--fails", type=Path)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--head-only", action="store_true")
    given = parser.parse_args()
    if given.head_only:
        only_the_head()
    given.scratch.mkdir(parents=True, exist_ok=True)
    job = nodelocal.job_id()
    nodelocal.of_job(job).make()
    plan = raycluster.Plan(
        container=ContainerSection(),
        device="cpu",
        env={"RAY_USAGE_STATS_ENABLED": "0"},
        declared={},
        binds=(),
        job_id=job,
        scratch=given.scratch,
        resources={"GPU": 1, "CPU": 2},
        interface=given.interface,
        timeout_s=given.timeout,
    )
    try:
        with raycluster.running(plan, 2) as cluster:
            say("up", address=cluster.address)
            say("actors", actors=ask(cluster, job))
            if given.hold is not None:
                while not given.hold.exists():
                    cluster.check()
                    time.sleep(0.2)
                say("again", actors=ask(cluster, job))
            if given.fails is not None:
                while not given.fails.exists():
                    time.sleep(0.2)
                cluster.blame()
        say("down")
    except RlprobeError as error:
        say("error", message=str(error))
        sys.exit(1)


def only_the_head() -> None:
    """Let no node but the first start."""
    start = raycluster.Cluster.start

    def first(cluster: raycluster.Cluster, node: raycluster.Node) -> None:
        if node is cluster.nodes[0]:
            start(cluster, node)

    raycluster.Cluster.start = first  # type: ignore[assignment,method-assign]


def ask(cluster: raycluster.Cluster, job: str) -> object:
    environment = {
        **os.environ,
        **cluster.environment(),
        "RAY_TMPDIR": str(nodelocal.of_job(job).tmp),
    }
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main()
