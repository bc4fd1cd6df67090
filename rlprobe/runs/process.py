"""Start a framework's command, watch it, and leave none of its processes behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlprobe.runs import logs, sharedmemory

#: Marks every process of one run, whatever it was forked from; Ray's daemons inherit it.
MARK = "RLPROBE_RUN_ID"

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0
#: How often a run's processes are looked at for memory that they share.
_LOOK_S = 5.0
#: How long a process that shows no environment may be on its way to another program.
_SETTLE_S = 1.0
#: ``PF_KTHREAD``: one of the kernel's own, which never has an environment.
_KERNEL_THREAD = 0x00200000


def run(
    argv: Sequence[str],
    *,
    run_id: str,
    log: Path,
    watch: Callable[[], None],
    interval_s: float = 0.5,
) -> int:
    """Run ``argv`` with its output in ``log``, secrets left out, calling ``watch`` while it runs.

    The child leads a process group of its own and is told to end when this process dies, however
    it dies. Afterwards every process that carries this run's mark is ended, so that a cancelled or
    crashed run leaves no Ray daemon, and what they shared in memory is removed.

    Returns:
        The child's exit status, negative for a signal.
    """
    environment = {**os.environ, MARK: run_id}
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        shared: set[sharedmemory.Segment] = set()
        looked = time.monotonic()
        with _forwarding_signals(child), logs.written(child.stdout, output):
            try:
                while child.poll() is None:
                    watch()
                    if time.monotonic() - looked > _LOOK_S:
                        shared |= sharedmemory.mapped(_marked(run_id))
                        looked = time.monotonic()
                    time.sleep(interval_s)
                watch()
            finally:
                shared |= sharedmemory.mapped(_marked(run_id))
                end_marked(run_id)
                child.wait()
                sharedmemory.remove(shared)
    return child.returncode


def attached(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``argv`` on this terminal, as if it had been called itself.

    What the terminal sends (ctrl-C) reaches both, and the command alone decides what comes of it;
    a SIGTERM to this process is passed on.

    Returns:
        The exit status as a shell has it: 128 + n where signal n ended the command.
    """
    child = subprocess.Popen(argv, env=dict(environment), preexec_fn=end_with_parent)
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: child.terminate()),
    }
    try:
        status = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def end_with_parent() -> None:
    """For ``preexec_fn``: this child gets SIGTERM when its parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _forwarding_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM and SIGINT end the child and then this command, with the usual exit status.

    Raises:
        KeyboardInterrupt: on SIGINT, which the command says.
    """

    def end(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    previous = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_marked(run_id: str) -> None:
    """End every process of this run on this machine: SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    while True:
        found = [pid for pid in _marked(run_id) if pid != os.getpid()]
        if not found:
            return
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if number == signal.SIGKILL and time.monotonic() > deadline + _GRACE_S:
            return
        time.sleep(0.2)


def _marked(run_id: str) -> list[int]:
    return holding(MARK, run_id)


def holding(variable: str, value: str) -> list[int]:
    """Living processes of this machine whose environment has a variable with this value.

    A process that is just becoming another program has no environment for a moment (between the
    old memory and the new): it is looked at again, so that ``nohup … &`` is not overlooked.
    """
    wanted = f"{variable}={value}".encode()
    found, unsettled = _scan(_numbers(), wanted)
    deadline = time.monotonic() + _SETTLE_S
    while unsettled and time.monotonic() < deadline:
        time.sleep(0.02)
        more, unsettled = _scan(unsettled, wanted)
        found += more
    return found


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _scan(numbers: Iterable[int], wanted: bytes) -> tuple[list[int], list[int]]:
    """Which of them have ``wanted`` in their environment, and which have none at all yet."""
    found, unsettled = [], []
    for number in numbers:
        try:
            environment = Path(f"/proc/{number}/environ").read_bytes()
            # proc(5): after the name in brackets come the state and, sixth, the flags
            after_name = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended in between, or is another user's
        if after_name[0] in "ZX":
            continue
        if wanted in environment.split(b"\0"):
            found.append(number)
        elif not environment and not int(after_name[6]) & _KERNEL_THREAD:
            unsettled.append(number)
    return found, unsettled
