"""How tensor-parallel messages travel: the user's settings, and the form the regions call.

Custom ops take tensors, numbers and strings, so `Link.bind` resolves codecs, ledger and group to
names once, at set-up; nothing is looked up while torch.compile traces.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, Hadamard
from thinwire.comm import call
from thinwire.comm.all_reduce import ALGORITHMS
from thinwire.comm.hierarchical import Hierarchy
from thinwire.comm.ledger import Ledger
from thinwire.comm.shots import check_slices
from thinwire.errors import ConfigError

__all__ = ["DEFAULT_CODEC", "LINK", "Channel", "Link", "Wire"]

LINK = "tensor"


DEFAULT_CODEC: Codec = Hadamard()


@dataclass(frozen=True, kw_only=True)
class Link:
    """Settings of the tensor-parallel messages of one or more modules.

    Attributes:
        codec: how activations travel (and their gradients, unless `backward_codec` is given);
            None sends them with torch's own collectives, bit for bit, and books the bytes.
        backward_codec: how gradients of activations travel; None: as `codec`.
        ledger: books every call on link "tensor".
        algorithm: of all-reduces: "auto" (fewest bytes), "one_shot" or "two_shot".
        nonfinite: what NaN or infinity do: "raise" on all ranks, "zero" them, or "propagate".
        min_bytes: messages of fewer dense bytes go as they are, booked as exempt, and so does one
            of any size that would not shrink. None switches both off.
        slices: parts into which a message is cut, so that one is coded while another flies.
        tiers: nodes, for all-reduces that go through them first (`thinwire.comm.hierarchy`).
        uneven: plain (non-DTensor) sequence shards may differ in length between ranks; their
            lengths are exchanged in a small extra message per call. DTensors know their lengths.
        exempt: with codec=None, why these messages are left uncompressed; shown by the ledger.

    Raises:
        ConfigError: an unknown algorithm or policy, or a negative gate.
    """

    codec: Codec | None = DEFAULT_CODEC
    backward_codec: Codec | None = None
    ledger: Ledger | None = None
    algorithm: str = "auto"
    nonfinite: str = "raise"
    min_bytes: int | None = 0
    slices: int = 1
    tiers: Hierarchy | None = None
    uneven: bool = False
    exempt: str = ""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}"
            )
        if self.nonfinite not in call.NONFINITE:
            raise ConfigError(
                f"nonfinite must be one of {', '.join(call.NONFINITE)}, got {self.nonfinite!r}"
            )
        if self.min_bytes is not None and self.min_bytes < 0:
            raise ConfigError(f"min_bytes must be 0 or more (or None), got {self.min_bytes}")
        for codec in (self.codec, self.backward_codec):
            check_slices(codec, self.slices)
        if self.codec is None and self.backward_codec is not None:
            raise ConfigError(
                "backward_codec without codec: to compress gradients alone, pass codec=Cast()"
            )

    def bind(self, group: dist.ProcessGroup) -> "Wire":
        """Return the form for one group of ranks."""
        return Wire(
            group=group.group_name,
            rank=group.rank(),
            num_ranks=group.size(),
            forward=self._channel(self.codec),
            backward=self._channel(self.backward_codec or self.codec),
            uneven=self.uneven,
        )

    def _channel(self, codec: Codec | None) -> "Channel":
        return Channel(
            codec=call.codec_name(codec, self.nonfinite),
            ledger=call.ledger_id(self.ledger),
            algorithm=self.algorithm,
            nonfinite=self.nonfinite,
            min_bytes=-1 if self.min_bytes is None else self.min_bytes,
            exempt=self.exempt,
            slices=self.slices,
            intra="" if self.tiers is None else self.tiers.intra.group_name,
            inter="" if self.tiers is None else self.tiers.inter.group_name,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """One direction of a `Wire`, as the custom ops take it."""

    codec: str
    ledger: int
    algorithm: str
    nonfinite: str
    min_bytes: int
    exempt: str
    slices: int
    intra: str
    inter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """A link bound to a group: what the regions call.

    Attributes:
        group: name of the process group.
        rank: this rank's place in it.
        num_ranks: its size.
        forward: activations.
        backward: gradients of activations.
        uneven: exchange the lengths of plain shards.
    """

    group: str
    rank: int
    num_ranks: int
    forward: Channel
    backward: Channel
    uneven: bool = False

    def all_reduce(self, x: Tensor, channel: Channel) -> Tensor:
        """Return the sum of x over the group."""
        return torch.ops.thinwire.all_reduce(
            x,
            channel.codec,
            self.group,
            LINK,
            channel.ledger,
            channel.algorithm,
            channel.nonfinite,
            channel.min_bytes,
            channel.exempt,
            channel.slices,
            channel.intra,
            channel.inter,
        )

    def all_gather(self, x: Tensor, channel: Channel) -> Tensor:
        """Return the x of all ranks, stacked in rank order."""
        return torch.ops.thinwire.all_gather(
            x,
            channel.codec,
            self.group,
            LINK,
            channel.ledger,
            channel.nonfinite,
            channel.min_bytes,
            channel.exempt,
            channel.slices,
        )

    def reduce_scatter(self, x: Tensor, channel: Channel) -> Tensor:
        """Return row `rank` of the sum of x [R, ...] over the group, as [1, ...]."""
        return torch.ops.thinwire.reduce_scatter(
            x,
            channel.codec,
            self.group,
            LINK,
            channel.ledger,
            channel.nonfinite,
            channel.min_bytes,
            channel.exempt,
            channel.slices,
        )
