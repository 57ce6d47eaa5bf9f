"""Sends and receives between ranks that are threads: order, overlap, tags, a rank that fails."""

import pytest
import torch
import torch.distributed as dist

from thinwire.testing.ranks import run_ranks


def test_messages_arrive_in_order_and_receives_block_no_send():
    def work(rank):
        peer = 1 - rank
        got = [torch.zeros(3), torch.zeros(2, 2)]
        waits = [dist.irecv(x, src=peer) for x in got]
        dist.send(torch.full((3,), 1.0 + rank), dst=peer)
        dist.send(torch.full((2, 2), 10.0 + rank).T, dst=peer)
        for wait in reversed(waits[:1]):
            wait.wait()
        waits[1].wait()
        return [x.flatten()[0].item() for x in got]

    assert run_ranks(2, work) == [[2.0, 11.0], [1.0, 10.0]]


def test_subgroups_and_tags_are_apart():
    def work(rank):
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        group, x = pairs[rank // 2], torch.zeros(1)
        if rank % 2 == 0:
            dist.send(torch.tensor([float(rank)]), group=group, group_dst=1, tag=1)
            dist.send(torch.tensor([100.0 + rank]), group=group, group_dst=1, tag=2)
            return 0.0
        dist.recv(x, group=group, group_src=0, tag=2)
        return x.item()

    assert run_ranks(4, work) == [0.0, 100.0, 0.0, 102.0]


def test_a_failing_rank_ends_one_that_waits():
    def work(rank):
        if rank == 1:
            raise ValueError("rank 1 fails")
        dist.recv(torch.zeros(1), src=1)

    with pytest.raises(ValueError, match="rank 1 fails"):
        run_ranks(2, work, timeout_s=20)
