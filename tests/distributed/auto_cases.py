"""Runs with compress "auto" inside real gloo ranks, over links that a case makes up."""

import json
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.plan import COLLECTIVES, CodecSpeed, Compute, Group, Links, Speed
from thinwire.train import auto
from thinwire.train.loop import train
from thinwire.train.parse import from_dict

CODING = CodecSpeed(
    encode_latency_s=0.0, encode_s_per_value=1e-9, decode_latency_s=0.0, decode_s_per_value=1e-9
)


def chosen(payload):
    """Return, per case, what was chosen and how the run went, or the error that ended it."""
    return [_run(case) for case in payload["cases"]]


def _run(case):
    lines = []
    told = mock.patch.object(auto, "say", lines.append)
    rate = case["bytes_per_s"]
    probe = auto.probe_recipe if rate is None else _prober(rate)
    made_up = mock.patch.object(auto, "probe_recipe", probe)
    resume = Path(case["resume"]) if case.get("resume") else None
    config = from_dict(case["config"])
    try:
        with made_up, told:
            run = train(config, resume=resume)
    except ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    dist.barrier()  # rank 0 writes
    metrics = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    written = json.loads((Path(config.out) / "run.json").read_text())
    return {
        "lines": lines,
        "auto": run.get("auto"),
        "written": written.get("auto"),
        "systems": run["config"]["systems"],
        "compress": run["config"]["compress"],
        "losses": [json.loads(line)["loss"] for line in metrics],
        "wire": run["ledger"],
    }


def _prober(bytes_per_s):
    def probe(layout, *, codecs, work, **kwargs):
        # Ranks measure unlike numbers; they must choose alike all the same.
        rate = bytes_per_s * (1 + 1e-3 * dist.get_rank())
        group = Group(
            ranks=(),
            size=2,
            collectives=dict.fromkeys(COLLECTIVES, Speed.ideal(1e-5, rate)),
        )
        axes = [axis for axis, size in layout.sizes.items() if size > 1]
        return Links(
            world_size=2,
            mesh=layout.sizes,
            groups=dict.fromkeys(axes, group),
            codecs={repr(codec): CODING for codec in codecs}
            | dict.fromkeys(("select", "sparse"), CODING),
            compute=Compute(recipe=work.name, step_s=0.01),
        )

    return probe
