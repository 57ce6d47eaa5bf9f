"""Checkpoints as they lie on disk: which are whole, of which configuration. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, ConfigError
from thinwire.train.config import Config
from thinwire.train.parse import from_dict, numeric_settings, to_dict

__all__ = [
    "META",
    "as_chosen",
    "check_same",
    "find_checkpoint",
    "lost_steps",
    "newest_checkpoint",
    "read_meta",
    "refuse_to_mix",
    "replica_key",
    "run_folder",
]

META = "thinwire.json"


def find_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, else the newest in it or in its `checkpoints` folder."""
    if (path / META).is_file():
        return path
    found = [p.parent for base in (path, path / "checkpoints") for p in base.glob(f"step-*/{META}")]
    return max(found, key=lambda p: p.name, default=None)


def newest_checkpoint(path: Path) -> Path:
    """Return what `find_checkpoint` finds.

    Raises:
        ConfigError: it finds none.
    """
    found = find_checkpoint(path)
    if found is None:
        raise ConfigError(f"no checkpoint in {path}: nothing to resume from")
    return found


def read_meta(path: Path) -> dict[str, Any]:
    """Return the thinwire.json of a checkpoint.

    Raises:
        CheckpointError: missing or broken.
    """
    try:
        return json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error}") from None


def replica_key(replica: int) -> str:
    """Return the key under which a replica that trains apart saves weights and optimizer."""
    return f"replica{replica}"


def lost_steps(meta: Mapping[str, Any], config: Config, replicas: int) -> str:
    """Return what a checkpoint loses on fewer replicas that train apart, in a line; "" if nothing.

    Args:
        meta: of the checkpoint.
        config: of the run.
        replicas: that go on.
    """
    outer, saved = config.systems.outer, meta["mesh"]["dp_replicate"]
    done = meta["step"] % outer.sync_every
    if outer.method == "none" or replicas >= saved or not done:
        return ""
    gone = ("s " if saved - replicas > 1 else " ") + ", ".join(map(str, range(replicas, saved)))
    return (
        f"resumed on {replicas} of {saved} replicas, {done} steps into a round: what replica"
        f"{gone} learned in these steps is lost (save at a multiple of systems.outer.sync_every to "
        "keep it)"
    )


def run_folder(path: Path) -> Path:
    """Return the run's folder of a checkpoint in it, other folders as they are."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def refuse_to_mix(out: Path) -> None:
    """Keep an earlier run's checkpoints: a fresh run in the same folder would replace them.

    Raises:
        ConfigError: `out` holds checkpoints.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out folder {out} is a file: choose another --out")
    if find_checkpoint(out) is not None:
        raise ConfigError(
            f"out folder {out} holds checkpoints of an earlier run: continue it with --resume, or "
            "choose another --out"
        )


def as_chosen(config: Config, saved: Mapping[str, Any]) -> Config:
    """Return a configuration that goes on with what compress "auto" chose before a checkpoint."""
    if config.compress != "auto":
        return config
    return replace(config, compress="given", systems=from_dict(saved).systems)


def check_same(path: Path, saved: Mapping[str, Any], config: Config) -> None:
    """Refuse a checkpoint of other settings than `config`'s; the free ones may differ.

    Raises:
        CheckpointError: names up to three settings, then and now.
    """
    old, new = numeric_settings(saved), numeric_settings(to_dict(config))
    differ = [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise CheckpointError(
            f"checkpoint {path} was written by another configuration: {'; '.join(differ[:3])}{more}"
        )
