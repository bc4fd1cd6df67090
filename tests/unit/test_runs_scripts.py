"""What would a shell script run? Found out by bash, with none of its commands run."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from rlprobe.errors import UsageError
from rlprobe.frameworks.adopted import Training
from rlprobe.runs.scripts import trace, training, words


@pytest.mark.parametrize(
    ("text", "assignments", "found", "redirections"),
    [
        ("python x.py a b", [], ["python", "x.py", "a", "b"], []),
        ("A=1 B='q r' python x", ["A=1", "B='q r'"], ["python", "x"], []),
        ("X=1", ["X=1"], [], []),
        ("X=([0]=a b c)", ["X=([0]=a b c)"], [], []),
        ("python x=1 A=2", [], ["python", "x=1", "A=2"], []),
        ("a > log", [], ["a"], [">log"]),
        ("a >> 'my log' 2>&1", [], ["a"], [">>'my log'", "2>&1"]),
        ("a &> $DIR/log b", [], ["a", "b"], ["&>$DIR/log"]),
        ("a x2>f", [], ["a", "x2"], [">f"]),
        ("a 'x > y' \"p < q\"", [], ["a", "'x > y'", '"p < q"'], []),
        ("a \\> b", [], ["a", "\\>", "b"], []),
        ('a "$(b "c d" > e)" f', [], ["a", '"$(b "c d" > e)"', "f"], []),
        ("a ${X:-p q} $(b c)d", [], ["a", "${X:-p q}", "$(b c)d"], []),
        ("a <(b > c) >(d)", [], ["a", "<(b > c)", ">(d)"], []),
        ("a $'it\\'s' z", [], ["a", "$'it\\'s'", "z"], []),
        ("a `b 'c' d` e", [], ["a", "`b 'c' d`", "e"], []),
        ("a <<EOF -x\nbody > nothing\nEOF\n", [], ["a", "-x"], ["<<EOF"]),
        ("a <<< \"$X\"", [], ["a"], ['<<<"$X"']),
        ("a 2>/dev/null", [], ["a"], ["2>/dev/null"]),
    ],
)  # fmt: skip
def test_a_command_is_told_apart(
    text: str, assignments: list[str], found: list[str], redirections: list[str]
) -> None:
    assert words.split(text) == (assignments, found, redirections)


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a $(b", "a ${b", "a `b"])
def test_what_is_not_closed_is_not_run(text: str) -> None:
    assert "__rlp_r=1" in words.described(text)


@pytest.mark.parametrize(
    ("redirections", "file"),
    [
        ([], False),
        (["2>&1"], False),
        ([">/dev/null"], False),
        (["<in"], False),
        ([">&-"], False),
        ([">log"], True),
        (["2>>err"], True),
        (["&>all"], True),
        ([">|force"], True),
        ([">&log"], True),
    ],
)
def test_output_to_a_file_is_known(redirections: list[str], file: bool) -> None:
    assert words.to_a_file(redirections) is file


def _traced(directory: Path, text: str, *arguments: str) -> list[trace.Command]:
    script = directory / "run.sh"
    script.write_text(text)
    return trace.commands([str(script), *arguments])


def test_bash_expands_and_runs_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "log.txt"
    kept.write_text("an older run's\n")
    (tmp_path / "precious").touch()
    found = _traced(
        tmp_path,
        f"""#!/usr/bin/env bash
set -euxo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
export A=1
N=$((4 * 2))
DATA=(
  data.train_files="$HERE/a.parquet"
  data.train_batch_size=$N   # a comment
)
rm -rf {tmp_path}/precious
touch {tmp_path}/made
/usr/bin/touch {tmp_path}/made
echo x > {tmp_path}/echoed
cp {kept} {tmp_path}/copy
while ! ray status; do sleep 1; done
train() {{
  B="q r" python3 -m verl.trainer.main_ppo "${{DATA[@]}}" m=${{M:-/m}} "$@" 2>&1 | tee {kept}
}}
if [ -d /etc ]; then train last > {kept}; fi
for lr in 1e-5 1e-6; do python3 sweep.py lr=$lr; done
""",
        "more",
        "two words",
    )
    argv = [command.argv for command in found]
    assert ("python3", "sweep.py", "lr=1e-6") in argv
    trained = next(command for command in found if "verl.trainer.main_ppo" in command.argv)
    assert trained.argv == (
        "python3", "-m", "verl.trainer.main_ppo", f"data.train_files={tmp_path}/a.parquet",
        "data.train_batch_size=8", "m=/m", "last",
    )  # fmt: skip
    assert trained.environment == {"A": "1", "B": "q r"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "precious", "run.sh"]
    assert kept.read_text() == "an older run's\n"


def test_what_a_script_asks_decides(tmp_path: Path) -> None:
    """Tests of every form, true and false: of files, of variables, of what is not set."""
    found = _traced(
        tmp_path,
        """
