"""Batches: which tokens a rank reads at a step.

The order of samples depends on (seed, position) alone, position = step * batch + index in the
batch, so every layout and every number of ranks trains on the same global batches; ranks read
disjoint parts of them.

Legend: `B` sequences, `T` tokens of a sequence.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.train.sources import Corpus, check_sizes

__all__ = ["IGNORED", "TrainBatches", "bits_per_byte", "held_out_batch"]

IGNORED = -100  # target of padding, as torch.nn.functional.cross_entropy spells it


@dataclass
class TrainBatches:
    """Cut a corpus into sequences, shuffled anew in each epoch.

    Attributes:
        corpus: the tokens.
        seq_len_tokens: T.
        batch_seqs: sequences per step over all ranks.
        seed: seed of the order.
        position: samples consumed by the finished steps; the only state.
    """

    corpus: Corpus
    seq_len_tokens: int
    batch_seqs: int
    seed: int
    position: int = 0
    _epoch: int = field(default=-1, init=False)
    _order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)

    def __post_init__(self) -> None:
        train, held_out = self.corpus.train.size, self.corpus.held_out.size
        check_sizes(self.corpus.name, train, held_out, self.seq_len_tokens)

    @property
    def num_sequences(self) -> int:
        """Return the sequences of an epoch."""
        return (self.corpus.train.size - 1) // self.seq_len_tokens

    def share(self, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return this data rank's inputs and targets of the current step, int64 [B, T]."""
        count = self.batch_seqs // num_ranks
        first = self.position + rank * count
        starts = [self._start(first + i) for i in range(count)]
        return _cut(self.corpus.train, starts, self.seq_len_tokens)

    def advance(self) -> None:
        """Go to the next step."""
        self.position += self.batch_seqs

    def _start(self, sample: int) -> int:
        epoch, index = divmod(sample, self.num_sequences)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._order = epoch, rng.permutation(self.num_sequences)
        return int(self._order[index]) * self.seq_len_tokens


def held_out_batch(
    corpus: Corpus, seq_len_tokens: int, num_seqs: int, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor, int]:
    """Return this rank's part of the held-out sequences.

    The sequences lie evenly over the held-out text and are the same on every layout. Where they
    don't divide by the ranks, the last ranks get padding whose targets are `IGNORED`.

    Returns:
        inputs [B, T], targets [B, T], and the number of counted tokens over all ranks.
    """
    available = (corpus.held_out.size - 1) // seq_len_tokens
    count = min(num_seqs, available)
    starts = [i * available // count * seq_len_tokens for i in range(count)]
    per_rank = math.ceil(count / num_ranks)
    mine = starts[rank * per_rank : (rank + 1) * per_rank]
    padding = per_rank - len(mine)
    x_BT, y_BT = _cut(corpus.held_out, mine + [0] * padding, seq_len_tokens)
    y_BT[len(mine) :] = IGNORED
    return x_BT, y_BT, count * seq_len_tokens


def bits_per_byte(loss_nats: float) -> float:
    """Convert the loss per byte token."""
    return loss_nats / math.log(2)


def _cut(tokens: np.ndarray, starts: list[int], seq_len_tokens: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[s : s + seq_len_tokens + 1] for s in starts]).astype(np.int64)
    x_BT = torch.from_numpy(rows)
    # Copies, also of a single row, whose slices are contiguous: targets are overwritten later.
    return x_BT[:, :-1].clone(), x_BT[:, 1:].clone()
