"""Notes one command of a traced script: its words, directory and environment, as a JSON line.

    python -I -S note.py python -m verl.trainer.main_ppo …

Stands in the command's place, so that it sees what the command would have seen. A shell in it, as
in ``docker exec NAME bash -c "…"`` or ``sbatch run.sh``, is traced in its turn. Standard library
only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

#: Variables of the tracing itself.
OWN = "RLPROBE_TRACE_"
_DEEPEST = 4


#: Programs that start the script which follows their own options.
_STARTERS = {
    "apptainer", "chrt", "docker", "env", "ionice", "nice", "nohup", "numactl", "podman", "salloc",
    "sbatch", "setsid", "singularity", "srun", "stdbuf", "sudo", "taskset", "time", "timeout",
}  # fmt: skip


def main(argv: list[str]) -> int:
    line = json.dumps(
        {
            "argv": argv,
            "cwd": os.getcwd(),  # noqa: PTH109
            "env": {k: v for k, v in os.environ.items() if not k.startswith(OWN)},
        }
    )
    with open(os.environ[f"{OWN}OUT"], "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(line + "\n")
    depth = int(os.environ.get(f"{OWN}DEPTH", "0"))
    found = shell_in(argv)
    if found is not None and depth < _DEEPEST:
        at, inner = found
        environment = {**job(inner[0], []), **os.environ, **assigned(argv[:at])}
        environment[f"{OWN}DEPTH"] = str(depth + 1)
        if os.path.basename(argv[0]) == "sbatch":  # noqa: PTH119
            environment |= job(inner[0], argv[1:at])
        subprocess.run([os.environ[f"{OWN}BASH"], *inner], env=environment, check=False)
    return 0


def shell_in(argv: list[str]) -> tuple[int, list[str]] | None:
    """A shell that a command starts: where it stands, and its arguments (a script, or ``-c``)."""
    started = os.path.basename(argv[0])  # noqa: PTH119
    for index, word in enumerate(argv):
        if os.path.basename(word) in ("bash", "sh"):  # noqa: PTH119
            arguments = _of_the_shell(argv[index + 1 :])
            return None if arguments is None else (index, arguments)
        if (index == 0 or started in _STARTERS) and is_script(word, started == "sbatch"):
            return index, argv[index:]
        if started == "sbatch" and word.startswith("--wrap"):
            _, equals, text = word.partition("=")
            return index, ["-c", *([text] if equals else argv[index + 1 : index + 2])]
    return None


def _of_the_shell(rest: list[str]) -> list[str] | None:
    while rest and rest[0].startswith("-"):
        option, *rest = rest
        if not option.startswith("--") and "c" in option:
            return ["-c", *rest] if rest else None
        if option in ("-o", "--rcfile", "--init-file"):
            rest = rest[1:]
    return rest or None


def is_script(word: str, anywhere: bool = False) -> bool:
    """Whether a word is the path of a shell script of this machine.

    A name alone is looked up on PATH, and no file of the working directory, unless ``anywhere``.
    """
    if os.sep not in word and not anywhere:
        return False
    try:
        with open(word, "rb") as file:  # noqa: PTH123
            first = file.readline(200)
    except OSError:
        return False
    return first.startswith(b"#!") and any(name in first for name in (b"bash", b"/sh", b" sh"))


#: What a job is told of its request: option -> (its short form, variables).
_OF_THE_JOB = {
    "--nodes": ("-N", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    "--ntasks": ("-n", ("SLURM_NTASKS", "SLURM_NPROCS")),
    "--ntasks-per-node": ("", ("SLURM_NTASKS_PER_NODE",)),
    "--cpus-per-task": ("-c", ("SLURM_CPUS_PER_TASK",)),
    "--gpus-per-node": ("", ("SLURM_GPUS_PER_NODE",)),
    "--gpus-per-task": ("", ("SLURM_GPUS_PER_TASK",)),
    "--gpus": ("-G", ("SLURM_GPUS",)),
    "--job-name": ("-J", ("SLURM_JOB_NAME",)),
    "--partition": ("-p", ("SLURM_JOB_PARTITION",)),
}


def job(script: str, given: list[str]) -> dict[str, str]:
    """Variables that Slurm sets in a job of this script, as far as its request says them.

    Args:
        script: its path; its ``#SBATCH`` lines are read.
        given: sbatch's own options, which win.
    """
    words: list[str] = []
    try:
        with open(script, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("#SBATCH"):
                    words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
                elif line.strip() and not line.startswith("#"):
                    break
    except (OSError, ValueError):
        words = []
    if not words and not given:
        return {}
    words += given
    found = {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    found |= {"SLURM_SUBMIT_DIR": os.getcwd()}  # noqa: PTH109
    found |= dict.fromkeys(_OF_THE_JOB["--nodes"][1], "1")
    for index, word in enumerate(words):
        for option, (short, variables) in _OF_THE_JOB.items():
            value = None
            if word.startswith(f"{option}="):
                value = word.partition("=")[2]
            elif word in (option, short) and index + 1 < len(words):
                value = words[index + 1]
            elif short and word.startswith(short) and word[2:3].isdigit():
                value = word[2:]
            if value is not None:
                # of "2-4" nodes the fewest
                value = value.partition("-")[0] if option == "--nodes" else value
                found |= dict.fromkeys(variables, value)
    return found


def assigned(before: list[str]) -> dict[str, str]:
    """Variables that a command's own options give: ``env A=1 …``, ``docker exec -e A=1 …``,
    ``sbatch --export=ALL,A=1 …``."""
    found = {}
    for word in before:
        several = word.startswith("--export=")
        for piece in word.removeprefix("--export=").split(",") if several else [word]:
            match = re.fullmatch(r"(?:--env=|-e)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", piece, re.DOTALL)
            if match:
                found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