[ -d /etc ] && python3 yes.py 1
[ -d /no/such/place ] && python3 no.py 1
[ -z "$UNSET" ] || python3 no.py 2
test -n "$UNSET" && python3 no.py 3
[[ -n $HOME && -d /etc ]] && python3 yes.py 2
if [ "${1:-}" = fast ]; then python3 yes.py 3; else python3 no.py 4; fi
case $1 in f*) python3 yes.py 4 ;; *) python3 no.py 5 ;; esac
(( 3 > 2 )) && python3 yes.py 5
while [ ${n:-0} -lt 2 ]; do n=$((${n:-0} + 1)); python3 yes.py loop $n; done
""",
        "fast",
    )
    argv = [" ".join(command.argv[1:]) for command in found]
    assert argv == ["yes.py 1", "yes.py 2", "yes.py 3", "yes.py 4", "yes.py 5",
                    "yes.py loop 1", "yes.py loop 2"]  # fmt: skip


def test_a_scripts_arguments_are_its_own(tmp_path: Path) -> None:
    found = _traced(tmp_path, 'python3 train.py "$@" n=$#\n', "a b", "c")
    assert found[0].argv == ("python3", "train.py", "a b", "c", "n=2")


def test_shells_inside_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text('cd /\nexec python3 train.py --from "$X" "$1"\n')
    found = _traced(
        tmp_path,
        f"export X=1\nbash {tmp_path}/inner.sh one\n"
        'docker exec -e Y=2 box bash -lc "cd /usr && python3 other.py $X"\n',
    )
    argv = [(command.argv, command.cwd) for command in found]
    assert (("python3", "train.py", "--from", "1", "one"), "/") in argv
    assert (("python3", "other.py", "1"), "/usr") in argv


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "world"),
    [
        ("./{script} last", "8"),
        ("bash -x {script} last", "8"),
        ("sh {script} last", "8"),
        ("nohup ./{script} last", "8"),
        ("N=4 bash {script} last", "4"),
        ("env N=4 bash {script} last", "4"),
        ("sbatch --nodes=2 --export=ALL,N=4 {script} last", "4"),
        ("sbatch -p npu --wrap './{script} last'", "8"),
        ("srun --nodes=2 ./{script} last", "8"),
        ("docker exec -e N=2 box bash -lc './{script} last'", "2"),
    ],
)
def test_a_command_that_starts_a_script_is_read_as_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, world: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.slurm"
    script.write_text('#!/bin/bash\npython3 train.py n=${N:-8} "$1"\ntouch made\n')
    words = shlex.split(command.format(script=script.name))
    wanted = ("python3", "train.py", f"n={world}", "last")
    # which is read as a script that holds it
    assert wanted in [found.argv for found in trace.of_command(words).commands]
    assert not (tmp_path / "made").exists()


_BATCH = """#!/bin/bash
#SBATCH --job-name=grpo    # a name
#SBATCH -N 2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
set -x
#SBATCH --nodes=9
GPUS=${SLURM_GPUS_PER_NODE:-8}
python3 train.py $SLURM_NNODES $SLURM_JOB_NUM_NODES $GPUS $SLURM_CPUS_PER_TASK "$SLURM_JOB_NAME"
"""


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("bash {script}", "2 2 4 64 grpo"),
        ("sbatch {script}", "2 2 4 64 grpo"),
        ("sbatch -N4 --gpus-per-node 8 {script}", "4 4 8 64 grpo"),
        ("sbatch --nodes=3-6 -J other {script}", "3 3 4 64 other"),
        ("SLURM_NNODES=7 bash {script}", "7 2 4 64 grpo"),
    ],
)
def test_a_job_is_told_what_its_script_asks_slurm_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.slurm"
    script.write_text(_BATCH)
    words = shlex.split(command.format(script=script.name))
    alone = words[0] == "bash"
    found = trace.commands(words[1:]) if alone else trace.of_command(words).commands
    (trained,) = (one for one in found if one.argv[:1] == ("python3",))
    assert trained.argv == ("python3", "train.py", *wanted.split())
    # what a scheduler sets is no part of an alignment
    assert not [name for name in trained.environment if name.startswith("SLURM_")]


@pytest.mark.parametrize(
    "command", ["chmod +x ./train.slurm", "cp ./train.slurm other", "vi ./train.slurm"]
)
def test_a_command_that_only_names_a_script_does_not_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.slurm").write_text("#!/bin/bash\npython3 train.py\n")
    found = trace.of_command(shlex.split(command)).commands
    assert [one.argv[0] for one in found] == [command.split()[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        'while ! ray status | grep -q "16.0 NPU"; do touch made; sleep 5; done',
        "until [ -f ready ]; do sleep 3; done",
        "for i in $(seq 1 500); do if ray status | grep -q NPU; then break; fi; sleep 1; done",
        "while true; do for n in 1 2; do nc -z $n 80 | grep -q ok && break 2; sleep 5; done; done",
        "until false; do /usr/bin/touch made; done",
        "while /usr/bin/touch made | grep -q ''; do /usr/bin/touch made; sleep 5; done | tee log",
        "up() { until curl head | grep -q ok; do echo waiting; done; touch made; }; up",
    ],
)
def test_a_loop_that_waits_for_what_is_not_run_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """As multi-node scripts wait for their Ray."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(f"{loop}\npython3 train.py\n")
    read = trace.read([str(script)], timeout_s=30)
    assert read.status == 0
    every = [command.argv for command in read.commands]
    at = every.index(("python3", "train.py"))
    # of a pipeline that is left a process may note its command a moment later
    assert every[at + 1 :] in ([], [("/usr/bin/touch", "made")])
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_loop_that_never_ends_is_left(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py\nwhile true; do :; done\n")
    began = time.monotonic()
    found = trace.commands([str(script)], timeout_s=2)
    assert [command.argv for command in found] == [("python3", "train.py")]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("#!/usr/bin/env python3\nprint()\n", "accepted: a script for bash")],
)
def test_what_is_no_shell_script_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.sh"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        trace.commands([str(path)])


