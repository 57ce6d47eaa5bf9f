"""Stops a run that cannot learn any more. All ranks see the same numbers, so all stop alike."""

import math
from dataclasses import dataclass, field

from thinwire.errors import NonFiniteError, ThinwireError
from thinwire.train.config import Watchdog as Limits

__all__ = ["StuckError", "Watchdog"]

ZERO_NORM = 1e-12


class StuckError(ThinwireError):
    """The loss doesn't move and no gradient arrives."""


@dataclass
class Watchdog:
    """Look at each step's agreed loss and gradient norm.

    Attributes:
        limits: when to stop.
        streak: steps in a row with zero norm and an unchanged loss.
        streak_loss: loss at the streak's first step, nats.
    """

    limits: Limits
    streak: int = 0
    streak_loss: float = field(default=math.nan)

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise if the run is lost.

        Raises:
            NonFiniteError: loss or norm is NaN or infinite.
            StuckError: `stuck_steps` steps of unchanged loss and zero norm.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}: lower optim.lr, lengthen "
                "optim.warmup_steps, or resume from the last checkpoint"
            )
        unchanged = abs(loss - self.streak_loss) <= self.limits.loss_tolerance
        if grad_norm > ZERO_NORM or not (self.streak == 0 or unchanged):
            self.streak = 0
        if grad_norm <= ZERO_NORM:
            self.streak += 1
            if self.streak == 1:
                self.streak_loss = loss
        if self.limits.stuck_steps and self.streak >= self.limits.stuck_steps:
            raise StuckError(
                f"step {step}: loss {loss:.4f} unchanged and gradient norm 0 for {self.streak} "
                "steps: no gradient reaches the parameters (watchdog.stuck_steps sets the limit)"
            )
