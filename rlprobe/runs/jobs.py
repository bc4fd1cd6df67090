"""An alignment as a workflow sees it: files, comparisons and what each job asks the cluster for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe import frameworks
from rlprobe.config import Alignment, load
from rlprobe.documents import jsonfile, seal
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError, RunError
from rlprobe.frameworks.layout import Layout
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.runs import devices, resources
from rlprobe.runs.plan import pairs, plan
from rlprobe.spec import RunSpec
from rlprobe.stages import GENERATE
from rlprobe.store.keys import canonical_json

FORMAT = 1
#: What Apptainer binds beside its options, as ``SRC[:DEST[:OPTIONS]],…``.
_BIND = "APPTAINER_BIND"
_REFINE = "`rlprobe refine --part suspects` writes it again"

#: What names an imported run in an alignment file, by role.
_IMPORTED = {BENCHMARK: "benchmark.run"}


@dataclass(frozen=True)
class Jobs:
    """The runs and comparisons of one alignment."""

    alignment: Alignment
    runs: dict[str, RunSpec]
    #: Comparison -> roles: the side compared against, the side in question.
    pairs: dict[str, tuple[str, str]]

    @classmethod
    def load(cls, path: str | Path) -> Jobs:
        """Read an alignment file and plan it.

        Raises:
            ConfigError: the file is wrong, or names something that does not exist.
        """
        alignment = load(path)
        if alignment.benchmark.run is None:
            resources.check(alignment.benchmark, "benchmark")
        resources.check(alignment.target, "target")
        runs = plan(alignment)
        return cls(alignment, runs, pairs(runs))

    @property
    def results(self) -> str:
        """Directory of this alignment's tables, diagnosis and page."""
        return f"{self.alignment.results}/{self.alignment.name}"

    def layout(self, role: str) -> Layout:
        """How a role's run spreads its actor over processes."""
        return frameworks.get(self.alignment.framework).layout(self.runs[role])

    def manifest(self, role: str) -> str:
        """The file that says that a role's run is in the store."""
        return f"{self.alignment.store}/runs/{self.runs[role].key}/manifest.json"

    def manifests(self, pair: str) -> list[str]:
        """Both sides' manifests of a comparison, the side compared against first."""
        return [self.manifest(role) for role in self.pairs[pair]]

    def read_whole(self) -> list[str]:
        """Manifests of runs that no comparison has: those whose metrics alone are read."""
        compared = {role for roles in self.pairs.values() for role in roles}
        return [self.manifest(role) for role in self.runs if role not in compared]

    def needs(self, role: str) -> list[str]:
        """Manifests that must exist before a role's run can start."""
        return [] if self.runs[role].replay_of is None else [self.manifest(BENCHMARK)]

    def made_here(self) -> list[str]:
        """Roles whose runs are started by this workflow; imported ones are not."""
        return [role for role, spec in self.runs.items() if spec.imported is None]

    def missing_imports(self) -> list[str]:
        """What is said of each run that another site made and this store has not."""
        absent = [
            (_IMPORTED.get(role, f"controls.{role.rstrip('0123456789')}"), spec.key)
            for role, spec in self.runs.items()
            if spec.imported is not None and not Path(self.manifest(role)).is_file()
        ]
        return [f"{a}: run {key} is not in the store {self.alignment.store}" for a, key in absent]

    @property
    def how_to_import(self) -> str:
        """What is to be done about them."""
        return (
            f"bring them from their site: rlprobe store import BUNDLE --store "
            f"{self.alignment.store}, which prints the keys to name here"
        )

    def require_imports(self) -> None:
        """Refuse an alignment whose imported runs are not here.

        Raises:
            RunError: names all of them.
        """
        missing = self.missing_imports()
        if missing:
            raise RunError("\n".join([*missing, self.how_to_import]))

    def require_devices(self, roles: Collection[str]) -> None:
        """Refuse runs that are to start on this machine and whose devices it lacks.

        Args:
            roles: of the runs that a workflow without a scheduler is about to make.

        Raises:
            RunError: names the first role whose devices are missing.
        """
        for role, spec in self.runs.items():
            if role in roles and spec.resources.nodes == 1:
                try:
                    devices.require(spec.device, spec.world_size)
                except RunError as error:
                    raise RunError(f"{role}: {error}") from error

    def stages(self, pair: str) -> tuple[str, ...]:
        """Stages compared in a pair: those that the replaying side runs itself."""
        return tuple(s for s in self.runs[self.pairs[pair][1]].stages if s != GENERATE)

    def image(self, *, torch: bool = False) -> str | None:
        """What Snakemake itself enters for an analysis job; None where rlprobe does, or nobody."""
        analysis = self.alignment.analysis
        found = analysis.torch_image if torch else analysis.image
        return found if analysis.runtime == "apptainer" else None

    def open_images(self, *, make: bool = False) -> None:
        """Have Snakemake's Apptainer open the store and the results to analysis jobs.

        It is shut to the host but for the working directory (the profile's ``--contain``), and a
        store lies where every node sees it.

        Args:
            make: make the directories; those that are not there cannot be bound.
        """
        if self.image() is None and self.image(torch=True) is None:
            return
        found = [word for word in os.environ.get(_BIND, "").split(",") if word]
        for place in (self.alignment.store, self.results):
            directory = Path(place).absolute()
            if make:
                directory.mkdir(parents=True, exist_ok=True)
            outside = not directory.is_relative_to(Path.cwd())
            if outside and directory.is_dir() and str(directory) not in found:
                found.append(str(directory))
        if found:
            os.environ[_BIND] = ",".join(found)

    def entered(self, config: str | Path, *, torch: bool = False) -> str:
        """How an analysis job's command line begins: with what enters the image, if rlprobe does.

        Args:
            config: the alignment's file, which the job reads again.
            torch: whether the job needs the image with torch.
        """
        analysis = self.alignment.analysis
        found = analysis.torch_image if torch else analysis.image
        if found is None or analysis.runtime == "apptainer":
            return "rlprobe"
        return f"rlprobe enter --config {config}{' --torch' if torch else ''} --"

    def official_files(self, pair: str, stage: str) -> list[str]:
        """What msprobe's own job of a stage writes."""
        kinds = ["csv", "xlsx", *(["vis.db"] if self.alignment.analysis.official_graph else [])]
        return [f"{self.results}/compare/{pair}/{stage}/official.{kind}" for kind in kinds]

    @property
    def official_steps(self) -> str:
        """Which captured steps msprobe's own jobs look at."""
        return "all" if self.alignment.analysis.official_table == "all" else "first"

    def official_pairs(self) -> list[str]:
        """Pairs that msprobe's own table is written for: the target's, where it is wanted."""
        return [TARGET] if self.alignment.analysis.official_table else []

    def described(self) -> dict[str, Any]:
        """What the results are results of, for diagnose and report."""
        alignment = self.alignment
        return {
            "format": FORMAT,
            "name": alignment.name,
            "framework": alignment.framework,
            "framework_version": alignment.framework_version,
            "store": alignment.store,
            "coverage": alignment.coverage,
            "runs": {
                role: {
                    "key": spec.key,
                    "device": spec.device,
                    "precision": spec.precision,
                    "framework_version": spec.framework_version,
                    "stages": list(spec.stages),
                    "imported": spec.imported is not None,
                }
                for role, spec in self.runs.items()
            },
            "pairs": {
                pair: {"benchmark": left, "target": right, "stages": list(self.stages(pair))}
                for pair, (left, right) in self.pairs.items()
            },
        }

    def refinement(self, suspects: str) -> list[str]:
        """What refining ends in: the sharper diagnosis, or, where nothing is suspect, the file
        that says why.

        Args:
            suspects: ``suspects.json``, written after the diagnosis.

        Raises:
            DumpError: it is damaged.
        """
        try:
            said = jsonfile.mapping(jsonfile.load(suspects))
        except DocumentError as error:
            raise DumpError(f"{suspects} is not readable: {error}; {_REFINE}") from error
        seal.check(said, said.keys(), suspects, _REFINE)
        return [f"{self.results}/refine/diagnosis.json"] if said.get("suspects") else [suspects]

    @property
    def plan_file(self) -> str:
        """Where :meth:`described` is written."""
        return f"{self.results}/alignment.json"

    @property
    def plan_mark(self) -> str:
        """An empty file named after the plan's digest: another plan is another file, so that
        whatever was made from an older one is made again, with or without a record of it."""
        return f"{self.results}/.plan-{_short_digest(self.described())}"

    def pair_mark(self, pair: str) -> str:
        """Likewise for one comparison: an empty file named after the keys of its two runs."""
        keys = [self.runs[role].key for role in self.pairs[pair]]
        return f"{self.results}/compare/{pair}/.of-{_short_digest(keys)}"


def _short_digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]
