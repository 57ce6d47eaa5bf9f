"""All-reduce in two tiers: fast links inside a node, slow links across nodes.

Steps, for L ranks per node and M nodes: 1. inside the node, all-to-all of L encoded chunks, sum.
2. across nodes, all-to-all of the own chunk's M encoded pieces, sum, encode. 3. gather the encoded
pieces across nodes. 4. gather those inside the node: the bytes of step 2, passed on as they are.
5. decode. Three roundings. A rank sends across nodes 2(M-1)*W/(L*M) bytes, 1/L of the flat form's
at most.

Sums run in rank order inside the node, then in node order; all ranks end with equal bits.

Legend: `L` ranks per node, `M` nodes, `R` = L*M, `W` wire bytes of the whole message.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from thinwire import _compat
from thinwire.comm import call, ledger, transport
from thinwire.comm.shots import Shot, as_sent, encode_chunks, encode_sum, pad_to
from thinwire.errors import ConfigError

__all__ = ["Hierarchy", "hierarchy", "three_shot"]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The two tiers that a rank belongs to.

    Attributes:
        intra: the L ranks of this rank's node, in group order.
        inter: the M ranks at this rank's place in every node, in node order.
    """

    intra: dist.ProcessGroup
    inter: dist.ProcessGroup


def hierarchy(group: dist.ProcessGroup | None, node_size: int) -> Hierarchy:
    """Cut a group into nodes of consecutive ranks; every rank of the world calls it alike.

    Args:
        group: the flat group; None for the world. Ranks of other groups take part with their own.
        node_size: ranks per node; divides the group's size.

    Raises:
        ConfigError: node_size does not divide the group.
    """
    flat = group or _compat.default_group()
    ranks = dist.get_process_group_ranks(flat)
    if node_size < 1 or len(ranks) % node_size:
        raise ConfigError(f"node_size={node_size} does not divide the group's {len(ranks)} ranks")
    nodes = [ranks[i : i + node_size] for i in range(0, len(ranks), node_size)]
    columns = [list(column) for column in zip(*nodes, strict=True)]
    # Creating a group concerns the whole world, so all of them are agreed on first.
    mine = {"intra": nodes, "inter": columns}
    every: list[dict[str, list[list[int]]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    wanted = sorted({tuple(part) for one in every for parts in one.values() for part in parts})
    made = {ranks: dist.new_group(list(ranks)) for ranks in wanted}
    rank = dist.get_rank()
    node = next(tuple(part) for part in nodes if rank in part)
    column = next(tuple(part) for part in columns if rank in part)
    return Hierarchy(intra=made[node], inter=made[column])


def three_shot(x: Tensor, shot: Shot, inter: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the sum of flat x over both tiers in its dtype, and the bytes sent.

    Args:
        x: flat tensor.
        shot: with the node's ranks as its group.
        inter: this rank's peers across nodes.
    """
    codec, intra, numel, dtype = shot.codec, shot.group, x.numel(), x.dtype
    num_local, num_nodes = intra.size(), inter.size()
    unit = num_local * num_nodes * codec.facts.granule
    piece = -(-numel // unit) * codec.facts.granule
    x = pad_to(x, piece * num_local * num_nodes)
    with call.timed(shot.books, shot.link, "encode_s"):
        rows = x.view(num_local, num_nodes * piece)
        messages = encode_chunks(rows, codec, shot.nonfinite)
    shot.note(messages, num_nodes * piece, dtype)
    local = transport.all_to_all(messages, intra)
    with call.timed(shot.books, shot.link, "encode_s"):
        total = as_sent(codec.decode_sum(local, num_nodes * piece, dtype), codec, dtype)
        messages_across = encode_chunks(total.view(num_nodes, piece), codec, shot.nonfinite)
    across = transport.all_to_all(messages_across, inter)
    with call.timed(shot.books, shot.link, "encode_s"):
        message = encode_sum(across, piece, total.dtype, codec)
    with call.timed(shot.books, shot.link, "wait_s"):
        pieces, _ = transport.all_gather(message, inter)
        wires, _ = transport.all_gather(pieces.view(-1), intra)
    wires = wires.view(num_local * num_nodes, -1)
    call.raise_flagged(shot.check(wires, piece, dtype), shot.link)
    with call.timed(shot.books, shot.link, "decode_s"):
        out = codec.decode(wires, piece, dtype).view(-1)[:numel]
    sent = ledger.reduce_scatter_sent(messages.shape[1], num_local)
    sent += ledger.reduce_scatter_sent(messages_across.shape[1] + message.numel(), num_nodes)
    return out, sent + ledger.all_gather_sent(pieces.numel(), num_local)
