"""How each peer trains: what it wraps around the model and the optimizer.

Every peer gets the trainer's model with the same initial weights and the trainer's own batches; a
method returns the model to call and the optimizer to step. Nothing of a peer is copied here: only
its public calls are used, as its documentation shows them.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.train.config import Config
from thinwire.train.optim import adamw

Groups = list[dict[str, Any]]


@dataclass
class Built:
    """What a method made.

    Attributes:
        model: forward and backward go through it.
        optimizer: steps the weights.
        after_step: called after each step.
        around: entered before the first step.
        replicas_apart: each rank steps with its own gradient norm.
    """

    model: nn.Module
    optimizer: Optimizer
    after_step: Callable[[], None] = lambda: None
    around: Any = None
    replicas_apart: bool = False
    keeps: list[Any] = field(default_factory=list)


def groups(config: Config, model: nn.Module) -> Groups:
    """Return matrices, which decay, and the rest."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": config.optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def wanted(package: str, module: str) -> Any:
    """Import a peer.

    Raises:
        ConfigError: it isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package} is not installed ({error}): pip install thinwire[peers]"
        ) from error


def ddp(config: Config, model: nn.Module) -> Built:
    return Built(DistributedDataParallel(model), adamw(config.optim, model))


def ddp_fp16(config: Config, model: nn.Module) -> Built:
    built = ddp(config, model)
    assert isinstance(built.model, DistributedDataParallel)
    built.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return built


def powersgd(rank: int) -> Callable[[Config, nn.Module], Built]:
    def method(config: Config, model: nn.Module) -> Built:
        # One bucket: with more, the hook's chained all-reduces start in an order that may differ
        # between ranks, and gloo, which matches by order, aborts the process.
        built = Built(
            DistributedDataParallel(model, bucket_cap_mb=4096), adamw(config.optim, model)
        )
        assert isinstance(built.model, DistributedDataParallel)
        # Dense for the first tenth, as its documentation advises; at least 2.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, config.steps // 10)
        )
        built.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        built.keeps.append(state)
        return built

    return method


def fsdp2_bf16(config: Config, model: nn.Module) -> Built:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Built(model, adamw(config.optim, model))


def torchao_fp8_gather(config: Config, model: nn.Module) -> Built:
    """FP8 gathers of the linear layers' weights; arithmetic emulated, gradients bf16."""
    float8 = wanted("torchao", "torchao.float8")
    options = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    float8.convert_to_float8_training(
        model, config=options, module_filter_fn=lambda m, name: name.startswith("layers.")
    )
    built = fsdp2_bf16(config, model)
    built.after_step = lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)
    return built


def torchao_8bit(config: Config, model: nn.Module) -> Built:
    optim = wanted("torchao", "torchao.optim")
    o = config.optim
    return Built(
        DistributedDataParallel(model),
        optim.AdamW8bit(groups(config, model), lr=o.lr, betas=o.betas, eps=o.eps),
    )


def torchao_sr(config: Config, model: nn.Module) -> Built:
    optim = wanted("torchao", "torchao.optim")
    model.to(torch.bfloat16)
    o = config.optim
    return Built(
        DistributedDataParallel(model),
        optim._AdamW(
            groups(config, model), lr=o.lr, betas=o.betas, eps=o.eps, bf16_stochastic_round=True
        ),
    )


def optimi_kahan(config: Config, model: nn.Module) -> Built:
    optimi = wanted("torch-optimi", "optimi")
    model.to(torch.bfloat16)
    o = config.optim
    return Built(
        DistributedDataParallel(model),
        optimi.AdamW(
            groups(config, model), lr=o.lr, betas=o.betas, eps=o.eps, kahan_sum=True, triton=False
        ),
    )


def torchft_diloco(config: Config, model: nn.Module) -> Built:
    """DiLoCo with its lighthouse on rank 0; outer Nesterov 0.7, 0.9 as for our recipe."""
    torchft = wanted("torchft", "torchft")
    local_sgd = wanted("torchft", "torchft.local_sgd")
    coordination = wanted("torchft", "torchft.coordination")
    keeps: list[Any] = []
    # Names may not resolve inside a network namespace: addresses only.
    host = os.environ.get("THINWIRE_PEER_HOST", "127.0.0.1")
    address: list[Any] = [None]
    if dist.get_rank() == 0:
        server = coordination.LighthouseServer(
            bind="0.0.0.0:0", min_replicas=dist.get_world_size(), join_timeout_ms=10_000
        )
        keeps.append(server)
        port = server.address().rsplit(":", 1)[1]
        address = [f"http://{host}:{port}"]
    dist.broadcast_object_list(address)
    own = os.environ.get("THINWIRE_PEER_OWN", host)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    optimizer = adamw(config.optim, model)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"replica{dist.get_rank()}",
        hostname=own,
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    around = local_sgd.DiLoCo(
        manager, [model], optimizer, outer, sync_every=config.systems.outer.sync_every
    )
    keeps += [store, manager]
    return Built(model, optimizer, around=around, replicas_apart=True, keeps=keeps)


PEERS: dict[str, Callable[[Config, nn.Module], Built]] = {
    "torch-ddp": ddp,
    "torch-ddp-fp16": ddp_fp16,
    "torch-powersgd-2": powersgd(2),
    "torch-powersgd-8": powersgd(8),
    "torch-fsdp2-bf16": fsdp2_bf16,
    "torchao-fp8-gather": torchao_fp8_gather,
    "torchao-adamw8bit": torchao_8bit,
    "torchao-bf16-sr": torchao_sr,
    "optimi-bf16-kahan": optimi_kahan,
    "torchft-diloco": torchft_diloco,
}
