"""Where state lies: beside the parameters, or in host memory with two buffers on the device.

A sweep walks the runs in order. Offloaded, while run j is computed, j+1 is fetched and j-1 is
written back, on a copy stream where there is one. What is computed does not depend on it.

Legend: `N` elements of a run, `E` of them in the mask.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.scape.layout import Run

__all__ = ["Offloaded", "Resident", "Store"]

State = dict[str, Tensor]


class Store(Protocol):
    """Give a run's state to who computes with it; `names` is what lies in host memory."""

    names: tuple[str, ...]

    def adopt(self, runs: Sequence[Run]) -> None:
        """Take over the state of new runs."""

    def read(self, run: Run, index: Tensor | None) -> State:
        """Return the state of a run at positions [E] (None: all [N]), as float, not to be written.

        Residuals in bf16 come as the dtype of the other state.
        """

    def sweep(self, runs: Sequence[Run]) -> Iterator[tuple[Run, State]]:
        """Yield each run with its whole state, to be updated in place before the next is asked."""


class Resident:
    """State on the device of the parameters."""

    names: tuple[str, ...] = ()

    def adopt(self, runs: Sequence[Run]) -> None:
        """See `Store`."""

    def read(self, run: Run, index: Tensor | None) -> State:
        """See `Store`."""
        return {k: s if index is None else s[index] for k, s in run.state.items()}

    def sweep(self, runs: Sequence[Run]) -> Iterator[tuple[Run, State]]:
        """See `Store`."""
        for run in runs:
            yield run, run.state


class Offloaded:
    """State in host memory, pinned where the device is a CUDA one.

    Args:
        names: which state is moved; the rest stays on the device.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._streams: dict[torch.device, Any] = {}

    def adopt(self, runs: Sequence[Run]) -> None:
        """See `Store`."""
        for run in runs:
            for name in self._moved(run):
                x = run.state[name]
                run.state[name] = torch.zeros(
                    x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda"
                )

    def read(self, run: Run, index: Tensor | None) -> State:
        """Return the state; what is on the host is indexed there, so that E elements travel."""
        device = run.entries[0].param.device
        out = {}
        for name, x in run.state.items():
            if index is not None:
                x = x[index.to(x.device)]
            out[name] = x.to(device)
        return out

    def sweep(self, runs: Sequence[Run]) -> Iterator[tuple[Run, State]]:
        """See `Store`."""
        buffers: list[State] = [{}, {}]
        done: list[Any] = [None, None]
        if runs:
            done[0] = self._fetch(runs[0], buffers[0])
        for i, run in enumerate(runs):
            here, other = i % 2, (i + 1) % 2
            self._wait(run, done[here])
            if i + 1 < len(runs):
                # The copy stream keeps order: this fetch follows the write-back of run i-1.
                done[other] = self._fetch(runs[i + 1], buffers[other])
            yield run, run.state | buffers[here]
            self._write_back(run, buffers[here])
        for run in runs[-2:]:
            self._synchronize(run)

    def _moved(self, run: Run) -> list[str]:
        return [name for name in run.state if name in self.names]

    def _stream(self, run: Run) -> Any:
        device = run.entries[0].param.device
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _fetch(self, run: Run, buffer: State) -> Any:
        stream, device = self._stream(run), run.entries[0].param.device
        with self._on(stream):
            for name in self._moved(run):
                host = run.state[name]
                held = buffer.get(name)
                if held is None or held.shape != host.shape or held.dtype != host.dtype:
                    buffer[name] = torch.empty(host.shape, dtype=host.dtype, device=device)
                buffer[name].copy_(host, non_blocking=True)
            return None if stream is None else stream.record_event()

    def _wait(self, run: Run, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(run.entries[0].param.device).wait_event(event)

    def _write_back(self, run: Run, buffer: State) -> None:
        stream = self._stream(run)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(run.entries[0].param.device))
        with self._on(stream):
            for name in self._moved(run):
                run.state[name].copy_(buffer[name], non_blocking=True)

    def _synchronize(self, run: Run) -> None:
        stream = self._stream(run)
        if stream is not None:
            stream.synchronize()
