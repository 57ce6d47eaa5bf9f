"""A Llama-style decoder whose full parameter names are the same whole, sharded, split or cut.

Shapes follow Hugging Face's Llama (weights [out, in], rotary halves), so that an export only
renames. Initial values depend on (seed, parameter name) alone: every layout starts equal.

Legend: `B` sequences, `T` tokens, `D` model width, `H` heads, `K` head width, `V` vocabulary,
`E` experts, `F` feed-forward width, `N` tokens of a batch.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire.train.config import Model

__all__ = ["Block", "Transformer", "build", "init_weights"]

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal attention with grouped key and value heads; heads are counted from local shapes."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.num_heads
        kv_dim = cfg.num_kv_heads * self.head_dim
        self.wq = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.wk = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.wo = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x_BTD: Tensor, *, rope: Tensor) -> Tensor:
        """Mix tokens; `rope` holds cosines and sines, [2, T, K/2]."""
        q, k, v = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = _rotate(q, rope), _rotate(k, rope)
        # Repeated heads instead of enable_gqa: that flag is slow or missing on some backends.
        repeats = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(repeats, dim=2) if repeats > 1 else t for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.hidden_dim, bias=False)
        self.w2 = nn.Linear(cfg.hidden_dim, cfg.dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply to each token."""
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Experts(nn.Module):
    """Top-k routed SwiGLU experts, their weights stacked.

    Stacked weights belong to their block's one FSDP group: an expert that no token of a rank
    chose is gathered and gets a zero gradient like any other, so ranks can't wait for each other.
    """

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        self.per_token = cfg.experts_per_token
        self.router = nn.Linear(cfg.dim, cfg.num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_dim, cfg.dim))
        self.w2 = nn.Parameter(torch.empty(cfg.num_experts, cfg.dim, cfg.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_dim, cfg.dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Send each token through its experts, weighted by the renormalized router softmax."""
        x_ND = x_BTD.flatten(0, 1)
        top = self.router(x_ND).softmax(-1, dtype=torch.float32).topk(self.per_token, dim=-1)
        weight_NE = top.values / top.values.sum(-1, keepdim=True)
        out_ND = torch.zeros_like(x_ND)
        for expert in range(self.w1.shape[0]):
            token, slot = torch.where(top.indices == expert)
            h = x_ND[token]
            h = F.silu(F.linear(h, self.w1[expert])) * F.linear(h, self.w3[expert])
            h = F.linear(h, self.w2[expert]) * weight_NE[token, slot, None].to(h.dtype)
            out_ND = out_ND.index_add(0, token, h)
        return out_ND.view_as(x_BTD)


class Block(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, cfg: Model, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = Experts(cfg) if cfg.num_experts else FeedForward(cfg)

    def forward(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Apply the block, keeping no inner activation if it recomputes."""
        # Inside the block, so that FSDP's hooks (on the block) lie outside the recomputation.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._apply_block, x_BTD, rope, use_reentrant=False)
        return self._apply_block(x_BTD, rope)

    def _apply_block(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), rope=rope)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nn.Module):
    """The whole decoder, or the consecutive blocks of one pipeline stage.

    Args:
        cfg: sizes.
        seq_len_tokens: longest sequence, for the rotary table.
        stage: index of the pipeline stage.
        num_stages: stages; the first holds the embedding, the last the final norm and the head.
        recompute: checkpoint the activations of each block.
    """

    rope: Tensor

    def __init__(
        self,
        cfg: Model,
        seq_len_tokens: int,
        *,
        stage: int = 0,
        num_stages: int = 1,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        cuts = [round(i * cfg.num_layers / num_stages) for i in range(num_stages + 1)]
        if self.is_first:
            self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleDict(
            {str(i): Block(cfg, recompute) for i in range(cuts[stage], cuts[stage + 1])}
        )
        if self.is_last:
            self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
            if not cfg.tie_embeddings:
                self.head = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        self.tied = cfg.tie_embeddings
        table = _rope_table(cfg.dim // cfg.num_heads, seq_len_tokens, cfg.rope_theta)
        self.register_buffer("rope", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, T], or the stage before's [B, T, D], to activations or logits."""
        if self.is_first:
            x = self.embed(x)
        rope = self.rope[:, : x.shape[1]]
        for block in self.layers.values():
            x = block(x, rope)
        if not self.is_last:
            return x
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.tied else self.head(x)


def build(
    cfg: Model, seq_len_tokens: int, seed: int, *, stage: int = 0, num_stages: int = 1,
    recompute: bool = False,
) -> Transformer:  # fmt: skip
    """Return a model or stage with its initial weights (see `Transformer`)."""
    model = Transformer(
        cfg, seq_len_tokens, stage=stage, num_stages=num_stages, recompute=recompute
    )
    init_weights(model, seed, cfg.num_layers)
    return model


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, num_layers: int) -> None:
    """Fill parameters from (seed, name): norms with 1, matrices normal, those that add to the
    residual stream narrower by sqrt(2 * layers).
    """  # noqa: D205
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        adds = name.endswith((".wo.weight", ".w2.weight", ".w2"))
        std = INIT_STD / math.sqrt(2 * num_layers) if adds else INIT_STD
        p.copy_(torch.randn(p.shape, generator=generator) * std)


def _rope_table(head_dim: int, seq_len_tokens: int, theta: float) -> Tensor:
    """Return cosines and sines of position * theta^(-2i/K), float32 [2, T, K/2]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TK = torch.outer(torch.arange(seq_len_tokens, dtype=torch.float32), frequency)
    return torch.stack((angle_TK.cos(), angle_TK.sin()))


def _rotate(x_BTHK: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope[0][:, None, :], rope[1][:, None, :]
    a, b = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHK.dtype)
