"""Set a compressed pipeline up: what its ranks agree on, the shared rows, and each stage's wrapper.

Steps of a set-up, collective over the pipeline's group:
1. All ranks compare the settings of the boundaries (wire, ids, mode, dtype): a difference raises.
2. They compare U and take the first rank's bytes where it differs (`Basis.agree`).
3. The rank of stage 0 broadcasts T_perp, the fixed part of the embedding rows (`Link.share`).
4. Each rank wraps its stages; weights that write into the residual stream are projected.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire import comm
from thinwire.codecs.protocol import Codec
from thinwire.comm import Ledger, transport
from thinwire.comm.ledger import all_gather_sent
from thinwire.errors import ConfigError, ContractError
from thinwire.pipeline.basis import Basis, wide
from thinwire.pipeline.carrier import make_carrier
from thinwire.pipeline.constraint import WRITES, Constraint, find_writes
from thinwire.pipeline.probe import probe
from thinwire.pipeline.stage import Boundary, Stage
from thinwire.pipeline.tables import FixedRows

__all__ = ["HEALTH_LIMIT", "Link", "wrap"]

MODES = ("constrained", "lossy", "none")
IDS = ("send", "local", "none")
HEALTH_LIMIT = 1e-2


class Link:
    """The boundaries of one pipeline, as one of its ranks sees them.

    Args:
        basis: the subspace, equal on all ranks.
        num_stages: stages of the pipeline.
        mode: "constrained" keeps all writes before the last boundary in the subspace, so that
            boundaries lose their cast alone; "lossy" projects at the wire only; "none" sends dense
            activations.
        wire: "bf16", "fp32", "int8", "int4", or a codec for the coefficients, both ways.
        ids: "send" token ids with each micro-batch, "local": stages are given them by
            `schedule.step(tokens=...)`, "none": no fixed part (X0 = 0; the embedding then has to
            lie in the subspace).
        owners: rank of each stage within the group; None spreads stages in turn. Neighbouring
            stages on one rank hand activations over as they are.
        writes: patterns of the weights that write into the residual stream.
        activations: dtype of activations between stages.
        group: the pipeline's ranks; None takes no part in any exchange (one process).
        device: where messages of the set-up lie.
        noisy: activations carry other codecs' rounding (of gathered weights, of tensor-parallel
            messages), which boundaries drop: `check_health` then judges the weights alone.
        ledger: books everything sent.

    Raises:
        ConfigError: unknown settings, or settings that differ between ranks (on all of them).

    Example:
        >>> link = Link(Basis(2048, 128), num_stages=4, group=pp_group, ledger=ledger)
        >>> link.share(model.embed.weight if stage_index == 0 else None)
        >>> stage = link.wrap(model, stage_index)

    Reference: Obeidi et al., "Heterogeneous Low-Bandwidth Pre-Training of LLMs", arXiv 2601.02360.
    """

    def __init__(
        self,
        basis: Basis,
        *,
        num_stages: int,
        mode: str = "constrained",
        wire: str | Codec = "bf16",
        ids: str = "send",
        owners: Sequence[int] | None = None,
        writes: Iterable[str] = WRITES,
        activations: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        noisy: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if ids not in IDS:
            raise ConfigError(f"ids must be one of {', '.join(IDS)}, got {ids!r}")
        ranks = num_stages if group is None else group.size()
        self.owners = list(owners) if owners is not None else [i % ranks for i in range(num_stages)]
        if num_stages < 1 or len(self.owners) != num_stages:
            raise ConfigError(f"owners names {len(self.owners)} stages of {num_stages}")
        self.basis, self.mode, self.ids, self.num_stages = basis, mode, ids, num_stages
        self.carrier, self.writes = make_carrier(wire), tuple(writes)
        self.activations, self.group, self.ledger = activations, group, ledger
        self.device, self.noisy = torch.device(device), noisy
        self.tables: FixedRows | None = None
        self.stages: list[Stage] = []
        if ledger is not None and mode != "none":
            ledger.expect("pipeline", num_ranks=len(set(self.owners)))
        if group is not None:
            self._agree(group)
            basis.agree(group, device=self.device, ledger=ledger)

    @property
    def needs_tables(self) -> bool:
        """Return whether stages need `share`."""
        return self.mode != "none" and self.ids != "none"

    def share(self, embedding: Tensor | None, positions: Tensor | None = None) -> None:
        """Give every stage the fixed part of the embedding (and position) rows.

        Args:
            embedding: rows [V, D] on the rank of stage 0 (without a group: on every caller); None
                elsewhere.
            positions: position rows [T, D] that the model adds, likewise.

        Raises:
            ConfigError: the rank of stage 0 has no embedding, or one of another width.
        """
        if not self.needs_tables:
            return
        source = self.owners[0]
        leads = self.group is None or self.group.rank() == source
        if leads and (embedding is None or embedding.shape[-1] != self.basis.dim):
            shape = None if embedding is None else tuple(embedding.shape)
            raise ConfigError(
                f"the rank of stage 0 must share the embedding [V, {self.basis.dim}], got {shape}"
            )
        if leads:
            assert embedding is not None
            self.tables = FixedRows.of(self.basis, _whole(embedding), positions)
        if self.group is not None:
            self.tables = self._broadcast(self.group, source)

    def wrap(
        self,
        module: nn.Module,
        index: int,
        *,
        embedding: str = "embed.weight",
        positions: str | None = None,
        check: bool = True,
    ) -> Stage:
        """Return a stage with its boundaries; in constrained mode its writes are projected.

        Args:
            module: maps token ids (first stage) or X [B, T, D] to X, or to the output (last stage).
            index: of the stage.
            embedding: name of the embedding rows within the first stage.
            positions: name of trained position rows within the first stage, if any.
            check: run constrained stages on a few tokens to find what leaves the subspace.

        Raises:
            ConfigError: `share` wasn't called, weights can't be constrained, or something acts on
                single channels behind a write (the message names the module).
        """
        if not 0 <= index < self.num_stages:
            raise ConfigError(f"stage {index} is none of {self.num_stages}")
        if self.needs_tables and self.tables is None:
            raise ConfigError("call Link.share(embedding) before wrapping stages")
        constraint = self._constraint(module, index, embedding, positions)
        boundary = Boundary(
            basis=self.basis,
            mode=self.mode,
            carrier=self.carrier,
            ids=self.ids,
            tables=self.tables,
            activations=self.activations,
            ledger=self.ledger,
        )
        stage = Stage(
            module,
            index,
            boundary,
            before=self._side(index - 1),
            after=self._side(index),
            constraint=constraint,
        )
        if constraint is not None:
            constraint.project()
            if check and self.tables is not None and stage.after != "none":
                where = f"stage {index}"
                probe(module, constraint, self.tables, first=index == 0, where=where)
        self.stages.append(stage)
        return stage

    def is_constrained(self, index: int) -> bool:
        """Return whether a compressed boundary follows stage `index` (one stage counts as all)."""
        if self.mode != "constrained":
            return False
        return self.num_stages == 1 or any(
            self._side(i) == "wire" for i in range(index, self.num_stages)
        )

    def check_health(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        strict: bool | None = None,
        skip_nonfinite: bool = False,
    ) -> float:
        """Return the largest share off the subspace since the last call, over all boundaries.

        Args:
            group: ranks that must raise together, where more than the pipeline's own.
            strict: whether to raise; None: in constrained mode. Equal on all ranks of the group.
            skip_nonfinite: leave out shares that are not a number, where others deal with them.

        Raises:
            ContractError: on every rank alike: over 1e-2 in constrained mode, or not a number.
        """
        own = [max((s.take_health() for s in self.stages if s.after == "wire"), default=0.0)]
        if self.noisy:
            held = [s.constraint for s in self.stages if s.constraint is not None]
            own.append(max((c.leaked() for c in held), default=0.0))
        shares = torch.tensor(own, dtype=torch.float32, device=self.device)
        group = group or self.group
        if group is not None:
            shares = comm.all_gather(shares, None, group=group, link="scalars", ledger=self.ledger)
        if skip_nonfinite:
            shares = torch.where(torch.isfinite(shares), shares, 0.0)
        shares = shares.view(-1, len(own))
        judged = shares[:, -1]
        worst = shares[:, 0].max().item()
        strict = self.mode == "constrained" if strict is None else strict
        if strict and (not judged.max().item() <= HEALTH_LIMIT or not worst < float("inf")):
            rank, what = int(judged.argmax()), "output matrices" if self.noisy else "activations"
            raise ContractError(
                f"a share {judged.max().item():.2g} of the {what} of rank {rank} lies off the "
                "subspace in constrained mode: weights were changed without being projected "
                "(attach the stage's constraint to the optimizer), or writes= misses a matrix"
            )
        return worst

    def _side(self, index: int) -> str:
        """Return how boundary `index` (behind stage `index`) is crossed."""
        if not 0 <= index < self.num_stages - 1:
            return "none"
        return "local" if self.owners[index] == self.owners[index + 1] else "wire"

    def _constraint(
        self, module: nn.Module, index: int, embedding: str, positions: str | None
    ) -> Constraint | None:
        if not self.is_constrained(index):
            return None
        rows: dict[str, tuple[nn.Parameter, Tensor]] = {}
        if index == 0:
            params = dict(module.named_parameters())
            if embedding not in params:
                raise ConfigError(
                    f"the first stage has no parameter {embedding!r}: name its embedding rows with "
                    "embedding="
                )
            p = params[embedding]
            fixed = self.tables.tokens if self.tables else torch.zeros_like(wide(_whole(p)))
            rows[embedding] = (p, fixed)
            if positions is not None:
                p, table = params[positions], self.tables.positions if self.tables else None
                rows[positions] = (p, table if table is not None else torch.zeros_like(wide(p)))
        return Constraint(self.basis, find_writes(module, self.basis.dim, self.writes), rows)

    def _agree(self, group: dist.ProcessGroup) -> None:
        text = repr(
            (self.num_stages, self.owners, self.mode, self.ids, self.carrier, self.activations)
        )
        own = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        rows, _ = transport.all_gather(own.to(self.device), group)
        sent = all_gather_sent(own.numel(), group.size())
        if self.ledger is not None:
            self.ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)
        differing = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
        if differing:
            raise ConfigError(
                f"pipeline ranks {differing} and rank 0 differ in num_stages, owners, mode, ids, "
                f"wire or activations (here {text}): give all ranks the same"
            )

    def _broadcast(self, group: dist.ProcessGroup, source: int) -> FixedRows:
        """Send T_perp from stage 0's rank; booked as exempt."""
        mine, dim = self.tables, self.basis.dim
        head = torch.zeros(3, dtype=torch.int64, device=self.device)
        if mine is not None:
            places = 0 if mine.positions is None else mine.positions.shape[0]
            double = mine.tokens.dtype == torch.float64
            head = torch.tensor([mine.vocab_size, places, double]).to(head)
        transport.broadcast(head, source, group)
        vocab_size, places, double = head.tolist()
        dtype = torch.float64 if double else torch.float32
        rows = torch.empty(vocab_size + places, dim, dtype=dtype, device=self.device)
        if mine is not None:
            parts = [mine.tokens] if mine.positions is None else [mine.tokens, mine.positions]
            rows.copy_(torch.cat(parts))
        transport.broadcast(rows.view(-1).view(torch.uint8), source, group)
        if self.ledger is not None and group.rank() == source:
            nbytes = (rows.nbytes + head.nbytes) * (group.size() - 1)
            self.ledger.book(
                "pipeline",
                dense_bytes=nbytes,
                wire_bytes=nbytes,
                exempt_bytes=nbytes,
                reason="fixed embedding rows, sent to the stages at set-up",
            )
        if mine is not None:
            return mine
        tokens, positions = rows.split([vocab_size, places])
        return FixedRows(tokens.clone(), positions.clone() if places else None)


