"""A stage of a compressed replica is killed in mid-round: the others raise in time (case H7)."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thinwire.errors import PeerError
from thinwire.replicas import Layout, MixedReplicas, Replica, Site
from thinwire.sparseloco import Options
from thinwire.train.config import Model
from thinwire.train.model import build

pytestmark = pytest.mark.processes
CFG = Model(dim=64, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=64, vocab_size=100)
LAYOUT = Layout(replicas=(Replica(ranks=(0,)), Replica(ranks=(1, 2), rank_ratio=8)))
VICTIM = 2


def work(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    limit = timedelta(seconds=8)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=limit)
    site = Site(LAYOUT, timeout_s=8.0)
    module = build(CFG, 16, 3, stage=site.stage, num_stages=site.replica.num_stages)
    stage = site.wrap(module, site.basis(CFG.dim))
    outer = MixedReplicas(stage, None, site, sync_every=1, options=Options(k=128))
    move(module)
    outer.step()
    assert outer.last.committed
    move(module)
    before = outer.state_dict()["core"]
    local = {n: p.detach().clone() for n, p in module.named_parameters()}
    if rank == VICTIM:
        exchange = outer._core.current.transport.exchange

        def die(part, message):
            exchange(part, message)
            os.kill(os.getpid(), signal.SIGKILL)

        outer._core.current.transport.exchange = die
    began = time.monotonic()
    with pytest.raises(PeerError, match="a peer was lost while"):
        outer.step()
    seconds = time.monotonic() - began
    after = outer.state_dict()["core"]
    for name in before:
        for what in ("theta", "residual"):
            for key, x in before[name][what].items():
                assert torch.equal(after[name][what][key], x)
    for name, p in module.named_parameters():
        assert torch.equal(p, local[name]) or name in (outer.constraint.names if rank else [])
    torch.save(seconds, f"{folder}/seconds{rank}")
    os._exit(0)  # the groups are broken: no tear-down


@torch.no_grad()
def move(module):
    for name, p in module.named_parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))), alpha=1e-2)


def test_survivors_raise_in_time_and_keep_the_last_commit(tmp_path):
    context = mp.get_context("spawn")
    ranks = [context.Process(target=work, args=(r, str(tmp_path))) for r in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        ranks[rank].kill()
    assert hung == []
    assert [p.exitcode for p in ranks] == [0, 0, -signal.SIGKILL]
    for rank in (0, 1):
        assert torch.load(tmp_path / f"seconds{rank}") < 30
