"""Every command in the documentation is one that exists, with options that it takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlprobe.cli import parse

#: Other programs that the documentation may call.
OTHERS = {
    "apptainer", "cd", "docker", "export", "git", "pip", "python", "python3.11", "sbatch", "scp"
}  # fmt: skip


def pages(root: Path) -> list[Path]:
    return [
        *sorted(root.glob("*.md")),
        *sorted(root.glob("docs/**/*.md")),
        root / "config/README.md",
    ]


def commands(root: Path) -> list[tuple[str, list[str]]]:
    """(page, words) of every line after ``$`` in a console block."""
    return [command for page in pages(root) for command in commands_of(page)]


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    found = []
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ (.+(?:\\\n.+)*)", block, re.MULTILINE):
            for part in line.replace("\\\n", " ").split("&&"):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                found.append((page.name, words))
    return found


def of(root: Path, program: str) -> list[tuple[str, list[str]]]:
    return [(page, words) for page, words in commands(root) if words[0] == program]


def test_the_documentation_has_commands_and_calls_nothing_unknown(root: Path) -> None:
    found = commands(root)
    assert len(found) >= 12
    unknown = [
        words
        for _, words in found
        if Path(words[0]).name not in OTHERS | {"rlprobe", "make", "snakemake"}
    ]
    assert unknown == []


def test_rlprobe_commands_are_accepted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for page, words in of(root, "rlprobe"):
        try:
            parse(words[1:])
        except SystemExit as stopped:
            assert stopped.code == 0, f"{page}: {shlex.join(words)}\n{capsys.readouterr().err}"


def test_make_targets_exist(root: Path) -> None:
    parts = [root / "Makefile", *root.glob("*.mk")]
    makefile = "\n".join(path.read_text(encoding="utf-8") for path in parts)
    for page, words in of(root, "make"):
        for target in words[1:]:
            if "=" not in target:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {target}"


@pytest.mark.slow
def test_snakemake_commands_are_accepted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snakemake.cli import parse_args

    monkeypatch.chdir(root)
    for page, words in of(root, "snakemake"):
        _, args = parse_args(words[1:])
        assert all(Path(profile).exists() for profile in args.profile or []), page
        # A target after --configfile would be taken for another file.
        for file in args.configfile or []:
            examples = (root / "config" / "examples").rglob(Path(file).name)
            assert Path(file).exists() or any(examples), f"{page}: {file}"


#: Guides that there are in Chinese too.
GUIDES = ["README", "docs/cluster", "docs/npu-box", "docs/report", "docs/two-dumps",
          "docs/two-sites"]  # fmt: skip


def test_every_guide_has_the_same_commands_in_chinese(root: Path) -> None:
    chinese = [path for path in pages(root) if path.name.endswith(".zh.md")]
    assert sorted(str(p.relative_to(root)) for p in chinese) == [f"{g}.zh.md" for g in GUIDES]
    for guide in GUIDES:
        both = [root / f"{guide}{ending}" for ending in (".md", ".zh.md")]
        english, translated = ([words for _, words in commands_of(page)] for page in both)
        assert english == translated, guide
        assert english, guide
        for page, other in (both, both[::-1]):
            assert f"]({other.name})" in page.read_text(encoding="utf-8"), (
                f"{page} names no {other}"
            )
        # what stands indented or quoted is written into files: it is the same too
        texts = [" ".join(page.read_text(encoding="utf-8").split()) for page in both]
        quoted = [
            set(re.findall(r"`([a-z_]+: [^`]+|--?[a-z][a-z-]+[^`]*)`", text)) for text in texts
        ]
        assert quoted[0] == quoted[1], f"{guide}: {quoted[0] ^ quoted[1]}"


def test_linked_files_exist(root: Path) -> None:
    for page in pages(root):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_makefile_needs_no_shell_but_sh(root: Path) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "align"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "workflow/align" in done.stdout


def test_a_configuration_named_in_small_letters_is_refused(root: Path) -> None:
    def align(word: str) -> subprocess.CompletedProcess[str]:
        words = ["make", "--dry-run", "align", word]
        return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)

    refused = align("config=mine.yaml")
    assert refused.returncode != 0
    assert "write CONFIG=mine.yaml" in refused.stderr
    assert "workflow/align" not in refused.stdout
    taken = align("CONFIG=mine.yaml")
    assert taken.returncode == 0, taken.stderr
    assert 'workflow/align "mine.yaml"' in taken.stdout
