"""`thinwire probe` inside the ranks: the trainer's mesh, its step's computation, or a user's step.

A recipe's step is timed as one rank computes it, without a message: its stage's forward and
backward over its share of the batch, and AdamW over its shard. The computation that tp ranks split
is timed whole and divided by them.

Legend: `B` sequences of this rank, `T` tokens, `D` model width.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import plan
from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.plan.probe_mesh import TIMEOUT_S
from thinwire.train.config import Config
from thinwire.train.mesh import Layout, make_layout
from thinwire.train.metrics import versions
from thinwire.train.model import build
from thinwire.train.optim import adamw
from thinwire.train.parse import from_dict
from thinwire.train.passes import token_loss
from thinwire.train.process import local_device
from thinwire.train.recipes import RECIPES
from thinwire.train.workload import workload

__all__ = ["known_codecs", "probe_job", "probe_recipe", "recipe_work", "user_step"]


def probe_job(payload: dict[str, Any]) -> dict[str, Any]:
    """Probe as the command line asked; return what links.json holds on rank 0.

    Args:
        payload: `config`, `step` ("module:function", "" for the recipe's own, "none"), `seconds`,
            `max_nbytes`, `timeout_s`, `progress`.
    """
    config = from_dict(payload["config"])
    device = local_device(config)
    layout = make_layout(config, device)
    step = payload["step"]
    work = None
    if step != "none":
        work = user_step(step) if step else recipe_work(config, layout)
    links = probe_recipe(
        layout,
        codecs=known_codecs(config),
        work=work,
        seconds=payload["seconds"],
        max_nbytes=payload["max_nbytes"],
        timeout_s=payload["timeout_s"],
        progress=payload["progress"],
    )
    return links.to_dict() if dist.get_rank() == 0 else {}


def probe_recipe(
    layout: Layout,
    *,
    codecs: Sequence[Codec],
    work: plan.Work | None,
    seconds: float,
    max_nbytes: int,
    timeout_s: float = TIMEOUT_S,
    progress: bool = False,
) -> plan.Links:
    """Probe the process groups that the trainer laid out (see `plan.probe`)."""
    return plan.probe(
        layout.mesh,
        codecs=codecs,
        work=work,
        seconds=seconds,
        max_nbytes=max_nbytes,
        device=layout.device,
        timeout_s=timeout_s,
        progress=progress,
        about={"versions": versions(), "machine": _machine(layout.device)},
    )


def known_codecs(config: Config) -> list[Codec]:
    """Return the codecs of a configuration on these ranks and of all recipes, each once.

    Recipes are asked on as few ranks as they can run on; their codecs don't depend on the number.
    """
    codecs = _codecs(config, [dist.get_world_size()])
    for make in RECIPES.values():
        codecs += _codecs(make(), [2, 4])
    return list(dict.fromkeys(codecs))


def _codecs(config: Config, ranks: Sequence[int]) -> list[Codec]:
    """Return a configuration's codecs on the first number of ranks that the cost model takes."""
    for count in ranks:
        with suppress(ConfigError):
            return workload(config, count).codecs()
    return []


def recipe_work(config: Config, layout: Layout) -> plan.Work:
    """Return a step's computation on this rank, by the recipe's settings."""
    sizes, data = layout.sizes, config.data
    model = build(
        config.model,
        data.seq_len_tokens,
        config.seed,
        stage=layout.index("pp"),
        num_stages=sizes["pp"],
        recompute=config.compute.activation_checkpointing,
    ).to(layout.device, torch.bfloat16 if config.compute.dtype == "bfloat16" else torch.float32)
    rows = data.batch_seqs // layout.data_ranks
    step = _Step(config, layout, model, rows)
    return plan.Work(
        name=config.recipe or "this configuration",
        step=step,
        tokens=rows * data.seq_len_tokens,
        params=_rank_params(config, model, sizes["tp"]),
        divide_by=sizes["tp"],
    )


def _rank_params(config: Config, model: nn.Module, tp: int) -> int:
    """Return the parameters that a rank of the busiest stage computes with, as the plan counts."""
    try:
        return workload(config, dist.get_world_size()).rank_params
    except (
        ConfigError
    ):  # a run that the cost model doesn't cover has a step to be timed all the same
        return sum(p.numel() for p in model.parameters()) // tp


class _Step:
    """Forward and backward of a stage over its micro-batches, AdamW over a shard."""

    def __init__(self, config: Config, layout: Layout, model: nn.Module, rows: int) -> None:
        self.model, self.device = model, layout.device
        self.micro_batches = config.data.micro_batches
        generator = torch.Generator().manual_seed(config.seed)
        shape = (rows, config.data.seq_len_tokens)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        self.y_BT = tokens.to(layout.device)
        self.x: Tensor = self.y_BT
        if layout.index("pp") > 0:
            x_BTD = torch.randn(*shape, config.model.dim, generator=generator)
            self.x = x_BTD.to(layout.device, next(model.parameters()).dtype).requires_grad_()
        self.is_last = layout.is_last_stage
        self.shard = nn.ParameterList(
            _shard(p, layout.sizes["dp_shard"]) for p in model.parameters()
        )
        self.optimizer = adamw(config.optim, self.shard)

    def __call__(self) -> dict[str, float]:
        """Do a step; return the seconds of its parts."""
        seconds = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0}
        parts = zip(
            self.x.chunk(self.micro_batches), self.y_BT.chunk(self.micro_batches), strict=True
        )
        for x, y_MT in parts:
            start = self._now()
            end = self._forward(x, y_MT)
            middle = self._now()
            end.backward()
            seconds["forward_s"] += middle - start
            seconds["backward_s"] += self._now() - middle
        start = self._now()
        for p, whole in zip(self.shard, self.model.parameters(), strict=True):
            assert whole.grad is not None
            p.grad = whole.grad.view(-1)[: p.numel()].float()
        self.optimizer.step()
        self.model.zero_grad()
        seconds["optimizer_s"] = self._now() - start
        return seconds

    def _forward(self, x: Tensor, y_MT: Tensor) -> Tensor:
        out = self.model(x)
        return token_loss(out, y_MT) if self.is_last else out.float().square().mean()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _shard(p: nn.Parameter, num_ranks: int) -> nn.Parameter:
    numel = -(-p.numel() // num_ranks)
    return nn.Parameter(p.detach().reshape(-1)[:numel].float().clone())


def user_step(text: str) -> plan.Work:
    """Return a user's own step to be timed, by "module:function"; importing finds the folder too.

    Raises:
        ConfigError: not of that form, or nothing to call there.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"--step {text!r} must be module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--step {text!r} cannot be imported: {error}") from None
    finally:
        sys.path.pop(0)
    function: Callable[[], Any] | None = getattr(found, name, None)
    if not callable(function):
        raise ConfigError(f"--step {text!r}: module {module} has no function {name!r}")
    return plan.Work(name=text, step=function)


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "cores": os.cpu_count(), "threads_per_rank": torch.get_num_threads()}
