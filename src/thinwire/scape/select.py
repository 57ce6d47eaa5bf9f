"""Pick the k largest entries of each piece, the same ones on every device.

Legend: `B` pieces of one size, `N` elements of a piece, `K` positions.
"""

import torch
from torch import Tensor

from thinwire.kernels.random import RandomKey, tensor_id, uniform

__all__ = ["random_positions", "top_positions"]

# Separates these draws from other uses of the run's key.
_STREAM = 0x5343415045


def top_positions(scores_BN: Tensor, k: int) -> list[Tensor]:
    """Return the ascending positions of the k largest entries of each row, int64 [K] each.

    Ties go to the lowest position: all entries above the k-th largest, then the first of those
    equal to it. NaN counts as 0.

    Args:
        scores_BN: non-negative statistics, one row per piece.
        k: positions per row, 1 to N.
    """
    scores_BN = scores_BN.nan_to_num(0.0, posinf=torch.finfo(scores_BN.dtype).max)
    threshold_B1 = scores_BN.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    taken = scores_BN > threshold_B1
    ties = scores_BN == threshold_B1
    room_B1 = k - taken.sum(dim=1, keepdim=True)
    if bool((ties.sum(dim=1, keepdim=True) > room_B1).any()):
        ties &= ties.cumsum(dim=1, dtype=torch.int32) <= room_B1
    columns = (taken | ties).nonzero()[:, 1]
    return list(columns.view(scores_BN.shape[0], k).unbind(0))


def random_positions(
    name: str, numel: int, k: int, *, run_key: int, step: int, device: torch.device
) -> Tensor:
    """Return k positions drawn from (run key, name, step) alone, ascending int64 [K]."""
    key = RandomKey(run_key=run_key ^ _STREAM, tensor=tensor_id(name), step=step)
    return top_positions(uniform(numel, key, device)[None], k)[0]