def wrap(
    module: nn.Module,
    *,
    index: int,
    num_stages: int,
    basis: Basis,
    mode: str = "constrained",
    wire: str | Codec = "bf16",
    ids: str = "send",
    writes: Iterable[str] = WRITES,
    embedding: str = "embed.weight",
    positions: str | None = None,
    activations: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    ledger: Ledger | None = None,
) -> Stage:
    """Wrap the one stage of this rank; collective over the pipeline's ranks (see `Link`).

    For several stages per rank (interleaved and V schedules) use a `Link`.

    Args:
        module: maps token ids (first stage) or X [B, T, D] to X, or to the output (last stage).
        index: of the stage; stage i lies on rank i of the group.
        num_stages: stages of the pipeline.
        basis: the subspace, equal on all ranks.
        mode: "constrained", "lossy" or "none".
        wire: dtype or codec of the coefficients.
        ids: "send", "local" or "none".
        writes: patterns of the weights that write into the residual stream.
        embedding: name of the embedding rows within the first stage.
        positions: name of trained position rows within the first stage, if any.
        activations: dtype of activations between stages.
        group: the pipeline's ranks; None is the world.
        device: where messages of the set-up lie.
        ledger: books everything sent.

    Raises:
        ConfigError: see `Link` and `Link.wrap`.

    Example:
        >>> stage = wrap(module, index=i, num_stages=n, basis=Basis(dim=2048, rank=128))
        >>> args = stage.static_args(batch_seqs=4, num_tokens=2048, output_dim=32_000)
        >>> schedule = Schedule1F1B(PipelineStage(stage, i, n, device, **args), 8, loss_fn=loss)
    """
    link = Link(
        basis,
        num_stages=num_stages,
        mode=mode,
        wire=wire,
        ids=ids,
        writes=writes,
        activations=activations,
        group=group or dist.group.WORLD,
        device=device,
        ledger=ledger,
    )
    params = dict(module.named_parameters())
    link.share(params.get(embedding), params.get(positions) if positions else None)
    return link.wrap(module, index, embedding=embedding, positions=positions)


def _whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()
