"""Small models and one gradient-driven step that ECO's tests share."""

import threading

import torch
from torch import nn

from thinwire import eco


class Matrix(nn.Module):
    """One weight inside a container, as in a block."""

    def __init__(self, weight):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(weight.shape[1], weight.shape[0], bias=False)])
        with torch.no_grad():
            self.layers[0].weight.copy_(weight)

    @property
    def weight(self):
        return self.layers[0].weight


# In-process ranks share torch's default generator.
_SEEDING = threading.Lock()


def quantized(weight, fmt="fp8_e4m3", **kwargs):
    model = Matrix(weight)
    eco.quantize_(model, fmt, **kwargs)
    return model


def mlp(seed=0, bias=True):
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 24, bias=bias), nn.GELU(), nn.Linear(24, 7, bias=False))


def parts(model):
    """Return copies of every plain tensor of the state dict."""
    state = eco.plain_state_dict(model.state_dict())
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key]
        assert equal, key
