"""One test per private or version-dependent torch name: an upgrade of torch fails here first."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire import _compat
from thinwire.testing.ranks import run_ranks


def sharded(rank: int, **kwargs) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), **kwargs)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **kwargs)


def on_two_ranks(check) -> None:
    run_ranks(2, check)


def test_all_gather_single():
    def check(rank):
        out = torch.empty(4)
        _compat.all_gather_single(out, torch.full((2,), float(rank)))
        assert out.tolist() == [0, 0, 1, 1]

    on_two_ranks(check)


def test_reduce_scatter_single():
    def check(rank):
        out = torch.empty(2)
        _compat.reduce_scatter_single(out, torch.arange(4.0))
        assert out.tolist() == [[0, 2], [4, 6]][rank]

    on_two_ranks(check)


def test_default_group_and_group_from_name():
    def check(rank):
        group = _compat.default_group()
        assert group.size() == 2
        assert _compat.group_from_name(group.group_name) is group

    on_two_ranks(check)


def test_num_groups_counts_this_ranks_groups():
    def check(rank):
        before = _compat.num_groups()
        dist.new_group([rank], use_local_synchronization=True)
        assert _compat.num_groups() == before + 1

    on_two_ranks(check)


def test_comm_base_classes_are_accepted_by_the_setters():
    class Gather(_compat.AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            called.append(input_tensor.numel())
            return _compat.all_gather_single(output_tensor, input_tensor, group=group)

    class Reduce(_compat.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            called.append(-output_tensor.numel())
            return _compat.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)

    called: list[int] = []

    def check(rank):
        model = sharded(rank)
        model[0].set_custom_all_gather(Gather())
        model[0].set_custom_reduce_scatter(Reduce())
        model(torch.ones(1, 3)).sum().backward()

    on_two_ranks(check)
    assert sorted(set(called)) == [-12, 12]


def test_fsdp_params_in_buffer_order_with_data_and_state():
    def check(rank):
        model = sharded(rank)
        params = _compat.fsdp_params(model[0])
        assert [tuple(p._orig_size) for p in params] == [(5, 3), (5,)]
        assert _compat.fsdp_params(model) == []
        assert [_compat.fsdp_param_data(p).numel() for p in params] == [9, 3]
        assert all(p.sharded_param is q for p, q in zip(params, model[0].parameters(), strict=True))
        assert [p.padded_sharded_param_size.numel() for p in params] == [9, 3]
        assert _compat.is_sharded(params[0])
        assert not _compat.is_resharded_to_subgroup(params[0])
        assert params[0]._module_info.param_name == "weight"

    on_two_ranks(check)


def test_shard_group_and_reshard_policy():
    def check(rank):
        assert _compat.shard_group(sharded(rank)[0]).size() == 2
        assert _compat.shard_group(sharded(rank)) is None
        assert not _compat.keeps_unsharded_after_forward(sharded(rank)[0])
        kept = sharded(rank, reshard_after_forward=False)
        assert _compat.keeps_unsharded_after_forward(kept[0])

    on_two_ranks(check)


def test_torch_version():
    assert _compat.torch_version() >= (2, 11)
    assert dist.is_available()
