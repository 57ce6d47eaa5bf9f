"""Runs trials as child processes, some at a time, and lets none outlive the comparison."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.errors import ConfigError, RunError
from thinwire.lab.trials import Trial, read_trial

__all__ = ["Failure", "run_all", "terminate_as_interrupt"]

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that gave no result: which, the last line it wrote to standard error, its log."""

    arm: str
    seed: int
    message: str
    log: str

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}, failed: {self.message} (log: {self.log})"


def run_all(
    trials: Sequence[Trial], jobs: int, say: Callable[[str], None], command: Sequence[str]
) -> list[Failure]:
    """Run the trials, at most `jobs` at a time, in order; return those that failed.

    Args:
        trials: what to run.
        jobs: processes of `thinwire train` at the same time.
        say: takes a line about each trial that ended.
        command: the words of `thinwire train`, before its arguments.
    """
    processes = _Processes(command)
    failures = []
    pool = ThreadPoolExecutor(jobs)
    try:
        with terminate_as_interrupt():
            futures = {pool.submit(_run_one, processes, trial): trial for trial in trials}
            for done, future in enumerate(as_completed(futures), start=1):
                trial, failure = futures[future], future.result()
                what = str(failure) if failure else f"{trial.arm.name}, seed {trial.seed}, done"
                say(f"[{done}/{len(trials)}] {what}")
                failures += [failure] if failure else []
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop()
    return failures


def _run_one(processes: "_Processes", trial: Trial) -> Failure | None:
    try:
        processes.run(trial)
        if read_trial(trial) is None:
            raise RunError(f"it ended well but left no run.json of {trial.steps} steps")
    except (RunError, ConfigError, OSError) as error:
        return Failure(trial.arm.name, trial.seed, str(error), str(trial.log))
    return None


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that no rank outlives its command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Processes:
    """Starts trials as child processes and ends them all when asked to."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, trial: Trial) -> None:
        """Run a trial to its end.

        Raises:
            RunError: it failed; the message is its last line on standard error.
        """
        trial.out.parent.mkdir(parents=True, exist_ok=True)
        with trial.log.open("wb") as stderr, trial.log.with_suffix(".out").open("wb") as stdout:
            status = self._wait([*self._command, *trial.arguments], stdout, stderr)
        if status < 0:
            raise RunError(f"ended by signal {signal.Signals(-status).name}")
        if status:
            silent = f"exit status {status} and nothing on standard error"
            raise RunError(_last_line(trial.log) or silent)

    def _wait(self, words: list[str], stdout: Any, stderr: Any) -> int:
        with self._lock:
            if self._stopped:
                raise RunError("stopped before it began")
            # A session of its own, so that stop() also reaches the ranks it starts.
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._children.add(child)
        try:
            return child.wait()
        finally:
            with self._lock:
                self._children.discard(child)

    def stop(self) -> None:
        """End every running trial with its ranks, and start no other."""
        with self._lock:
            self._stopped = True
            children = list(self._children)
        # Ctrl-C lets the trainer clear its files away; the others are for what doesn't heed it,
        # the last one also for ranks that outlive their parent.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            for child in children:
                _signal_group(child, number)
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_PATIENCE_S)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
