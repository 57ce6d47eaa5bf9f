"""Ranks that several commands started: do they read the same settings and the same text?

One rank's own `--systems.outer.sync-every`, say, would end the run in the middle, with a peer that
is waited for in vain; another learning rate would never be noticed.
"""

import json
from typing import Any

import torch.distributed as dist

from thinwire.errors import ConfigError, DataError
from thinwire.train.config import Config
from thinwire.train.parse import flat_settings, to_dict
from thinwire.train.sources import Corpus, load_corpus

__all__ = ["load_alike"]

# Where this machine keeps things, and how it computes: may differ between ranks. That they read
# the same text is told by its hash.
_OWN = ("recipe", "out", "init", "tensorboard", "data.source", "compute.device", "compute.threads")


def load_alike(config: Config) -> Corpus:
    """Return the text of the run, after all ranks have compared settings and text; collective.

    Raises:
        ConfigError: ranks were started with different settings; names the first of them.
        DataError: a rank cannot read its text, or reads another one.
    """
    corpus, failure = None, ""
    try:
        corpus = load_corpus(config.data.source)
    except DataError as error:
        failure = str(error)
    settings = {k: json.dumps(v) for k, v in flat_settings(to_dict(config)).items()}
    own = {k: v for k, v in settings.items() if k not in _OWN}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (own, failure, "" if corpus is None else corpus.sha256))
    _compare_settings([f[0] for f in found])
    for rank, (_, text, _digest) in enumerate(found):
        if text:
            raise DataError(text if failure else f"rank {rank}: {text}")
    for rank, (_, _, digest) in enumerate(found):
        if digest != found[0][2]:
            raise DataError(
                f"data.source holds another text on rank {rank} than on rank 0: give all ranks "
                "the same files"
            )
    assert corpus is not None
    return corpus


def _compare_settings(ranks: list[dict[str, str]]) -> None:
    first = ranks[0]
    for rank, settings in enumerate(ranks):
        for key, value in settings.items():
            if first.get(key) != value:
                raise ConfigError(
                    f"{key} is {first.get(key)} on rank 0 and {value} on rank {rank}: start all "
                    "ranks with the same settings"
                )
