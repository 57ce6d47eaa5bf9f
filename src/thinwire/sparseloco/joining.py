"""A replica joins a run at a round boundary, through the store that carries the rounds.

1. The joiner files a numbered request.
2. Whoever closes a round writes the number of requests seen into the closing record, so that all
   replicas of the round answer the same ones after they have committed it.
3. Each answers with round, commits, hashes of settings, tensors and weights; the one with the
   lowest id adds the weights.
4. The joiner compares two answers (one, where one replica is left), the hashes with its own, and
   the weights with their hash. Its residual is zero.
"""

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.errors import ConfigError, PeerError
from thinwire.sparseloco.partition import Partition

__all__ = ["delete_bytes", "get_bytes", "number_of_requests", "put_bytes", "request", "serve"]

PIECE_NBYTES = 4 * 2**20  # TCPStore refuses values above 8 MiB
_COUNT = "want/count"
_COMPARED = ("round", "commits", "config", "table", "theta", "in")


def put_bytes(store: Store, key: str, data: bytes) -> None:
    """Write bytes of any length in pieces, their number last."""
    pieces = -(-len(data) // PIECE_NBYTES)
    for i in range(pieces):
        piece = data[i * PIECE_NBYTES : (i + 1) * PIECE_NBYTES]
        store.set(f"{key}/{i}", piece)  # type: ignore[arg-type]  # bytes are fine
    store.set(f"{key}/pieces", str(pieces))


def get_bytes(store: Store, key: str) -> bytes | None:
    """Return what `put_bytes` wrote, None if it is not there (any more)."""
    if not store.check([f"{key}/pieces"]):
        return None
    keys = [f"{key}/{i}" for i in range(int(store.get(f"{key}/pieces")))]
    if not all(store.check([k]) for k in keys):
        return None
    return b"".join(store.get(k) for k in keys)


def delete_bytes(store: Store, key: str) -> None:
    """Remove what `put_bytes` wrote."""
    if not store.check([f"{key}/pieces"]):
        return
    pieces = int(store.get(f"{key}/pieces"))
    store.delete_key(f"{key}/pieces")
    for i in range(pieces):
        store.delete_key(f"{key}/{i}")


def number_of_requests(store: Store) -> int:
    """Return how many requests were filed so far."""
    return int(store.get(_COUNT)) if store.check([_COUNT]) else 0


def serve(
    store: Store,
    number: int,
    parts: Sequence[Partition],
    members: Collection[int],
    replica: int,
) -> None:
    """Answer a request: this replica's view, and the weights if its id is the lowest."""
    answer = _view(parts) | {"in": sorted(members), "number": number}
    if replica == min(members):
        for part in parts:
            data = b"".join(x.cpu().numpy().tobytes() for x in part.theta.values())
            put_bytes(store, f"want/{number}/theta{part.stage}", data)
    store.set(f"want/{number}/answer{replica}", json.dumps(answer))


def request(
    store: Store,
    replica: int,
    parts: Sequence[Partition],
    timeout_s: float,
    poll_s: float,
) -> dict[str, Any]:
    """File a request, wait for the answers, load the weights; return an answer.

    Raises:
        PeerError: no answer in time, answers that differ, weights that don't fit their hash.
        ConfigError: the run has other options or tensors than `parts`.
    """
    until = time.monotonic() + timeout_s
    number = store.add(_COUNT, 1)
    answers = _answers(store, number, parts[0].roster, until, poll_s)
    first = answers[0]
    for other in answers[1:]:
        if any(other[k] != first[k] for k in _COMPARED):
            raise PeerError(f"replicas {first['in']} answer differently: {first} and {other}")
    own = _view(parts)
    for key, what in (("config", "options"), ("table", "tensors")):
        if own[key] != first[key]:
            raise ConfigError(f"replica {replica} has other {what} than the run it wants to join")
    for part, expected in zip(parts, first["theta"], strict=True):
        _load(store, number, part, expected)
        part.round, part.commits = first["round"], first["commits"]
    return first


def _answers(
    store: Store, number: int, roster: Sequence[int], until: float, poll_s: float
) -> list[dict[str, Any]]:
    """Return two answers, or the one of the only replica, once the weights are there too."""
    while time.monotonic() < until:
        keys = [f"want/{number}/answer{r}" for r in roster]
        found = [json.loads(store.get(k)) for k in keys if store.check([k])]
        if found and len(found) >= min(2, len(found[0]["in"])):
            lowest = f"want/{number}/answer{min(found[0]['in'])}"
            if store.check([lowest]):  # written after the weights
                return found
        time.sleep(poll_s)
    raise PeerError("no replica of the run answered the request to join in time")


@torch.no_grad()
def _load(store: Store, number: int, part: Partition, expected: str) -> None:
    key = f"want/{number}/theta{part.stage}"
    data = get_bytes(store, key)
    delete_bytes(store, key)  # nobody else needs so large a value
    if data is None or hashlib.sha256(data).hexdigest() != expected:
        raise PeerError(f"the weights of stage {part.stage} are missing or do not fit their hash")
    flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
    at = 0
    for name, x in part.theta.items():
        x.copy_(flat[at : at + x.numel()].view(x.shape))
        part.residual[name].zero_()
        at += x.numel()


def _view(parts: Sequence[Partition]) -> dict[str, Any]:
    return {
        "round": parts[0].round,
        "commits": parts[0].commits,
        "config": [p.options.config_hash(p.extra).hex() for p in parts],
        "table": [p.table.digest.hex() for p in parts],
        "theta": [p.fingerprint().hex() for p in parts],
    }
