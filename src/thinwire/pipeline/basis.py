"""The subspace that all stages share: k orthonormal directions of the d-wide residual stream.

Legend: `D` width, `K` rank (size of the subspace), U the basis [D, K], P = U U^T.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.subspace import expand, make_basis, project
from thinwire.comm import transport
from thinwire.comm.ledger import Ledger, all_gather_sent
from thinwire.errors import CheckpointError, ConfigError

__all__ = ["Basis", "wide"]

KINDS = ("random", "coord")


class Basis:
    """A fixed basis U, its version and its hash.

    Args:
        dim: width D of the residual stream.
        rank: size K of the subspace, 1 to dim.
        seed: of the random basis.
        kind: "random": Gaussian in fp64, QR, columns signed so that R has a positive diagonal,
            cast to fp32. "coord": the first `rank` channels; no matrix product, bit-exact.
        version: rises by one whenever the basis changes; at least 1.
        dtype: of the matrix; fp64 serves tests.

    Raises:
        ConfigError: a rank outside 1..dim, or an unknown kind.

    Example:
        >>> basis = Basis(dim=2048, rank=Basis.rank_of(2048, 16))
        >>> z = basis.project(x)  # [..., 128]

    Reference: "Subspace Networks", arXiv 2506.01260; the coordinate basis is thinwire's.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        seed: int = 0,
        kind: str = "random",
        *,
        version: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 1 <= rank <= dim:
            raise ConfigError(f"basis rank must be from 1 to dim={dim}, got {rank}")
        if kind not in KINDS:
            raise ConfigError(f"basis kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if not 1 <= version < 2**32:
            raise ConfigError(f"basis version must be from 1 to 2^32 - 1, got {version}")
        self.dim, self.rank, self.seed, self.kind, self.version = dim, rank, seed, kind, version
        # QR lays columns one after the other in memory. Rows, as in a message or a checkpoint, make
        # products round the same on a rank that received the matrix.
        self._matrix = make_basis(dim, rank, seed, dtype).contiguous() if kind == "random" else None
        self._cache: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @staticmethod
    def rank_of(dim: int, ratio: int) -> int:
        """Return the rank that shrinks a boundary about `ratio` times: floor(dim/ratio), min 1."""
        return max(1, dim // ratio)

    def __repr__(self) -> str:
        return (
            f"Basis(dim={self.dim}, rank={self.rank}, seed={self.seed}, kind={self.kind!r}, "
            f"version={self.version})"
        )

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of U's bytes (of the kind and sizes for "coord")."""
        if self._matrix is None:
            return hashlib.sha256(f"coord {self.dim} {self.rank}".encode()).digest()
        return hashlib.sha256(self._matrix.contiguous().numpy().tobytes()).digest()

    def matrix(self, device: torch.device, dtype: torch.dtype) -> Tensor | int:
        """Return U [D, K], or K for the coordinate basis (see `thinwire.codecs.subspace`)."""
        if self._matrix is None:
            return self.rank
        key = (device, dtype)
        if key not in self._cache:
            self._cache[key] = self._matrix.to(device=device, dtype=dtype)
        return self._cache[key]

    def set_matrix(self, matrix: Tensor) -> None:
        """Replace U [D, K] by other orthonormal columns; the caller raises `version` if it must.

        Raises:
            ConfigError: another shape, or columns that aren't orthonormal to 1e-5.
        """
        if self._matrix is None or matrix.shape != self._matrix.shape:
            raise ConfigError(
                f"{self!r} takes a matrix of shape {(self.dim, self.rank)} (kind random), got "
                f"{tuple(matrix.shape)}"
            )
        off = (matrix.double().mT @ matrix.double() - torch.eye(self.rank)).abs().max().item()
        if not off <= 1e-5:
            raise ConfigError(f"basis columns must be orthonormal, |U^T U - I| is {off:.1e}")
        self._matrix = matrix.detach().clone(memory_format=torch.contiguous_format)
        self._cache.clear()

    def project(self, x: Tensor) -> Tensor:
        """Return x U [..., K] of x [..., D], in fp32 (fp64 for fp64)."""
        x = wide(x)
        return project(x, self.matrix(x.device, x.dtype))

    def expand(self, z: Tensor) -> Tensor:
        """Return z U^T [..., D] of z [..., K], in fp32 (fp64 for fp64)."""
        z = wide(z)
        return expand(z, self.matrix(z.device, z.dtype), self.dim)

    def keep_rows(self, x: Tensor) -> Tensor:
        """Return x P: what of each row [..., D] lies in the subspace."""
        return self.expand(self.project(x))

    def keep_columns(self, w: Tensor) -> Tensor:
        """Return P w of matrices [..., D, in] (or P b of a vector [D])."""
        if w.ndim == 1:
            return self.keep_rows(w)
        w = wide(w)
        u = self.matrix(w.device, w.dtype)
        if isinstance(u, int):
            kept = torch.zeros_like(w)
            kept[..., :u, :] = w[..., :u, :]
            return kept
        return u @ (u.mT @ w)

    def agree(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device | str = "cpu",
        ledger: Ledger | None = None,
    ) -> None:
        """Compare with the group's other ranks; take the first rank's U where bytes differ.

        1. Gather (dim, rank, kind, version, SHA-256 of U) of all ranks.
        2. Settings that differ raise on every rank alike.
        3. Hashes that differ (LAPACK builds round apart): rank 0 of the group broadcasts U.

        Raises:
            ConfigError: on every rank: another rank's dim, rank, kind or version differs.
        """
        settings = (self.dim, self.rank, KINDS.index(self.kind), self.version)
        head = torch.tensor(settings, dtype=torch.int64).view(torch.uint8)
        own = torch.cat([head, torch.frombuffer(bytearray(self.digest), dtype=torch.uint8)])
        rows, _ = transport.all_gather(own.to(device), group)
        sent = all_gather_sent(own.numel(), group.size())
        rows = rows.cpu()
        for rank, row in enumerate(rows):
            if not torch.equal(row[:32], rows[0, :32]):
                theirs, first = (tuple(r[:32].view(torch.int64).tolist()) for r in (row, rows[0]))
                raise ConfigError(
                    f"basis (dim, rank, kind, version) is {theirs} on rank {rank} of the pipeline "
                    f"but {first} on rank 0: give all stages one Basis"
                )
        if not (rows == rows[0]).all():
            sent += self._take_leaders(group, device)
        if ledger is not None:
            ledger.book("scalars", dense_bytes=sent, wire_bytes=sent)

    def _take_leaders(self, group: dist.ProcessGroup, device: torch.device | str) -> int:
        assert self._matrix is not None  # coordinates with equal settings have equal hashes
        # A copy: equal bases of a process share one matrix, and the broadcast writes in place.
        copy = self._matrix.clone(memory_format=torch.contiguous_format)
        message = copy.view(torch.uint8).view(-1).to(device)
        transport.broadcast(message, 0, group)
        taken = message.cpu().view(self._matrix.dtype).view(self.dim, self.rank)
        self._matrix = taken.clone()
        self._cache.clear()
        return message.numel()

    def state_dict(self) -> dict[str, Any]:
        """Return U, its version and hash."""
        u = self._matrix if self._matrix is not None else torch.zeros(0)
        digest = torch.frombuffer(bytearray(self.digest), dtype=torch.uint8)
        u = u.clone(memory_format=torch.contiguous_format)
        return {"matrix": u, "version": torch.tensor(self.version), "sha256": digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved basis.

        Raises:
            CheckpointError: another shape or kind, or bytes that don't fit their hash.
        """
        shape = torch.Size([0]) if self._matrix is None else self._matrix.shape
        if state["matrix"].shape != shape:
            raise CheckpointError(
                f"the checkpoint's basis has shape {tuple(state['matrix'].shape)}, this run's "
                f"{tuple(shape)}: keep systems.pipeline's basis, rank and ratio"
            )
        if self._matrix is not None:
            self._matrix = (
                state["matrix"].detach().clone().cpu().to(self._matrix.dtype).contiguous()
            )
            self._cache.clear()
        self.version = int(state["version"])
        if self.digest != bytes(state["sha256"].cpu().tolist()):
            raise CheckpointError("the checkpoint's basis does not fit its SHA-256: it is damaged")


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, fp64 as it is: products are never summed in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()
