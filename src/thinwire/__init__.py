"""Train large models over thin wires: compressed links for PyTorch distributed training.

Submodules load on first use, so that `import thinwire` and the command line start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import (
        aquavit,
        codecs,
        comm,
        eco,
        errors,
        pipeline,
        plan,
        replicas,
        scape,
        schedules,
        sparseloco,
        taco,
    )
    from thinwire.comm.ledger import Ledger
    from thinwire.errors import ThinwireError

__version__ = "0.1.0.dev0"

__all__ = [
    "Ledger",
    "ThinwireError",
    "__version__",
    "aquavit",
    "codecs",
    "comm",
    "eco",
    "errors",
    "pipeline",
    "plan",
    "replicas",
    "scape",
    "schedules",
    "sparseloco",
    "taco",
]

_NAMES = {"Ledger": "thinwire.comm.ledger", "ThinwireError": "thinwire.errors"}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"thinwire.{name}")
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
