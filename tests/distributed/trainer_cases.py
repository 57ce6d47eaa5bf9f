"""Runs many training cases inside one launch of real gloo ranks (imported by the child ranks)."""

import json
import os
import signal
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from thinwire.errors import DataError, ThinwireError
from thinwire.train import loop
from thinwire.train.loop import Trainer, train
from thinwire.train.model import build
from thinwire.train.parse import from_dict
from thinwire.train.passes import token_loss
from thinwire.train.systems import full_precision


def losses(payload):
    """Return, per configuration, [[loss, grad_norm] per step] plus the validation loss."""
    return [_run(from_dict(values)) for values in payload["configs"]]


def _run(config):
    try:
        run = train(config)
    except ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "steps": [[s["loss"], s["grad_norm"]] for s in steps],
        "val_loss": run["result"]["val_loss"],
        "wire": steps[-1]["wire"],
        "ledger": run["ledger"],
        "params": run["memory"]["params"],
    }


def refused(payload):
    """Return the error that ends one run on this rank."""
    try:
        Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    except ThinwireError as error:
        return str(error)
    return "no error"


def resumed(payload):
    """Run configurations one after the other, some from a checkpoint."""
    results = []
    for case in payload["cases"]:
        run = train(from_dict(case["config"]), resume=Path(r) if (r := case["resume"]) else None)
        results.append({"result": run["result"], "ledgers": run["ledger_ranks"]})
    return results


def several(payload):
    """Run other functions of this file one after the other, in one launch."""
    return {name: globals()[name](part) for name, part in payload["parts"].items()}


def evaluated(payload):
    """Return the held-out loss of the gathered and of the master weights after a step."""
    trainer = Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    trainer.train_step()
    gathered = trainer.evaluate()
    with full_precision(trainer.systems):
        return {"gathered": gathered, "master": trainer.evaluate()}


def stuck(payload):
    """Train a model of zeros: no gradient arrives, the loss stays at ln(vocabulary)."""
    trainer = Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.zero_()
    try:
        trainer.run(progress=False)
    except ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}", "step": trainer.step}
    return {"step": trainer.step}


def poisoned(payload):
    """Put one NaN into the weights of the last rank."""
    trainer = Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            trainer.model.head.weight.to_local()[-1, 0] = torch.nan
    try:
        trainer.run(progress=False)
    except ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}", "step": trainer.step}
    return {"step": trainer.step}


def poisoned_stage(payload):
    """Put one NaN into the weights of a rank after the first outer round."""
    config = from_dict(payload["config"])
    trainer = Trainer.build(config, torch.device("cpu"))
    step, every = trainer.train_step, config.systems.outer.sync_every

    def train_step():
        if trainer.step == every and dist.get_rank() == payload["rank"]:
            with torch.no_grad():
                next(iter(trainer.model.layers.values())).attn.wo.weight[0, 0] = torch.nan
        return step()

    trainer.train_step = train_step
    trainer.run(progress=False)
    finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    return {"finite": finite, "step": trainer.step}


def disjoint_experts(payload):
    """Rank r sends all its tokens to expert r; return gradients and those of a single process."""
    cfg = from_dict(payload["config"]).model
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, sharded = _routed(cfg), _routed(cfg)
    for module in (*sharded.layers.values(), sharded):
        fully_shard(module)
    tokens = torch.arange(ranks)[:, None].expand(ranks, 8)
    chosen = set()
    for block in whole.layers.values():
        block.mlp.router.register_forward_hook(
            lambda module, args, out: chosen.update(
                out.argmax(-1)[8 * rank : 8 * rank + 8].tolist()
            )
        )
    token_loss(whole(tokens), tokens).backward()
    token_loss(sharded(tokens[rank : rank + 1]), tokens[rank : rank + 1]).backward()
    differences = {
        name: (p.grad.full_tensor() - whole.get_parameter(name).grad).abs().max().item()
        for name, p in sharded.named_parameters()
    }
    return {"chosen": sorted(chosen), "differences": differences}


@torch.no_grad()
def _routed(cfg):
    """Build a model whose router reads the token's number off the residual stream."""
    model = build(cfg, 8, seed=0)
    model.embed.weight.mul_(0.1)
    model.embed.weight[: cfg.num_experts, : cfg.num_experts].add_(torch.eye(cfg.num_experts))
    for block in model.layers.values():
        block.mlp.router.weight.zero_()
        block.mlp.router.weight[:, : cfg.num_experts].copy_(10 * torch.eye(cfg.num_experts))
    return model


def undone(payload):
    """Train as if a wrapper had removed the compression of a link."""

    def attach_nothing(config, layout, model, ledger):
        ledger.expect("tensor", num_ranks=2)
        return {}

    with mock.patch.object(loop, "attach_systems", attach_nothing):
        train(from_dict(payload["config"]))


def one_dies(payload):
    """End rank 1 as the out-of-memory killer does, while the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_raises(payload):
    """Raise on rank 1 only."""
    if dist.get_rank() == 1:
        raise DataError("rank 1 alone cannot read its data")
    dist.barrier()


def poisoned_replica(payload):
    """Put one NaN into the weights of the last of several replicas that train apart."""
    trainer = Trainer.build(from_dict(payload["config"]), torch.device("cpu"))
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            trainer.model.head.weight[-1, 0] = torch.nan
    trainer.run(progress=False)
    finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, trainer.systems["outer"].loop.partition.fingerprint().hex())
    return {"finite": finite, "hashes": hashes}


def booked(payload):
    """Return, per configuration and step, {link: [dense bytes, wire bytes]} of this rank."""
    found = []
    for values in payload["configs"]:
        trainer = Trainer.build(from_dict(values), torch.device("cpu"))
        steps, before = [], trainer.ledger.to_dict()
        for _ in range(trainer.config.steps):
            trainer.train_step()
            now = trainer.ledger.to_dict()
            steps.append(
                {
                    link: [
                        now[link][kind] - before.get(link, {}).get(kind, 0)
                        for kind in ("dense_bytes", "wire_bytes")
                    ]
                    for link in now
                }
            )
            before = now
        found.append(steps)
    return found
