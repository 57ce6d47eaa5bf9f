"""What a replica reports: how far its weights moved from where its round began."""

from torch import Tensor

from thinwire.pipeline import Constraint

__all__ = ["pseudo_gradient"]


def pseudo_gradient(
    name: str, theta: Tensor, local: Tensor, constraint: Constraint | None
) -> Tensor:
    """Return anchor - local in fp32; the anchor is theta, projected where the constraint projects.

    Args:
        name: of the parameter.
        theta: shared weights, fp32.
        local: this replica's weights; a 16-bit replica began at theta rounded to its dtype.
        constraint: of this replica's writes, None for a full replica (and the unprojected arm).
    """
    start = theta.to(local.device)
    if constraint is not None:
        start = constraint.anchor(name, start)
    return start.to(local.dtype).float() - local.float()
