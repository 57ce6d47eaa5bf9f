"""What a step reports: mask forms and bytes, waits, overlap of successive masks."""

import time

import torch
from torch import Tensor

from thinwire.comm import Ledger
from thinwire.kernels.bitmask import bits_nbytes
from thinwire.scape.messages import codec
from thinwire.scape.table import Piece, Table

__all__ = ["MaskReport"]


class MaskReport:
    """Figures of the last step of one worker.

    Attributes:
        step_s: seconds of the optimizer step.
        values_launched_s: clock when the values left.
        grad_norm: norm that clipping saw, if it looked.
        skipped: steps skipped for NaN or infinity.
    """

    def __init__(self, table: Table, mask_format: str) -> None:
        self.table, self.mask_format = table, mask_format
        self.step_s = 0.0
        self.values_launched_s = 0.0
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self._figures: dict[str, float] = {}
        self._overlap: Tensor | None = None

    def launched(self, density: float, nbytes: int) -> None:
        """Note the forms of the masks that leave, and the bytes of all owners' messages."""
        pieces = self.table.sparse
        forms = [codec(p.kept(density), self.mask_format).form_for(p.numel) for p in pieces]
        bits_bytes = sum(bits_nbytes(p.numel) for p in pieces)
        self._figures |= {
            "mask_index12_tensors": forms.count("index12"),
            "mask_bits_tensors": forms.count("bits"),
            "mask_message_bytes": nbytes,
            "mask_saved_bytes": bits_bytes - nbytes,
        }

    def waited(self, launched_s: float, started_s: float, ledger: Ledger | None) -> None:
        """Note that masks that left at `launched_s` were waited for from `started_s` until now."""
        wait_s = time.perf_counter() - started_s
        self._figures |= {"mask_window_s": started_s - launched_s, "mask_wait_s": wait_s}
        _book_wait(ledger, "masks", wait_s)

    def values_waited(self, ledger: Ledger | None) -> None:
        """Note that the values have arrived."""
        wait_s = time.perf_counter() - self.values_launched_s
        self._figures["value_wait_s"] = wait_s
        _book_wait(ledger, "gradients", wait_s)

    def taken(
        self, old: dict[Piece, Tensor] | None, new: dict[Piece, Tensor], density: float
    ) -> None:
        """Note how much of the new masks stood in the old ones (sparsified pieces only)."""
        self._overlap = None
        if old is None or not new:
            return
        common = [torch.isin(new[p], old[p], assume_unique=True).sum() for p in new]
        total = sum(x.numel() for x in new.values())
        self._overlap = torch.stack(common).sum() / max(1, total)

    def metrics(self) -> dict[str, float]:
        """Return the figures as plain numbers."""
        out = {"scape_step_s": self.step_s, "skipped_steps": float(self.skipped)} | self._figures
        if self._overlap is not None:
            out["mask_overlap"] = self._overlap.item()
        if self.grad_norm is not None:
            out["scape_grad_norm"] = self.grad_norm.item()
        return out


def _book_wait(ledger: Ledger | None, link: str, wait_s: float) -> None:
    if ledger is not None and ledger.timing:
        ledger[link].wait_s += wait_s
