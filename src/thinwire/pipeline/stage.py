"""A pipeline stage whose boundaries carry k coefficients per token in place of d channels.

Sender:    z = cast((X - X0[ids]) U), difference and product in fp32.
Receiver:  X = z U^T + X0[ids], in fp32, then cast to the activation dtype.
Backward:  g_z = cast(g U); the sender goes on with g_z U^T. Plain autograd of the two lines.

Between stages travel, in this order: the ids message (where ids are sent), then the coefficients.
Stages on one rank hand X over as it is.

Legend: `B` sequences of a micro-batch, `T` tokens, `D` width, `K` coefficients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.ledger import Ledger
from thinwire.errors import ConfigError, WireError
from thinwire.pipeline.basis import Basis, wide
from thinwire.pipeline.carrier import Carrier
from thinwire.pipeline.constraint import Constraint
from thinwire.pipeline.ids import Header, ids_nbytes, pack_ids, unpack_ids
from thinwire.pipeline.tables import FixedRows

__all__ = ["Boundary", "Stage"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """What all boundaries of a pipeline share.

    Attributes:
        basis: the subspace.
        mode: "constrained", "lossy", or "none" (dense activations).
        carrier: how coefficients travel.
        ids: "send" with each micro-batch, "local" (each stage is given them as `tokens=`), or
            "none" (X0 is zero).
        tables: X0 rows; None with ids "none" and mode "none".
        activations: dtype of X between stages.
        ledger: books what boundaries send, on link "pipeline".
    """

    basis: Basis
    mode: str
    carrier: Carrier
    ids: str
    tables: FixedRows | None
    activations: torch.dtype
    ledger: Ledger | None

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary's size."""
        assert self.tables is not None
        return self.tables.vocab_size

    def ids_nbytes(self, tokens: int) -> int:
        """Return the bytes of the ids message of a micro-batch of `tokens`, 0 where none goes."""
        if self.ids != "send" or self.mode == "none":
            return 0
        return ids_nbytes(tokens, self.vocab_size)

    def nbytes(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes sent forward and backward for a micro-batch [B, T]."""
        tokens = shape[0] * shape[1]
        if self.mode == "none":
            dense = tokens * self.basis.dim * self.activations.itemsize
            return dense, dense
        z = self.carrier.nbytes((*shape, self.basis.rank))
        return z + self.ids_nbytes(tokens), z


class Stage(nn.Module):
    """A stage module between a decoder and an encoder; give it to torch's `PipelineStage`.

    Made by `wrap` or `Link.wrap`. `module` stays the caller's: take parameters, optimizer and
    state dict from it, so that names don't change.

    Attributes:
        module: maps token ids (first stage) or X [B, T, D] to X, or to the output (last stage).
        index: of the stage.
        constraint: keeps writes in the subspace; None where no boundary follows, or mode differs.
        micro_batch: (B, T) of the tensors to come; `static_args` sets it.
        round: outer round, in the header of ids messages.
    """

    constraint: Constraint | None

    def __init__(
        self,
        module: nn.Module,
        index: int,
        boundary: Boundary,
        *,
        before: str,
        after: str,
        constraint: Constraint | None,
    ) -> None:
        """Join a module and its boundaries.

        Args:
            module: the caller's stage module.
            index: of the stage.
            boundary: shared settings.
            before: the boundary before: "none" (first stage), "wire", or "local" (same rank).
            after: the boundary after: "none" (last stage), "wire", or "local".
            constraint: of this stage's writes.
        """
        super().__init__()
        self.module, self.index, self.boundary = module, index, boundary
        self.before, self.after, self.constraint = before, after, constraint
        self.tables = boundary.tables
        self.micro_batch: tuple[int, int] | None = None
        self.round = 0
        self._received = self._sent = 0
        self._off = torch.zeros(())

    def forward(self, *args: Tensor, tokens: Tensor | None = None, **kwargs: Any) -> Any:
        """Decode, run the module, encode.

        Args:
            *args: token ids [B, T] on the first stage, else what the stage before sent.
            tokens: ids [B, T] where the stage has to be given them (ids "local").
            **kwargs: go to the module.

        Raises:
            WireError: what arrived doesn't fit this end of the boundary.
        """
        ids, x = self._receive(args, tokens)
        return self._send(ids, self.module(x, **kwargs))

    def static_args(
        self, batch_seqs: int, num_tokens: int, output_dim: int | None = None
    ) -> dict[str, Any]:
        """Return `input_args` and `output_args` for torch's `PipelineStage`.

        Args:
            batch_seqs: sequences B of a micro-batch.
            num_tokens: tokens T of a sequence.
            output_dim: width of the last stage's output (the vocabulary, say).

        Raises:
            ConfigError: the last stage's width is missing.
        """
        self.micro_batch = (batch_seqs, num_tokens)
        device = next(self.module.parameters()).device
        if self.after == "none" and output_dim is None:
            raise ConfigError("the last stage's static_args need output_dim (the vocabulary, say)")
        ids = torch.empty(batch_seqs, num_tokens, dtype=torch.int64, device=device)
        out = torch.empty(
            batch_seqs,
            num_tokens,
            output_dim or 0,
            dtype=self.boundary.activations,
            device=device,
            requires_grad=True,
        )
        return {
            "input_args": ids if self.before == "none" else self._on_wire(self.before, device),
            "output_args": out if self.after == "none" else self._on_wire(self.after, device),
        }

    def _on_wire(self, side: str, device: torch.device) -> tuple[Tensor, ...]:
        assert self.micro_batch is not None
        b, shape = self.boundary, self.micro_batch
        size: tuple[int, ...] = (*shape, b.basis.dim)
        dtype = b.activations
        if side == "wire" and b.mode != "none":
            size, dtype = b.carrier.shape((*shape, b.basis.rank)), b.carrier.dtype
        body = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
        message = torch.empty(b.ids_nbytes(shape[0] * shape[1]), dtype=torch.uint8, device=device)
        return (message, body) if message.numel() else (body,)

    def _receive(
        self, args: tuple[Tensor, ...], tokens: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return ids and the module's input."""
        b = self.boundary
        if self.before == "none":
            return args[0], args[0]
        if len(args) != (2 if b.ids_nbytes(1) else 1):
            raise WireError(
                f"stage {self.index} got {len(args)} tensors from the stage before: give both "
                "stages the same mode and ids setting"
            )
        body = args[-1]
        ids = self._ids(args, tokens, body)
        if self.before == "local" or b.mode == "none":
            if b.mode == "none" and self.before == "wire":
                body = self._on_arrival(body, body.nbytes)
            return ids, body
        if body.dtype != b.carrier.dtype:
            raise WireError(
                f"stage {self.index} expects {b.carrier.dtype} from the stage before, got "
                f"{body.dtype}: give both stages the same wire"
            )
        shape = self._shape(body)
        want = b.carrier.shape((*shape, b.basis.rank))
        if tuple(body.shape) != want:
            raise WireError(
                f"stage {self.index} expects coefficients of shape {want}, got "
                f"{tuple(body.shape)}: give both stages one basis and micro-batch shape"
            )
        dtype = torch.float64 if b.activations == torch.float64 else torch.float32
        with torch.autocast(body.device.type, enabled=False):
            body = self._on_arrival(body, body.nbytes)
            x = b.basis.expand(b.carrier.unload(body, (*shape, b.basis.rank), dtype))
            return ids, (x + self._fixed(ids, x)).to(b.activations)

    def _ids(self, args: tuple[Tensor, ...], tokens: Tensor | None, body: Tensor) -> Tensor | None:
        b = self.boundary
        if b.mode == "none" or b.ids == "none":
            return None
        if b.ids == "local":
            if tokens is None:
                raise ConfigError(
                    f"stage {self.index} has ids='local': pass tokens= to schedule.step on every "
                    "stage after the first"
                )
            return tokens
        want = Header(b.basis.version, self.round, self._received)
        self._received += 1
        return unpack_ids(args[0], self._shape(body), b.vocab_size, want)

    def _shape(self, body: Tensor) -> tuple[int, int]:
        if body.ndim == 3:
            return body.shape[0], body.shape[1]
        if self.micro_batch is None:
            raise ConfigError(
                f"stage {self.index} receives packed coefficients: call static_args first, which "
                "sets the micro-batch's shape"
            )
        return self.micro_batch

    def _send(self, ids: Tensor | None, x: Any) -> Any:
        b = self.boundary
        if self.after == "none":
            return x
        tokens = x.shape[0] * x.shape[1]
        if self.after == "wire":
            dense = x.numel() * b.activations.itemsize
            self._book(dense, b.nbytes((x.shape[0], x.shape[1]))[0])
        if b.mode == "none":
            return x
        body = x
        if self.after == "wire":
            with torch.autocast(x.device.type, enabled=False):
                body = self._encode(ids, x)
        if not b.ids_nbytes(tokens):
            return body
        assert ids is not None
        message = pack_ids(ids, b.vocab_size, Header(b.basis.version, self.round, self._sent))
        self._sent += 1
        return message, body

    def _encode(self, ids: Tensor | None, x: Tensor) -> Tensor:
        basis = self.boundary.basis
        moved = wide(x)
        moved = moved - self._fixed(ids, moved)
        z = basis.project(moved)
        with torch.no_grad():
            rest = (moved - basis.expand(z)).norm() / x.float().norm().clamp_min(1e-30)
            self._off = torch.maximum(self._off.to(rest.device), rest.float())
        return self.boundary.carrier.load(z)

    def _fixed(self, ids: Tensor | None, like: Tensor) -> Tensor:
        if self.tables is None or ids is None:
            return torch.zeros((), dtype=like.dtype, device=like.device)
        return self.tables(ids).to(like.dtype)

    def _book(self, dense: int, sent: int) -> None:
        if self.boundary.ledger is not None:
            self.boundary.ledger.book("pipeline", dense_bytes=dense, wire_bytes=sent)

    def _on_arrival(self, body: Tensor, nbytes: int) -> Tensor:
        """Book the gradient's way back; autograd passes here once per micro-batch."""
        shape = self._shape(body)
        dense = shape[0] * shape[1] * self.boundary.basis.dim * self.boundary.activations.itemsize
        return _Passing.apply(body, lambda: self._book(dense, nbytes))

    def take_health(self) -> float:
        """Return the largest share of X that lay off the subspace since the last call.

        That is |X - X0 - (X - X0) P| / |X|, over the micro-batches encoded: what the boundary lost.
        """
        off, self._off = self._off.item(), torch.zeros(())
        return off

    @torch.no_grad()
    def resplit(self, embedding: Tensor, positions: Tensor | None = None) -> None:
        """Split a synchronized embedding anew (T_perp, T_S), and project what the stage writes."""
        if self.tables is not None:
            self.tables.resplit(self.boundary.basis, embedding, positions)
        if self.constraint is not None:
            self.constraint.project()


class _Passing(torch.autograd.Function):
    """The identity, which tells when a gradient passes, and makes it ready to be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.tell()
        return grad.contiguous(), None
