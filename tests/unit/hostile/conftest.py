"""A whole alignment without a training: a store, results, a bundle, and commands run on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.runs.jobs import Jobs
from tests.workflow import fabricate
from tests.workflow.project import Project


@dataclass(frozen=True)
class Aligned:
    """A working directory with an alignment that ran, compared and reported."""

    directory: Path
    jobs: Jobs

    def run(self, role: str) -> Path:
        """Directory of a role's run, relative to the working directory."""
        return Path(self.jobs.alignment.store, "runs", self.jobs.runs[role].key)

    @property
    def results(self) -> Path:
        return Path(self.jobs.results)


@pytest.fixture(scope="session")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Aligned:
    """Made once; never to be changed."""
    project = Project(tmp_path_factory.mktemp("finished"), root)
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        jobs = project.jobs(patch)
        fabricate.store(jobs, ["benchmark", "target", "repeat"], key_data=True)
        done = Aligned(project.directory, jobs)
        store = jobs.alignment.store
        for words in (
            ["config", "plan", "a.yaml"],
            *(
                [
                    *("compare", str(done.run("benchmark")), str(done.run(role))),
                    *("--pair", role, "-o", f"{done.results}/compare/{role}"),
                ]
                for role in ("repeat", "target")
            ),
            ["diagnose", str(done.results), "--no-fail"],
            ["report", str(done.results)],
            ["store", "export", jobs.runs["benchmark"].key, "--store", store, "-o", "a.bundle"],
        ):
            assert main([*words, "-q"]) == 0, words
    assert Path.cwd() == before
    return done


@pytest.fixture
def aligned(
    finished: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Aligned]:
    """A copy to damage, the working directory of the test."""
    copy = tmp_path / "copy"
    shutil.copytree(finished.directory, copy, symlinks=True, copy_function=_copied)
    monkeypatch.chdir(copy)
    yield Aligned(copy, finished.jobs)


def _copied(source: str, target: str) -> None:
    """Objects are read-only; a test has to damage them."""
    shutil.copyfile(source, target)
    Path(target).chmod(0o644)


Told = Callable[..., str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command that has to fail; what it said, which has to be fit for a person."""

    def run(*words: str | Path, code: tuple[int, ...] = (1, 2)) -> str:
        capsys.readouterr()
        found = main([str(word) for word in words])
        said = capsys.readouterr()
        assert found in code, (found, said)
        assert "Traceback" not in said.err
        assert said.err.startswith("rlprobe: error: ") or "\nrlprobe: error: " in said.err, said.err
        assert len(said.err) < 4000
        assert fit_for_a_terminal(said.out + said.err)
        return said.err

    return run


def fit_for_a_terminal(text: str) -> bool:
    """Nothing that a terminal obeys, and nothing that cannot be written to it."""
    return all(c.isprintable() or c in "\n\t\xa0\u3000\u200c\u200d" for c in text)


def files(directory: Path) -> dict[str, int]:
    """Every file below a directory, with its size."""
    found = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(directory)): path.stat().st_size for path in found}
