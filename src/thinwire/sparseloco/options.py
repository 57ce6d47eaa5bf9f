"""What all replicas of a run must agree on: the outer update, the codec, the rule of the mean."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from thinwire.codecs.topk import TopK
from thinwire.errors import ConfigError
from thinwire.schedules import Schedule
from thinwire.sparseloco.bins import Bins

__all__ = ["Options"]

_CHOICES = {
    "quant": ("sym", "paper", "none"),
    "level_dtype": ("fp16", "bf16"),
    "chunking": ("pad", "paper", "reference"),
    "aggregate": ("senders", "replicas"),
    "weights": ("tokens", "equal"),
    "median_clip": ("auto", "off"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of SparseLoCo, equal on all replicas (their hash travels in every message).

    Attributes:
        alpha: outer learning rate, or a schedule over rounds; applied once, at the update.
        beta: decay of the residual (error feedback).
        k: entries sent per 4096 elements.
        tile: side of the square tiles that matrices are cut into, at most 64.
        quant: values of the wire: "sym" (2 bits, two levels per tile), "paper" (2 bits, four levels
            per tensor) or "none" (fp32).
        n_bins: levels of "paper": 4, or 16 and 256 (4 and 8 bits, older settings).
        level_dtype: type of sym's levels: "fp16", or "bf16" (wider range, fewer digits).
        chunking: "pad" or "paper" (tiles with partial edges), or "reference" (tile sides are the
            largest divisors; degenerates at prime sizes).
        small_dense: send 1-D tensors and those under 4096 elements dense, in bf16 (fp32 with quant
            "none"), through the same residual.
        aggregate: "senders" averages an element over the replicas that sent it (the authors'
            code); "replicas" over all accepted ones (their formula).
        weights: a replica counts by the "tokens" it processed, at most twice the median, or
            "equal".
        median_clip: "auto" scales a replica's tensor down to the median norm of the accepted ones,
            where there are three or more; "off" does not.
        min_quorum: replicas whose messages a round needs to commit.
        check_every: rounds between comparisons of the anchor's SHA-256; 0 never compares.

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv
        2508.15706.
    """

    alpha: float | Schedule = 1.0
    beta: float = 0.95
    k: int = 64
    tile: int = 64
    quant: str = "sym"
    n_bins: int = 4
    level_dtype: str = "fp16"
    chunking: str = "pad"
    small_dense: bool = True
    aggregate: str = "senders"
    weights: str = "tokens"
    median_clip: str = "auto"
    min_quorum: int = 1
    check_every: int = 10

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(repr, known))}, "
                    f"got {getattr(self, name)!r}"
                )
        if not callable(self.alpha) and not self.alpha > 0:
            raise ConfigError(f"alpha must be positive, got {self.alpha!r}")
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"beta must lie in [0, 1], got {self.beta!r}")
        if self.min_quorum < 1 or self.check_every < 0:
            raise ConfigError("min_quorum must be at least 1 and check_every not negative")
        if self.n_bins != 4 and self.quant != "paper":
            raise ConfigError(f"n_bins {self.n_bins!r} goes with quant 'paper', not {self.quant!r}")
        self.codec((1,))  # checks k, tile and n_bins

    def codec(self, shape: tuple[int, ...]) -> TopK | Bins:
        """Return the codec of a compressed tensor."""
        topk = TopK(
            k=self.k,
            shape=shape,
            quant=self.quant,
            level=self.level_dtype,
            chunking=self.chunking,
            tile=self.tile,
        )
        return topk if self.n_bins == 4 else Bins(replace(topk, quant="none"), self.n_bins)

    def alpha_at(self, round_: int) -> float:
        """Return the outer learning rate of a round."""
        return self.alpha(round_) if callable(self.alpha) else self.alpha

    @property
    def flags(self) -> int:
        """Return the header's flags, without the abstain bit."""
        quant = {"none": 0, "paper": 1, "sym": 2}[self.quant] if self.n_bins == 4 else 3
        chunking = _CHOICES["chunking"].index(self.chunking)
        return quant << 1 | chunking << 3 | (self.level_dtype == "bf16") << 5

    def config_hash(self, extra: bytes = b"") -> bytes:
        """Return 16 bytes that differ between configurations; `extra` adds the caller's own."""
        settings = {k: v for k, v in asdict(self).items() if k != "alpha"}
        text = json.dumps(settings | {"alpha": repr(self.alpha)}, sort_keys=True)
        return hashlib.sha256(text.encode() + b"\0" + extra).digest()[:16]
