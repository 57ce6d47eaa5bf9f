"""A codec of your own: the sign of every value, and the mean magnitude.

Run: torchrun --nproc-per-node 2 examples/sign_codec.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.codecs import CodecFacts


@dataclass(frozen=True)
class Sign:
    """One bit per value (set: not negative), then the mean magnitude as fp32."""

    @property
    def facts(self):
        return CodecFacts(granule=8)

    def wire_nbytes(self, numel, dtype):
        return (numel + 7) // 8 + 4

    def encode(self, x, *, out=None):
        x = x.detach().reshape(-1).float()
        bits = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -x.numel() % 8))
        packed = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        mean = x.abs().sum() / max(1, x.numel())  # NaN or infinity anywhere shows in it
        wire = torch.cat([packed, mean.reshape(1).view(torch.uint8)])
        return wire if out is None else out.copy_(wire)

    def decode(self, wire, numel, dtype, *, out=None):
        rows = wire.view(-1, wire.shape[-1])
        bits = (rows[:, :-4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        signs = bits.flatten(1)[:, :numel].float() * 2 - 1
        values = (signs * rows[:, -4:].contiguous().view(torch.float32)).to(dtype)
        values = values.view(*wire.shape[:-1], numel)
        return values if out is None else out.copy_(values)

    def decode_sum(self, wires, numel, dtype):
        total = torch.zeros(numel)
        for values in self.decode(wires, numel, torch.float32):  # in rank order
            total += values
        return total

    def decode_sum_encode(self, wires, numel, dtype, *, out=None):
        return self.encode(self.decode_sum(wires, numel, dtype), out=out)

    def nonfinite_count(self, wire, numel, dtype):
        means = wire.reshape(-1, wire.shape[-1])[:, -4:].contiguous().view(torch.float32)
        return int((~means.isfinite()).sum())


def main():
    dist.init_process_group("gloo")
    ledger, rank = tw.Ledger(), dist.get_rank()
    ledger.expect("gradients", num_ranks=dist.get_world_size())
    x = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    total = tw.comm.all_reduce(x, Sign(), link="gradients", ledger=ledger)
    if rank == 0:
        print(f"sum of 4096 values over the ranks, norm {total.norm():.2f}")
        print(ledger.check())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
