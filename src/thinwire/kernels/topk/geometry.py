"""How a tensor is cut into chunks, how many entries each sends, and where they lie in a message.

Legend: `K` entries sent in all, `C` chunks.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.errors import ConfigError

__all__ = ["Geometry", "geometry"]

CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Geometry:
    """Chunks of one tensor, in wire order; arrays are int64 [C].

    Attributes:
        base: flat index of a chunk's first element.
        height, width: its valid cells; its rows lie `pitch` elements apart.
        k: entries it sends.
        first: entries sent before it.
        index_at, code_at: byte offsets in the sections of indices and of codes.
        pitch: elements between rows of the matrix; tile_width: wire indices per tile row.
    """

    base: np.ndarray
    height: np.ndarray
    width: np.ndarray
    k: np.ndarray
    first: np.ndarray
    index_at: np.ndarray
    code_at: np.ndarray
    pitch: int
    tile_width: int
    numel: int

    @property
    def chunks(self) -> int:
        """Return C."""
        return len(self.base)

    @property
    def entries(self) -> int:
        """Return K."""
        return int(self.k.sum())

    @property
    def index_nbytes(self) -> int:
        """Return the bytes of the index section."""
        return int(((3 * self.k + 1) // 2).sum())

    @property
    def code_nbytes(self) -> int:
        """Return the bytes of the section of 2-bit codes."""
        return int(((self.k + 3) // 4).sum())


def _divisor(size: int, limit: int) -> int:
    return next(d for d in range(min(size, limit), 0, -1) if size % d == 0)


def _tile(shape: tuple[int, ...], chunking: str, tile: int) -> tuple[int, int, int, int, int]:
    """Return (batch, rows, columns, tile height, tile width)."""
    if len(shape) <= 1:
        columns = shape[0] if shape else 1
        width = _divisor(columns, tile) if chunking == "reference" and columns else tile * tile
        return 1, 1, columns, 1, width
    if len(shape) == 3:
        batch, rows, columns = shape
    else:
        batch, rows, columns = 1, shape[0], int(np.prod(shape[1:], dtype=np.int64))
    if chunking == "reference" and rows and columns:
        return batch, rows, columns, _divisor(rows, tile), _divisor(columns, tile)
    return batch, rows, columns, tile, tile


@lru_cache(maxsize=1024)
def geometry(shape: tuple[int, ...], k: int, chunking: str, tile: int) -> Geometry:
    """Return the chunks of a tensor of this shape.

    Args:
        shape: 1-D: runs of tile^2 elements; 2-D: tiles, rows of tiles outer; 3-D: a batch of
            matrices; more: viewed as [dim0, rest].
        k: entries per 4096 elements.
        chunking: "pad" and "paper" cut tiles of tile x tile (edges keep their valid cells);
            "reference" takes the largest divisors of each side up to `tile`.
        tile: side of a tile, at most 64.

    Raises:
        ConfigError: a shape with negative sides.
    """
    if any(side < 0 for side in shape):
        raise ConfigError(f"a shape has no negative sides, got {shape}")
    batch, rows, columns, height, width = _tile(shape, chunking, tile)
    top = np.arange(0, rows if columns else 0, height, dtype=np.int64)
    left = np.arange(0, columns if rows else 0, width, dtype=np.int64)
    matrix = np.arange(batch, dtype=np.int64) * rows * columns
    grid = (len(matrix), len(top), len(left))
    base = (matrix[:, None, None] + (top[:, None] * columns + left)[None]).reshape(-1)
    h = np.broadcast_to(np.minimum(height, rows - top)[None, :, None], grid).reshape(-1)
    w = np.broadcast_to(np.minimum(width, columns - left)[None, None, :], grid).reshape(-1)
    count = np.rint(h * w * k / CHUNK).astype(np.int64)  # rint: halves to even
    count = np.minimum(np.maximum(count, 1), h * w)
    before = np.cumsum(count) - count
    index_bytes, code_bytes = (3 * count + 1) // 2, (count + 3) // 4
    return Geometry(
        base=base,
        height=np.array(h),
        width=np.array(w),
        k=count,
        first=before,
        index_at=np.cumsum(index_bytes) - index_bytes,
        code_at=np.cumsum(code_bytes) - code_bytes,
        pitch=columns,
        tile_width=width,
        numel=batch * rows * columns,
    )
