"""One worker's state and arithmetic; it knows no process group, so that N can run in one process.

A step, between which the caller carries messages:
1. `take_masks` (from the messages of the step before) or `all_dense`.
2. `square_norm`, if the caller clips.
3. `outgoing`: what this worker sends, one flat tensor per run. No state has changed so far.
4. `commit`: the mean over workers goes into state and weights, and the next masks are picked.
5. `mask_message`: the masks of the pieces this worker owns.

Legend: `E` elements sent, `N` elements of a run, `K` positions of a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.adams import largest
from thinwire.kernels.finite import all_finite
from thinwire.scape import fused
from thinwire.scape.layout import Entry, Run, make_runs, state_dtype
from thinwire.scape.messages import MaskWire, message_nbytes
from thinwire.scape.rules import Adams, Arrived, Hyper, Rule
from thinwire.scape.select import random_positions, top_positions
from thinwire.scape.store import Resident, Store
from thinwire.scape.table import DENSE_FROM, Piece, Table

__all__ = ["MASK_SOURCES", "Masking", "Worker"]

# owner: published form. random: from a shared key, no messages. union: every worker's own masks.
MASK_SOURCES = ("owner", "random", "union")


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """How masks come about.

    Attributes:
        source: one of `MASK_SOURCES`.
        mask_format: one of `messages.MASK_FORMATS`.
        run_key: 64-bit key of random masks.
    """

    source: str = "owner"
    mask_format: str = "auto"
    run_key: int = 0


class Worker:
    """State of one worker (see the module).

    Args:
        entries: parameters in wire order.
        table: their pieces and owners.
        rank: this worker's rank in the table.
        rule: arithmetic of a step.
        masking: how masks come about.
        store: where the state lies; None keeps it beside the parameters.
        residual_dtype: dtype of the residual; None is the state's.
        run_bytes: largest run, in bytes.
        last_first: see `make_runs`.
        sharded: step the weights of owned and dense pieces only.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        table: Table,
        rank: int,
        rule: Rule,
        masking: Masking,
        *,
        store: Store | None = None,
        residual_dtype: torch.dtype | None = None,
        run_bytes: int = 25 * 2**20,
        last_first: bool = False,
        sharded: bool = False,
    ) -> None:
        self.table, self.rank, self.rule, self.masking = table, rank, rule, masking
        self.store: Store = store or Resident()
        self.runs = make_runs(entries, table, max_bytes=run_bytes, last_first=last_first)
        mine = set(table.sparse if masking.source == "union" else table.owned_by(rank))
        self.own = [[p for p in run.pieces if p in mine] for run in self.runs]
        # Pieces whose weights this worker steps; the others' come from their owners.
        self.stepped = [
            [p for p in run.pieces if not sharded or p.dense or p.owner == rank]
            for run in self.runs
        ]
        self.step = 0
        self.picked: dict[Piece, Tensor] = {}
        for run, pieces in zip(self.runs, self.stepped, strict=True):
            run.make_masters(pieces)
            first = run.entries[0].param
            dtype = state_dtype(first)
            for name in (*rule.shared, "residual"):
                kind = residual_dtype if name == "residual" and residual_dtype else dtype
                run.state[name] = torch.zeros(run.numel, dtype=kind, device=first.device)
        self.store.adopt(self.runs)

    @property
    def owned(self) -> list[Piece]:
        """Return the pieces this worker builds masks of, in wire order."""
        return [p for own in self.own for p in own]

    def hyper(self, run: Run) -> Hyper:
        """Return the numbers of the step that is being made."""
        group = run.group
        beta1, beta2 = group["betas"]
        return Hyper(float(group["lr"]), beta1, beta2, group["eps"], self.step + 1)

    # Step 1: masks

    def all_dense(self) -> None:
        """Send every element in the coming step."""
        for run in self.runs:
            run.index = None

    def take_masks(self, masks: dict[Piece, Tensor]) -> None:
        """Use these positions per sparsified piece in the coming step."""
        for run in self.runs:
            run.index = flat_index(run, masks)

    def wire(self, rank: int, step: int, density: float) -> MaskWire:
        """Return how the masks that `rank` builds for `step` (from 1) travel."""
        return MaskWire(
            self._pieces_of(rank), density, step, self.table.digest, self.masking.mask_format
        )

    def message_lengths(self, density: float) -> list[int]:
        """Return the bytes of every rank's mask message, where shapes and density tell them."""
        how = self.masking.mask_format
        ranks = range(self.table.num_ranks)
        return [message_nbytes(self._pieces_of(rank), density, how) for rank in ranks]

    def _pieces_of(self, rank: int) -> list[Piece]:
        return self.table.sparse if self.masking.source == "union" else self.table.owned_by(rank)

    def mask_message(self, step: int, density: float) -> Tensor | None:
        """Return the picked masks as a message for `step`, None if this worker owns nothing."""
        if not self.owned:
            return None
        new = [self.picked[p] for p in self.owned]
        return self.wire(self.rank, step, density).encode(new, self._old(self.owned))

    def read_masks(
        self, messages: Sequence[Tensor | None], step: int, density: float
    ) -> dict[Piece, Tensor]:
        """Return positions per piece from the owners' messages (by rank, None where none is).

        Raises:
            WireError: a message of another step or table.
        """
        masks: dict[Piece, Tensor] = {}
        for rank, message in enumerate(messages):
            wire = self.wire(rank, step, density)
            if message is None or not wire.pieces:
                continue
            decoded = wire.decode(message, self._old(wire.pieces))
            for piece, positions in zip(wire.pieces, decoded, strict=True):
                if piece in masks:
                    positions = torch.cat((masks[piece], positions)).unique()
                masks[piece] = positions
        return masks

    def random_masks(self, step: int, density: float) -> dict[Piece, Tensor]:
        """Return the masks that the shared key draws for `step`."""
        masks = {}
        for run in self.runs:
            device = run.entries[0].param.device
            for p in run.pieces:
                if not p.dense:
                    masks[p] = random_positions(
                        p.name, p.numel, p.kept(density), run_key=self.masking.run_key,
                        step=step, device=device,
                    )  # fmt: skip
        return masks

    def masks(self) -> dict[Piece, Tensor] | None:
        """Return the positions in use per sparsified piece, None if all is sent."""
        masks: dict[Piece, Tensor] = {}
        for run in self.runs:
            if run.index is None:
                return None
            masks |= {p: at for p, _, _, at in fused.pieces_of(run) if not p.dense}
        return masks

    def _old(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        if self.masking.mask_format != "delta":
            return [None] * len(pieces)
        masks = self.masks()
        return [None if masks is None else masks[p] for p in pieces]

    def pick_from_outgoing(self, density: float, scale: Tensor | None) -> None:
        """Pick masks for the coming step itself, from |x| of all owned elements (lag 0)."""
        self.picked.clear()
        for run, own in zip(self.runs, self.own, strict=True):
            if own:
                g = _scaled(run.flat_grad(), scale)
                state = self.store.read(run, None)
                x = self.rule.outgoing(self.hyper(run), state, g)
                self._pick(own, [x[s].abs() for s in run.slices(own)], density)

    def _pick(self, own: Sequence[Piece], statistics: Sequence[Tensor], density: float) -> None:
        """Keep the top positions per piece; pieces of one size share a call."""
        by_size: dict[int, list[int]] = {}
        for i, piece in enumerate(own):
            by_size.setdefault(piece.numel, []).append(i)
        for members in by_size.values():
            k = own[members[0]].kept(density)
            if statistics[members[0]].dtype == torch.float32 and not statistics[0].is_cuda:
                self.picked |= {own[i]: largest(statistics[i], k) for i in members}
                continue
            rows = torch.stack([statistics[i] for i in members])
            positions = top_positions(rows, k)
            self.picked |= {own[i]: p for i, p in zip(members, positions, strict=True)}

    # Steps 2 and 3: what leaves

    def square_norm(self) -> Tensor:
        """Return the squared norm of the gradients, float64 [1]."""
        total = torch.zeros(1, dtype=torch.float64)
        for run in self.runs:
            norm = torch.linalg.vector_norm(run.flat_grad(), dtype=torch.float64)
            total = total.to(norm.device) + norm.square() / run.entries[0].copies
        return total

    def outgoing(self, run: Run, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x [E] of a run, and whether its gradient is bad: 1.0 or 0.0 [1], in x's dtype."""
        if fused.fits(self.rule, run) and not self.store.names:
            bad = _any_bad(run.piece_grads())
            return fused.outgoing(run, run.state, self.hyper(run), scale), bad
        g = run.flat_grad()
        bad = _any_bad([g]).to(g.dtype)
        if run.index is not None:
            g = g[run.index]
        state = self.store.read(run, run.index)
        return self.rule.outgoing(self.hyper(run), state, _scaled(g, scale)), bad

    def bad_tensors(self) -> list[str]:
        """Return the names of parameters whose gradient holds NaN or infinity."""
        names = []
        for run in self.runs:
            g = run.flat_grad()
            names += [e.name for e, span in run.spans() if not all_finite(g[span])]
        return names

    def gradient_square_norm(self, means: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of the mean gradient that the means stand for, float64 [1]."""
        total = torch.zeros(1, dtype=torch.float64, device=means[0].device)
        for run, p in zip(self.runs, means, strict=True):
            grad = self.rule.gradient(self.hyper(run), self.store.read(run, run.index), p)
            norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
            total += norm.square() / run.entries[0].copies
        return total

    # Step 4: what comes of the mean

    def commit(
        self,
        sent: Sequence[Tensor],
        quantized: Sequence[Tensor],
        means: Sequence[Tensor],
        *,
        next_density: float,
        scale: Tensor | None = None,
        clip: float = 1.0,
    ) -> None:
        """Update state and weights and pick the next masks.

        Args:
            sent: x per run, as `outgoing` gave it.
            quantized: x after the cast to the wire.
            means: mean over workers per run.
            next_density: density of the next step.
            scale: factor on the local gradients.
            clip: factor on the reconstructed gradient.
        """
        self.picked.clear()
        picks = next_density < DENSE_FROM and self.masking.source != "random"
        for i, (run, state) in enumerate(self.store.sweep(self.runs)):
            own = self.own[i] if picks else []
            got = Arrived(run.index, sent[i], quantized[i], means[i], clip)
            statistics = self._commit_run(run, state, got, scale, own, self.stepped[i])
            self._pick(own, statistics, next_density)
            run.publish(self.stepped[i])
        self.step += 1

    def _commit_run(
        self,
        run: Run,
        state: dict[str, Tensor],
        got: Arrived,
        scale: Tensor | None,
        own: Sequence[Piece],
        stepped: Sequence[Piece],
    ) -> list[Tensor]:
        rule, h = self.rule, self.hyper(run)
        if isinstance(rule, Adams) and fused.fits(rule, run):
            return fused.commit(run, state, h, rule, got, scale, own, stepped)
        g = _scaled(run.flat_grad(), scale) if run.index is not None else got.p
        delta, statistics = rule.commit(h, state, g, got, run.slices(own))
        _step_weights(run, delta, stepped)
        return statistics


def _step_weights(run: Run, delta: Tensor, pieces: Sequence[Piece]) -> None:
    """Decay the weights of pieces (matrices only) and subtract their part of delta [N]."""
    weights = run.weights(pieces)
    decay = 1 - float(run.group["lr"]) * run.group["weight_decay"]
    decayed = [w for p, w in zip(pieces, weights, strict=True) if run.param(p).ndim > 1]
    if decay != 1.0 and decayed:
        torch._foreach_mul_(decayed, decay)
    if pieces:
        torch._foreach_sub_(weights, [delta[s] for s in run.slices(pieces)])


def flat_index(run: Run, masks: dict[Piece, Tensor]) -> Tensor:
    """Return the run's ascending flat positions from the positions per sparsified piece."""
    parts = []
    for piece, start in run.starts().items():
        if piece.dense:
            device = run.entries[0].param.device
            parts.append(torch.arange(start, start + piece.numel, device=device))
        else:
            parts.append(masks[piece] + start)
    return torch.cat(parts)


def _any_bad(grads: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if any element is NaN or infinite, else 0.0, as float32 [1]."""
    return (~all_finite(*grads)).to(torch.float32).view(1)


def _scaled(g: Tensor, scale: Tensor | None) -> Tensor:
    return g if scale is None else g * scale.to(g.dtype).to(g.device)
