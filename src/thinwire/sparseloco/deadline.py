"""When a round closes without its stragglers: median + c*MAD of past arrivals."""

import statistics
from collections import deque
from collections.abc import Iterable

from thinwire.errors import ConfigError

__all__ = ["Deadline"]

# Arrivals that are all alike would leave no slack at all: spread counts as at least this share.
MIN_SPREAD = 0.05


class Deadline:
    """Seconds into a round after which a replica sends what it has.

    deadline = median + c * max(MAD, 0.05 * median) over the arrivals of the last rounds, MAD being
    the median absolute deviation. Before the first arrivals there is none.

    Args:
        c: how much slower than the others a replica may be, in spreads.
        window: rounds that are remembered.
        floor_s: no deadline is earlier.

    Raises:
        ConfigError: c not positive or no window.
    """

    def __init__(self, c: float = 4.0, *, window: int = 5, floor_s: float = 0.0) -> None:
        if not c > 0 or window < 1:
            raise ConfigError(f"deadline: c must be positive and window >= 1, got {c}, {window}")
        self.c, self.floor_s = c, floor_s
        self._rounds: deque[tuple[float, ...]] = deque(maxlen=window)

    def observe(self, arrivals_s: Iterable[float]) -> None:
        """Add the arrivals of a round, in seconds after it began."""
        found = tuple(arrivals_s)
        if found:
            self._rounds.append(found)

    @property
    def seconds(self) -> float | None:
        """Return the deadline of the next round, None before anything was observed."""
        every = [s for found in self._rounds for s in found]
        if not every:
            return None
        middle = statistics.median(every)
        spread = statistics.median(abs(s - middle) for s in every)
        return max(self.floor_s, middle + self.c * max(spread, MIN_SPREAD * middle))
