"""Sites as real processes around a TCPStore: one is killed in mid-round, and rejoins.

Field case H7: a killed peer in mid-sync stopped everybody for ever.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.test_sparseloco_ranks import adam, net, train, weights
from thinwire.errors import PeerError
from thinwire.sparseloco import (
    Deadline,
    GroupTransport,
    Options,
    SparseLoCo,
    StoreTransport,
    joining,
)

pytestmark = pytest.mark.processes
ROSTER = (0, 1, 2)
EVERY, VICTIM, KILL_ROUND, ROUNDS = 2, 2, 1, 5


def connect(port):
    return dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def serve(pipe):
    """Hold the store, as a process of its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def site(replica, port, folder, join):
    """Train; the victim dies between two pieces of its message."""
    torch.set_num_threads(1)
    link = StoreTransport(
        connect(port), replica, ROSTER, timeout_s=30.0, deadline=Deadline(c=3.0, floor_s=2.0),
        grace_s=2.0,
    )  # fmt: skip
    model = net()
    optimizer = adam(model)
    outer = SparseLoCo(model, optimizer, sync_every=EVERY, transport=link, join=join)
    log, own = [], joining.put_bytes

    def die(store, key, data):
        if replica == VICTIM and not join and key.startswith(f"r{KILL_ROUND}/"):
            store.set(f"{key}/0", "half")
            os.kill(os.getpid(), signal.SIGKILL)
        own(store, key, data)

    joining.put_bytes = die
    Path(folder, f"started{replica}{join:d}").touch()
    while True:
        before = outer.last
        train(model, optimizer, replica, 1, start=len(log))
        if outer.last is not before:
            last = outer.last
            log.append((last.round, last.committed, last.accepted, last.own, last.reasons))
            rounds_of_three = sum(entry[2] == ROSTER for entry in log[-2:])
            if (last.round + 1 >= ROUNDS and rounds_of_three == 2) or len(log) > 600:
                break
        time.sleep(0.05)
    torch.save({"log": log, "weights": weights(model)}, f"{folder}/site{replica}.pt")


def group_site(rank, folder, port, outcome):
    """A process group instead: survivors raise, keep their state and go on in a new group."""
    torch.set_num_threads(1)
    store = connect(port)

    def group(ranks, name):
        size = len(ranks)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=ranks.index(rank), world_size=size,
            timeout=timedelta(seconds=5),
        )  # fmt: skip

    group(ROSTER, "epoch0")
    model = net()
    optimizer = adam(model)
    outer = SparseLoCo(model, optimizer, sync_every=EVERY)
    train(model, optimizer, rank, 3)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    state, began = outer.state_dict(), time.monotonic()
    with pytest.raises(PeerError, match="a peer was lost"):
        train(model, optimizer, rank, 1, start=3)
    seconds = time.monotonic() - began
    after = outer.state_dict()["core"]
    for part in ("theta", "residual"):
        for name, x in state["core"][part].items():
            assert torch.equal(x, after[part][name])
    outer.detach()
    group_of_two(group)
    second = SparseLoCo(
        outer_model(model, after), optimizer, sync_every=EVERY,
        transport=GroupTransport(replicas=(0, 1)),
    )  # fmt: skip
    train(model, optimizer, rank, 2, start=4)
    torch.save(
        {"seconds": seconds, "weights": weights(model), "committed": second.last.committed},
        f"{folder}/group{rank}.pt",
    )
    outcome.put(rank)


def group_of_two(group):
    dist.destroy_process_group()
    group((0, 1), "epoch1")


@torch.no_grad()
def outer_model(model, core):
    """Put the last committed weights back."""
    for name, p in model.named_parameters():
        if name in core["theta"]:
            p.copy_(core["theta"][name])
    return model


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Run both scenarios in one launch of processes; the store is a process too."""
    folder = tmp_path_factory.mktemp("sites")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    master = context.Process(target=serve, args=(theirs,), daemon=True)
    master.start()
    port, done = ours.recv(), context.Queue()
    sites = {r: context.Process(target=site, args=(r, port, folder, False)) for r in ROSTER}
    for process in sites.values():
        process.start()
    sites[VICTIM].join(90)
    rejoined = context.Process(target=site, args=(VICTIM, port, folder, True))
    rejoined.start()
    running = [sites[0], sites[1], rejoined]
    for process in running:
        process.join(120)
    groups = [context.Process(target=group_site, args=(r, folder, port, done)) for r in ROSTER]
    for process in groups:
        process.start()
    for process in groups:
        process.join(90)
    hung = [p for p in (*running, *groups) if p.is_alive()]
    for process in hung:
        process.kill()
    ours.send("end")
    master.join(10)
    exits = {
        "victim": sites[VICTIM].exitcode,
        "sites": [p.exitcode for p in running],
        "groups": [p.exitcode for p in groups],
    }
    return folder, exits, len(hung)


def test_nobody_hangs(launched):
    _, exits, hung = launched
    assert hung == 0
    assert exits["victim"] == -signal.SIGKILL
    assert exits["sites"] == [0, 0, 0]
    assert exits["groups"] == [0, 0, -signal.SIGKILL]


def test_survivors_commit_without_the_killed_site_and_it_rejoins(launched):
    folder, _, _ = launched
    logs = [torch.load(folder / f"site{r}.pt", weights_only=False) for r in ROSTER]
    rounds = [{entry[0]: entry for entry in log["log"]} for log in logs]
    assert rounds[0][0][2] == ROSTER
    assert rounds[0][KILL_ROUND][1:3] == (True, (0, 1))
    assert rounds[0][KILL_ROUND][4] == {VICTIM: "no message"}
    assert rounds[0].keys() == rounds[1].keys()
    assert all(rounds[0][t][2] == rounds[1][t][2] for t in rounds[0])
    first = min(rounds[VICTIM])
    assert first > KILL_ROUND
    assert rounds[VICTIM][first][3] == "abstained: just joined"
    last = max(rounds[0])
    assert last == max(rounds[VICTIM])
    assert rounds[0][last][2] == rounds[VICTIM][last][2] == ROSTER
    for name, x in logs[0]["weights"].items():
        assert torch.equal(x, logs[1]["weights"][name])
        assert torch.equal(x, logs[VICTIM]["weights"][name])


def test_survivors_of_a_group_raise_in_time_and_go_on(launched):
    folder, _, _ = launched
    a, b = (torch.load(folder / f"group{r}.pt", weights_only=False) for r in (0, 1))
    assert a["seconds"] < 20
    assert a["committed"]
    assert all(torch.equal(x, b["weights"][n]) for n, x in a["weights"].items())
    assert Options().min_quorum == 1