def _found(*commands: str, **environment: str) -> Training:
    return training.find(
        [trace.Command(tuple(shlex.split(command)), "/srv", environment) for command in commands]
    )


@pytest.mark.parametrize(
    ("command", "entry"),
    [
        ("python3 -m verl.trainer.main_ppo a=1", ("-m", "verl.trainer.main_ppo")),
        ("nohup /opt/py/bin/python -u -m verl.trainer.main_ppo a=1",
         ("-m", "verl.trainer.main_ppo")),
        ("python -X dev -m recipe.dapo.main_dapo actor_rollout_ref.model.path=/m",
         ("-m", "recipe.dapo.main_dapo")),
        ("srun -N1 python3.11 mine/train.py +actor_rollout_ref.x=1", ("mine/train.py",)),
        ("ray job submit --address=http://h:1 -- python3 -m verl.trainer.main_ppo a=1",
         ("-m", "verl.trainer.main_ppo")),
    ],
)  # fmt: skip
def test_the_training_is_found_in_its_wrapping(command: str, entry: tuple[str, ...]) -> None:
    found = _found("pip install x", "python3 -c 'print(1)'", command)
    assert (found.framework, found.entry) == ("verl", entry)


def test_rays_runtime_environment_belongs_to_the_training() -> None:
    found = _found(
        "ray job submit --working-dir code --runtime-env-json "
        """'{"env_vars": {"MASTER": "x", "N": 1}}' -- python3 train.py --hf-checkpoint /m --lr 1""",
        BEFORE="2",
    )
    assert found.framework == "slime"
    assert found.environment == {"BEFORE": "2", "MASTER": "x", "N": "1"}
    assert found.cwd == Path("/srv/code")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            "python3 -m verl.trainer.main_ppo a=1 b=2 c=3",
            "python3 -m verl.trainer.main_ppo a=1 b=2 c=4",
            ("1. python -m verl.trainer.main_ppo c=3", "2. python -m verl.trainer.main_ppo c=4"),
        ),
        (
            "python3 train.py --hf-checkpoint /m --lr 1 --betas 0.9 -1",
            "python3 train.py --hf-checkpoint /m --lr 2 --betas 0.9 -1",
            ("1. python train.py --lr 1", "2. python train.py --lr 2"),
        ),
        (
            "python3 -m verl.trainer.main_ppo a=1",
            "python3 -m verl.trainer.main_ppo a=1 'note=x; y'",
            (
                "1. python -m verl.trainer.main_ppo (no option of its own)",
                "2. python -m verl.trainer.main_ppo 'note=x; y'",
            ),
        ),
        (
            "python3 -m verl.trainer.main_ppo a=1 b=1 c=1 d=1 e=1 f=1",
            "python3 -m verl.trainer.main_ppo g=1",
            (
                "1. python -m verl.trainer.main_ppo a=1 b=1 c=1 d=1 … (2 more)",
                "2. python -m verl.trainer.main_ppo g=1",
            ),
        ),
    ],
)
def test_several_trainings_are_told_apart_by_what_differs(
    first: str, second: str, told: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        _found(first, second)
    head, *lines, advice = str(refused.value).splitlines()
    assert head == "2 trainings were found, which differ in"
    assert tuple(line.strip() for line in lines) == told
    assert advice.startswith("give the one you mean: rlprobe config from-command")


def test_none_and_several_are_said_with_what_there_was() -> None:
    with pytest.raises(UsageError, match=r"no training.*Commands seen: pip install x"):
        _found("pip install x")
    with pytest.raises(UsageError, match=r"2 trainings were found"):
        _found("python -m verl.trainer.main_ppo a=1", "python -m verl.trainer.main_ppo a=2")
    same = "python -m verl.trainer.main_ppo a=1"
    assert _found(same, same).arguments == ("a=1",)


def test_a_runtime_environment_that_is_no_json_is_said() -> None:
    with pytest.raises(UsageError, match="runtime environment"):
        _found("ray job submit --runtime-env-json '{x' -- python -m verl.trainer.main_ppo a=1")
