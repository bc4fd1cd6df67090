"""The commands that a shell script would run, with their words expanded, and none of them run.

bash itself reads the script, so that variables, arrays, functions and loops mean what they mean; a
``DEBUG`` trap under ``extdebug`` leaves every command out that is not bash's own
(:file:`prelude.sh`). What such a command would have said is empty, and its status 0: a script that
decides by them is read as if all went well.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.documents.limits import UTF_16, UTF_16_MARKS
from rlprobe.errors import UsageError
from rlprobe.runs.scripts import note

_HERE = Path(__file__).parent
#: Programs that are run: they tell something and change nothing.
HARMLESS = (
    "basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "hostname", "id", "nproc",
    "readlink", "realpath", "seq", "sort", "tail", "tr", "uname", "uniq", "wc", "whoami",
)  # fmt: skip
#: A loop that waits for something that is not run would wait for ever.
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Command:
    """One command as it would have been started."""

    argv: tuple[str, ...]
    cwd: str
    #: Variables that the script set: what differs from the caller's environment.
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Script:
    """What a script would have run, and how it ended."""

    commands: list[Command]
    #: None where it was still going when its time was up.
    status: int | None
    #: The last line that it wrote itself.
    last: str


def commands(script: Sequence[str], **options: Any) -> list[Command]:
    """The commands of :func:`read`."""
    return read(script, **options).commands


def of_command(words: Sequence[str], **options: Any) -> Script:
    """What a command would run that starts a shell, as ``nohup bash run.sh`` does.

    Raises:
        UsageError: there is no bash.
    """
    with tempfile.TemporaryDirectory(prefix="rlprobe-script-") as temporary:
        file = Path(temporary, "command.sh")
        file.write_text(f"{shlex.join(words)}\n", encoding="utf-8")
        return read([str(file)], **options)


def read(
    script: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> Script:
    """What a script would run, in order; of a pipeline whose loop is left, a command may be late.

    Args:
        script: the script's path and its arguments.
        environ: the environment it is called with.
        timeout_s: what was found until then is taken.

    Raises:
        UsageError: there is no bash, or no such script, or it is no shell script.
    """
    environ = {**note.job(script[0], []), **environ}
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("bash is needed to read a shell script, and is not on PATH")
    _require_shell(Path(script[0]))
    with tempfile.TemporaryDirectory(prefix="rlprobe-script-") as temporary:
        programs = Path(temporary, "bin")
        programs.mkdir()
        for name in HARMLESS:
            found = shutil.which(name)
            if found is not None:
                (programs / name).symlink_to(found)
        # noted and left out like any other; run once where a loop that waits is left
        (programs / "sleep").symlink_to("/bin/true")
        out, said = Path(temporary, "commands.jsonl"), Path(temporary, "said")
        out.touch()
        ours = {
            "BASH_ENV": str(_HERE / "prelude.sh"),
            f"{note.OWN}PATH": str(programs),
            f"{note.OWN}PYTHON": sys.executable,
            f"{note.OWN}BASH": bash,
            f"{note.OWN}WORDS": str(_HERE / "words.py"),
            f"{note.OWN}NOTE": str(_HERE / "note.py"),
            f"{note.OWN}HARMLESS": " ".join(HARMLESS),
            f"{note.OWN}OUT": str(out),
        }
        with said.open("wb") as output:
            child = subprocess.Popen(
                [bash, *script],
                env={**environ, **ours},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None
            try:
                status = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                status = None
        lines = out.read_text(encoding="utf-8").splitlines()
        words = said.read_bytes().decode(errors="replace").strip().split("\n")
    noted = [_command(json.loads(line), environ) for line in lines]
    return Script(noted, status, words[-1][:200])


#: Said of a script, or of one that it reads.
WINDOWS_LINES = "Windows line ends, and bash passes them on; convert it (sed -i 's/\\r$//' FILE)"


def _require_shell(script: Path) -> None:
    try:
        with script.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}; give a shell script, or -- CMD…") from error
    if first.startswith(b"\xef\xbb\xbf"):
        raise UsageError(
            f"{script} begins with a byte order mark, which bash takes for a part of its first "
            "word; save it as UTF-8 without one (sed -i '1s/^\\xef\\xbb\\xbf//' FILE)"
        )
    # before bash: it would say something else of each option and bracket that ends so
    if first.endswith(b"\r\n"):
        raise UsageError(f"{script} has {WINDOWS_LINES}")
    if first.startswith(UTF_16_MARKS) or b"\0" in first:
        raise UsageError(f"{script} is {UTF_16}")
    if first.startswith(b"#!") and not note.is_script(str(script), anywhere=True):
        raise UsageError(
            f"{script} begins with {first.decode(errors='replace').strip()}; accepted: a script "
            "for bash or sh"
        )


#: Set by every bash, or by the tracing.
_NOT_THE_SCRIPTS = {"BASH_ENV", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}


def _command(raw: dict[str, object], environ: Mapping[str, str]) -> Command:
    argv, env = raw["argv"], raw["env"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    own = {
        str(name): str(value)
        for name, value in env.items()
        if name not in _NOT_THE_SCRIPTS
        and not name.startswith("SLURM_")
        and environ.get(name) != value
    }
    return Command(tuple(map(str, argv)), str(raw["cwd"]), own)
