"""Errors a user of thinwire can meet. Each message says what was wrong, where, and what to do."""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "NonFiniteError",
    "PeerError",
    "RunError",
    "ThinwireError",
    "WireError",
]


class ThinwireError(RuntimeError):
    """Base of every error that thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A setting, recipe, mesh or model that cannot work as asked; raised at set-up."""


class DataError(ThinwireError, ValueError):
    """Training data that is missing, unreadable, empty or too short."""


class CheckpointError(ThinwireError):
    """A checkpoint that cannot be written or that belongs to another configuration."""


class RunError(ThinwireError):
    """The files of a run (run.json, metrics.jsonl) that are missing or unreadable.

    Attributes:
        status: exit status of a command that ends with it.
    """

    status = 2


class WireError(ThinwireError, ValueError):
    """A wire buffer with the wrong dtype, length or content."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """NaN or infinity in a message; every rank of the group raises it in the same call."""


class ContractError(ThinwireError):
    """A requested compression did not carry the bytes (`Ledger.check`)."""


class PeerError(ThinwireError):
    """A peer was lost in a collective, or this rank cannot follow what its peers agreed on."""
