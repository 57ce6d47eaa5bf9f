"""What keeps the ranks of a probe together: one clock, one budget, one way to fail or to stop.

Ranks decide nothing on numbers of their own. `Clock.agree` takes the largest of every rank's
numbers, so that all ranks plan the same calls; a failure or an interruption on one rank raises on
all of them in the same call.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from thinwire import _compat
from thinwire.errors import ConfigError, PeerError, ThinwireError

__all__ = ["Clock", "ProbeError", "ProbeInterrupted", "interruptible"]


class ProbeError(ThinwireError):
    """Something that the probe timed failed; every rank raises it."""


class ProbeInterrupted(ThinwireError):
    """The probe was stopped half-way; every rank raises it and nothing is written.

    Attributes:
        status: exit status of a command that ends with it.
    """

    status = 130


class Clock:
    """Time and bytes that a probe may take, agreed over the default group.

    Args:
        seconds: time of the whole probe.
        max_nbytes: bytes that a rank may send.
        device: where timed work runs.
        timeout_s: seconds after which a rank that doesn't answer is given up.
        progress: show a bar on rank 0.

    Attributes:
        elapsed_s: seconds so far, of the slowest rank at the last agreement.
        sent_nbytes: bytes that a rank has sent.
        interrupted: this rank was asked to stop; the next agreement tells the others.

    Raises:
        ConfigError: a budget of nothing.
    """

    def __init__(
        self,
        seconds: float,
        max_nbytes: int,
        device: torch.device,
        *,
        timeout_s: float = 120.0,
        progress: bool = False,
    ) -> None:
        for name, value in (("seconds", seconds), ("max_nbytes", max_nbytes)):
            if not 0 < value < math.inf:
                raise ConfigError(f"the probe's {name} must be above 0 and finite, got {value}")
        self.seconds, self.max_nbytes, self.timeout_s = seconds, max_nbytes, timeout_s
        self.device = device
        self.elapsed_s, self.sent_nbytes, self.interrupted = 0.0, 0, False
        self._what, self._start = "the mesh", time.perf_counter()
        shown = progress and dist.get_rank() == 0
        self._bar = tqdm(total=round(seconds), unit="s", desc="probe", disable=not shown)
        cuda_only = _compat.takes_cuda_only(_compat.default_group())
        self._numbers = device if cuda_only else torch.device("cpu")

    def left_s(self, until_s: float) -> float:
        """Return the agreed seconds that are left until `until_s` after the start."""
        return max(0.0, until_s - self.elapsed_s)

    def agree(self, values: Sequence[float], failure: str = "") -> list[float]:
        """Return the largest of every rank's values; collective over the default group.

        Args:
            values: as many on every rank.
            failure: what went wrong on this rank, empty if nothing did.

        Raises:
            ProbeError: on every rank, if one failed; the message is the first failing rank's.
            ProbeInterrupted: on every rank, if one was asked to stop.
        """
        own = [bool(failure), self.interrupted, time.perf_counter() - self._start, *values]
        numbers = torch.tensor(own, dtype=torch.float64, device=self._numbers)
        with self.peers(self._what):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            failed, stopped, self.elapsed_s, *largest = numbers.tolist()
            if failed:
                raise ProbeError(self._first(failure))
        if stopped:
            raise ProbeInterrupted("the probe was interrupted: nothing was written")
        return largest

    def _first(self, failure: str) -> str:
        texts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(texts, failure)
        rank = next(rank for rank, text in enumerate(texts) if text)
        return f"rank {rank}: {texts[rank]}"

    def alone(self, what: str, work: Callable[[], list[float]], count: int) -> list[float]:
        """Do work that needs no peer and agree on its `count` numbers, or on its failure.

        Raises:
            ProbeError: it raised on some rank.
        """
        values, failure = [0.0] * count, ""
        try:
            values = work()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must learn of it
            failure = f"{what} failed: {_line(error)}"
        return self.agree(values, failure)

    @contextmanager
    def peers(self, what: str) -> Iterator[None]:
        """Turn a lost peer's error inside the block into one for people.

        Raises:
            PeerError: a collective failed or timed out.
        """
        try:
            yield
        except ThinwireError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"probe of {what}: a rank failed or did not answer within {self.timeout_s:g} s "
                f"({_line(error)})"
            ) from error

    def meet(self) -> None:
        """Wait for every rank, so that a timed call begins everywhere at once."""
        self.synchronize()
        dist.barrier()

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_s(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Return the seconds of one of `calls` calls in a row."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / calls

    def show(self, what: str) -> None:
        """Move the bar to now and say what is timed."""
        self._what = what
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.n = min(round(self.elapsed_s), self._bar.total or 0)
        self._bar.refresh()

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


@contextmanager
def interruptible(clock: Clock) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM stop all ranks at their next agreement, the second at once.

    Off the main thread, where Python takes no handlers, signals do what they did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if clock.interrupted:
            raise KeyboardInterrupt
        clock.interrupted = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
