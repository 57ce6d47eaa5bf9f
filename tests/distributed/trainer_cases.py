"""Runs many training cases inside one launch of real gloo ranks (imported by the child ranks)."""

import json
from pathlib import Path

import torch

from thinwire.errors import ThinwireError
from thinwire.train.loop import Trainer, train
from thinwire.train.parse import from_dict


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


def resumed(payload):
    """Run configurations one after the other, some from a checkpoint."""
    results = []
    for case in payload["cases"]:
        run = train(from_dict(case["config"]), resume=Path(r) if (r := case["resume"]) else None)
        results.append({"result": run["result"], "ledgers": run["ledger_ranks"]})
    return results


def frozen(payload):
    """Train with a head of zeros and no embedding gradient: the loss stays at ln(vocabulary)."""
    config = from_dict(payload["config"])
    trainer = Trainer.build(config, torch.device("cpu"))
    for p in trainer.model.parameters():
        p.requires_grad_(False)
        p.zero_()
    next(iter(trainer.model.parameters())).requires_grad_(True)
    try:
        trainer.run(progress=False)
    except ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}", "step": trainer.step}
    return {"step": trainer.step}
