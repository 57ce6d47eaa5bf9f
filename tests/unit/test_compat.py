"""One test per private or version-dependent torch name: an upgrade of torch fails here first."""

from types import SimpleNamespace

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


def test_takes_cuda_only_reads_the_groups_backends():
    def check(rank):
        assert not _compat.takes_cuda_only(_compat.default_group())

    on_two_ranks(check)
    nccl = SimpleNamespace(_device_types=[torch.device("cuda")])
    both = SimpleNamespace(_device_types=[torch.device("cuda"), torch.device("cpu")])
    assert _compat.takes_cuda_only(nccl)
    assert not _compat.takes_cuda_only(both)
    assert hasattr(dist.ProcessGroup, "_device_types")


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


def test_wrapper_tensor_and_map_tensors():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*_compat.map_tensors(Wrapper, lambda w: torch.ones(w.shape), args))

    wrapper = _compat.wrapper_tensor(Wrapper, (2, 3), torch.bfloat16, torch.device("cpu"))
    assert isinstance(wrapper, Wrapper)
    assert (tuple(wrapper.shape), wrapper.dtype) == ((2, 3), torch.bfloat16)
    assert wrapper.sum() == 6


def test_no_torch_function():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    with _compat.no_torch_function():
        assert torch.ones(2).as_subclass(Loud).sum() == 2


def test_keep_version():
    x = torch.zeros(2)
    with _compat.keep_version(x):
        x.add_(1)
    assert x._version == 0


def test_fsdp_takes_a_message_of_any_length_from_the_one_parameter_hook():
    """3 rows on 2 ranks: the five-parameter form refuses messages that aren't weight-shaped."""
    from thinwire import eco

    def check(rank):
        layer = nn.Sequential(nn.Linear(4, 3, bias=False))
        eco.quantize_(layer, "int4")
        want = layer[0].weight.dequantize()
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        layer.unshard()
        return layer[0].weight.shape == want.shape

    assert run_ranks(2, check) == [True, True]


def test_group_timeout():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = _compat.default_group()
        options = group._get_backend(torch.device("cpu")).options
        before = options._timeout
        with _compat.group_timeout([group], 7.0):
            assert options._timeout.total_seconds() == 7.0
        assert options._timeout == before
    finally:
        dist.destroy_process_group()


def test_group_timeout_lets_threaded_groups_be():
    def check(rank):
        with _compat.group_timeout([_compat.default_group()], 7.0):
            dist.barrier()

    on_two_ranks(check)
