"""Checkpoints: whole or not at all, and only for the configuration that wrote them.

A checkpoint is a folder `step-NNNNNNNN` of torch's distributed checkpoint, with `thinwire.json`
(step, data position, configuration, ledgers) beside it. Steps of a save:
1. All ranks write into `.saving`, a failure on one rank is raised on all.
2. Rank 0 adds thinwire.json, flushes, renames the folder to its final name.
3. Rank 0 removes the oldest checkpoints beyond `keep`.
A run killed anywhere before the rename leaves the earlier checkpoints as they were.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from thinwire import eco
from thinwire.errors import CheckpointError
from thinwire.train.config import Config
from thinwire.train.model import Transformer
from thinwire.train.outer import OuterSystem
from thinwire.train.parse import config_hash, to_dict
from thinwire.train.replicas import ReplicaSystem
from thinwire.train.saved import META, check_same, find_checkpoint, read_meta, replica_key
from thinwire.train.systems import System

__all__ = ["Checkpointer"]

# Flat keys per parameter name let another layout load the optimizer's state.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Checkpointer:
    """Saves and restores one run.

    Attributes:
        folder: where the checkpoints of the run lie.
        config: the run's configuration.
        model: this rank's part of the model.
        optimizer: its optimizer.
        systems: attached systems by name.
    """

    folder: Path
    config: Config
    model: Transformer
    optimizer: Optimizer
    systems: Mapping[str, System]

    def save(self, step: int, meta: Mapping[str, Any]) -> None:
        """Write the state after `step` steps; collective.

        Args:
            step: finished steps.
            meta: JSON values to return from `load`, the same on every rank or rank 0's.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        part, final = self.folder / ".saving", self.folder / f"step-{step:08d}"
        failure = self._on_rank_0(lambda: _fresh(part))
        if failure is None:
            try:
                save(self._state(), checkpoint_id=part)
            except CheckpointException as error:
                failure = _reason(error)
        if failure is None:
            full = {"step": step, "config": to_dict(self.config), **meta}
            failure = self._on_rank_0(lambda: _publish(part, final, full, self.config))
        if failure is not None:
            self._on_rank_0(lambda: shutil.rmtree(part, ignore_errors=True))
            last = find_checkpoint(self.folder)
            kept = f"the last good checkpoint is {last}" if last else "there is no earlier one"
            raise CheckpointError(f"cannot save step {step} in {self.folder}: {failure}; {kept}")

    def load(self, path: Path) -> dict[str, Any]:
        """Restore model, optimizer and systems from `path`; return the saved meta; collective.

        Raises:
            CheckpointError: unreadable, or of another configuration (names the settings).
        """
        meta = read_meta(path)
        check_same(path, meta["config"], self.config)
        for system in self.systems.values():
            if isinstance(system, ReplicaSystem | OuterSystem):
                system.expect(meta["mesh"])
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        state = self._saved(model, optimizer)
        try:
            load(state, checkpoint_id=path)
        except CheckpointException as error:
            raise CheckpointError(f"cannot load checkpoint {path}: {_reason(error)}") from None
        # Reading went into the tensors of `model`, stored weights through views of their parts.
        eco.load_plain_state_dict(self.model, self._own(state["model"]))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=self._own(state["optimizer"]),
            options=OPTIONS,
        )
        for name, system in self.systems.items():
            system.load_state_dict(state["systems"][name])
        return meta

    def _state(self) -> dict[str, Any]:
        return self._saved(*get_state_dict(self.model, self.optimizer, options=OPTIONS))

    def _saved(self, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
        systems = {name: system.state_dict() for name, system in self.systems.items()}
        plain = eco.plain_state_dict(model)
        outer = self.systems.get("outer")
        if isinstance(outer, OuterSystem):
            # Between rounds replicas differ: each saves its own.
            plain, optimizer = (
                {replica_key(outer.heir): plain},
                {replica_key(outer.heir): optimizer},
            )
        return {"model": plain, "optimizer": optimizer, "systems": systems}

    def _own(self, part: dict[str, Any]) -> dict[str, Any]:
        """Invert what `_saved` did to weights and optimizer for replicas that train apart."""
        outer = self.systems.get("outer")
        return part[replica_key(outer.heir)] if isinstance(outer, OuterSystem) else part

    def _on_rank_0(self, action: Any) -> str | None:
        """Run `action` on rank 0; return why it failed, to every rank."""
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                failure = [str(error)]
        dist.broadcast_object_list(failure, src=0)
        return failure[0]


def _fresh(folder: Path) -> None:
    if folder.exists():  # left by a run that was killed while saving
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _publish(part: Path, final: Path, meta: Mapping[str, Any], config: Config) -> None:
    with open(part / META, "w") as file:
        json.dump({**meta, "config_hash": config_hash(config)}, file)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    keep = config.checkpoints.keep
    stale = sorted(final.parent.glob("step-*"))[:-keep] if keep else []
    for old in stale:
        shutil.rmtree(old)


def _reason(error: CheckpointException) -> str:
    """Return one rank's cause in one line."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0]}"
    return str(error).splitlines()[0]
