"""Boundaries in one process: losslessness, constraint, bytes of every message, refusals."""

import struct

import pytest
import torch
from torch import nn

from thinwire.comm import Ledger
from thinwire.errors import CheckpointError, ConfigError, ContractError, WireError
from thinwire.pipeline import Basis, Constraint, FixedRows, Link, find_writes, wrap
from thinwire.pipeline.ids import Header, pack_ids, unpack_ids
from thinwire.testing.ranks import run_ranks
from thinwire.train.config import Model
from thinwire.train.model import build
from thinwire.train.passes import token_loss

CFG = Model(dim=64, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=96, vocab_size=300)
KEPT = ("wo.weight", "w2.weight", "embed.weight")  # gradients equal after projection alone


def cut(cfg=CFG, stages=4, seed=1, dtype=torch.float64):
    return [build(cfg, 32, seed, stage=i, num_stages=stages).to(dtype) for i in range(stages)]


def batch(shape=(3, 10), vocab=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, shape, generator=generator) for _ in range(2)]


def chained(basis, cfg=CFG, stages=4, dtype=torch.float64, **settings):
    """Return wrapped stages whose boundaries are all in this process."""
    modules = cut(cfg, stages, dtype=dtype)
    settings = {"wire": "fp64", "activations": dtype, **settings}
    link = Link(basis, num_stages=stages, **settings)
    link.share(modules[0].embed.weight)
    return link, [link.wrap(module, i) for i, module in enumerate(modules)]


def through(stages, ids, **kwargs):
    out = stages[0](ids)
    for stage in stages[1:]:
        out = stage(*(out if isinstance(out, tuple) else (out,)), **kwargs)
    return out


def whole_of(stages, cfg=CFG):
    model = build(cfg, 32, 1).to(next(stages[0].parameters()).dtype)
    state = {k: v for stage in stages for k, v in stage.module.state_dict().items()}
    model.load_state_dict(state)
    return model


def off(x, basis):
    return ((x - basis.keep_rows(x)).norm() / x.norm()).item()


@pytest.mark.parametrize("kind", ["random", "coord"])
def test_constrained_boundaries_lose_nothing(kind):
    """Spec 7.1: loss equal, gradients to 1e-12, those of W_o, W_2, T_S after projection."""
    basis = Basis(64, 8, seed=3, kind=kind, dtype=torch.float64)
    link, stages = chained(basis)
    model = whole_of(stages)
    x, y = batch()
    want = token_loss(model(x).double(), y)
    got = token_loss(through(stages, x).double(), y)
    assert abs(got.item() - want.item()) <= 1e-12
    want.backward()
    got.backward()
    grads = {n: p for s in stages for n, p in s.module.named_parameters()}
    assert grads.keys() == dict(model.named_parameters()).keys()
    constrained = {n for s in stages if s.constraint for n in s.constraint.names}
    assert constrained == {n for n in grads if n.endswith(KEPT) and not n.startswith("layers.3")}
    raw = {}
    for name, p in model.named_parameters():
        got_g, want_g = grads[name].grad, p.grad
        if name in constrained:
            raw[name] = ((got_g - want_g).norm() / want_g.norm()).item()
            keep = basis.keep_rows if name == "embed.weight" else basis.keep_columns
            got_g, want_g = keep(got_g), keep(want_g)
        assert (got_g - want_g).norm() <= 1e-12 * want_g.norm(), name
    # What the boundary drops is most of a raw gradient: the comparison above is not an empty one.
    assert all(0.7 < share < 1.0 for share in raw.values()), raw
    assert link.check_health() < 1e-12


def test_training_steps_stay_lossless():
    """AdamW leaves the subspace in each step; the hooks bring weights back."""
    basis = Basis(64, 8, seed=3, dtype=torch.float64)
    link, stages = chained(basis)
    optimizers = [torch.optim.AdamW(s.module.parameters(), lr=1e-2) for s in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        if stage.constraint is not None:
            stage.constraint.attach(optimizer)
    table = stages[0].tables.tokens.clone()
    for step in range(3):
        x, y = batch(seed=step)
        token_loss(through(stages, x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    x, y = batch(seed=9)
    with torch.no_grad():
        whole = whole_of(stages)(x)
        assert torch.allclose(through(stages, x), whole, rtol=0, atol=1e-12)
    assert link.check_health() < 1e-12
    assert max(s.constraint.leaked() for s in stages if s.constraint) < 1e-6
    moved = stages[0].module.embed.weight.detach() - table
    assert off(moved, basis) < 1e-12
    assert torch.equal(stages[0].tables.tokens, table)


def test_without_projection_after_steps_the_health_check_raises():
    link, stages = chained(Basis(64, 8), dtype=torch.float32, wire="bf16")
    optimizer = torch.optim.AdamW([p for s in stages for p in s.module.parameters()], lr=1e-2)
    x, y = batch()
    token_loss(through(stages, x), y).backward()
    assert link.check_health() < 1e-3
    optimizer.step()
    with torch.no_grad():
        through(stages, x)
    with pytest.raises(ContractError, match="off the subspace"):
        link.check_health()


def test_where_blocks_round_the_health_check_judges_the_weights():
    """Weights gathered in 2 bits write outside of the subspace, the trained ones lie in it."""
    link, stages = chained(Basis(64, 8), dtype=torch.float32, wire="bf16")
    link.noisy, constraint, (x, _) = True, stages[0].constraint, batch()
    noise = torch.Generator().manual_seed(0)
    kept = {name: p.detach().clone() for name, p in constraint.writes.items()}

    def run_rounded():
        with torch.no_grad():
            for p in constraint.writes.values():
                p.add_(torch.randn(p.shape, generator=noise), alpha=0.5 * p.std().item())
            through(stages, x)
            for name, p in constraint.writes.items():
                p.copy_(kept[name])

    run_rounded()
    assert link.check_health() > 1e-2
    kept["layers.0.attn.wo.weight"].add_(0.05)
    run_rounded()
    with pytest.raises(ContractError, match="of the output matrices of rank 0 lies off"):
        link.check_health()


def test_full_rank_loses_the_cast_alone():
    _, stages = chained(Basis(64, 64), dtype=torch.float32, wire="fp32", mode="lossy")
    x, _ = batch()
    with torch.no_grad():
        assert torch.allclose(through(stages, x), whole_of(stages)(x), atol=2e-5)


def test_lossy_boundaries_project_and_leave_weights_alone():
    basis = Basis(64, 8)
    link, stages = chained(basis, dtype=torch.float32, wire="fp32", mode="lossy")
    assert all(s.constraint is None for s in stages)
    assert torch.equal(stages[0].module.layers["0"].attn.wo.weight,
                       build(CFG, 32, 1).layers["0"].attn.wo.weight)  # fmt: skip
    x, _ = batch()
    with torch.no_grad():
        hidden = stages[0].module(x)
        _, z = stages[0](x)
    fixed = stages[0].tables(x)
    assert torch.allclose(z, (hidden - fixed) @ basis.matrix(z.device, z.dtype), atol=1e-6)
    assert 0.1 < link.check_health() < 1.0


def test_zero_stays_zero_and_nan_is_seen():
    link, stages = chained(Basis(64, 8), dtype=torch.float32, wire="bf16")
    x, _ = batch()
    with torch.no_grad():
        for p in (*stages[0].module.parameters(), stages[0].tables.tokens):
            p.zero_()
        _, z = stages[0](x)
    assert not z.any()
    assert link.check_health() == 0.0
    with torch.no_grad():
        stages[0].module.embed.weight[x[0, 0]] = torch.nan
        stages[0](x)
    with pytest.raises(ContractError):
        link.check_health()


# ------------------------------------------------------------------ basis and tables


@pytest.mark.parametrize("kind", ["random", "coord"])
def test_the_projection_is_idempotent_and_the_basis_orthonormal(kind):
    basis = Basis(96, 12, seed=5, kind=kind)
    u = basis.expand(torch.eye(12)).mT
    assert (u.double().mT @ u.double() - torch.eye(12)).abs().max() <= 1e-6
    w = torch.randn(96, 31, generator=torch.Generator().manual_seed(0))
    once = basis.keep_columns(w)
    assert torch.allclose(basis.keep_columns(once), once, atol=1e-6)
    assert torch.allclose(basis.keep_rows(w.mT), once.mT, atol=1e-6)
    assert torch.allclose(basis.keep_columns(w[:, 0]), once[:, 0], atol=1e-6)
    stacked = torch.stack((w, 2 * w))
    assert torch.allclose(basis.keep_columns(stacked)[1], 2 * once, atol=1e-6)


def test_coordinates_equal_a_random_basis_of_unit_vectors():
    coord = Basis(16, 5, kind="coord", dtype=torch.float64)
    units = Basis(16, 5, dtype=torch.float64)
    units.set_matrix(torch.eye(16, dtype=torch.float64)[:, :5])
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(coord.project(x), units.project(x))
    assert torch.equal(coord.keep_rows(x), units.keep_rows(x))
    assert torch.equal(coord.keep_columns(x.mT), units.keep_columns(x.mT))
    with pytest.raises(ConfigError, match="orthonormal"):
        units.set_matrix(torch.ones(16, 5))


def test_the_split_keeps_the_sum():
    basis = Basis(64, 8)
    embedding = torch.randn(300, 64, generator=torch.Generator().manual_seed(2))
    tables = FixedRows.of(basis, embedding)
    inside = basis.keep_rows(embedding)
    assert (inside + tables.tokens - embedding).abs().max() <= 1e-6
    assert basis.project(tables.tokens).abs().max() <= 1e-5
    changed = embedding + torch.randn(300, 64, generator=torch.Generator().manual_seed(3))
    tables.resplit(basis, changed)
    assert (basis.keep_rows(changed) + tables.tokens - changed).abs().max() <= 1e-6


def test_ranks_take_the_leaders_basis_and_settings_must_agree():
    def check(rank):
        group = torch.distributed.group.WORLD
        basis, ledger = Basis(32, 4, seed=rank), Ledger()
        basis.agree(group, ledger=ledger)
        x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
        assert torch.equal(basis.keep_rows(x), Basis(32, 4, seed=0).keep_rows(x))
        digests = [None] * 3
        torch.distributed.all_gather_object(digests, basis.digest)
        errors = []
        for other in (Basis(32, 4 + (rank == 2)), Basis(32, 4, version=1 + (rank == 1))):
            try:
                other.agree(group)
            except ConfigError as error:
                errors.append(str(error))
        try:
            Link(Basis(32, 4), num_stages=3, group=group, wire="bf16" if rank else "fp32")
        except ConfigError as error:
            errors.append(str(error))
        return digests, basis.digest, errors, ledger["scalars"].wire_bytes

    answers = run_ranks(3, check)
    for digests, own, errors, sent in answers:
        assert digests == [own] * 3
        assert own == Basis(32, 4, seed=0).digest != Basis(32, 4, seed=1).digest
        assert len(errors) == 3
        assert "on rank 2 of the pipeline" in errors[0]
        assert "pipeline ranks [1, 2] and rank 0 differ" in errors[2]
        assert sent == 2 * 64 + 32 * 4 * 4


def test_a_basis_comes_back_from_its_checkpoint():
    saved = Basis(32, 4, seed=1, version=7).state_dict()
    basis = Basis(32, 4, seed=2)
    basis.load_state_dict(saved)
    first = Basis(32, 4, seed=1)
    assert (basis.digest, basis.version) == (first.digest, 7)
    # Not U alone: products must round the same, which hangs on its layout in memory too.
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(basis.keep_rows(x), first.keep_rows(x))
    assert torch.equal(basis.keep_columns(x.mT), first.keep_columns(x.mT))
    saved["matrix"][0, 0] += 1
    with pytest.raises(CheckpointError, match="SHA-256"):
        Basis(32, 4).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="shape"):
        Basis(32, 5).load_state_dict(saved)


# ------------------------------------------------------------------ messages

# Spec section 3.3: bytes per token forward and backward.
TABLE = [
    (1024, {8: (258, 256), 16: (130, 128), 32: (66, 64), 100: (22, 20), 1000: (4, 2)}),
    (1536, {8: (386, 384), 16: (194, 192), 32: (98, 96), 100: (32, 30), 1000: (4, 2)}),
    (2048, {8: (514, 512), 16: (258, 256), 32: (130, 128), 100: (42, 40), 1000: (6, 4)}),
    (4096, {8: (1026, 1024), 16: (514, 512), 32: (258, 256), 100: (82, 80), 1000: (10, 8)}),
]


@pytest.mark.parametrize(
    ("dim", "ratio", "want"), [(d, r, w) for d, row in TABLE for r, w in row.items()]
)
def test_bytes_per_token(dim, ratio, want):
    link = Link(Basis(dim, Basis.rank_of(dim, ratio), kind="coord"), num_stages=2)
    link.share(torch.zeros(300, dim))
    stage = link.wrap(nn.Linear(1, 1), 1)
    forward, backward = stage.boundary.nbytes((4, 8))
    assert (forward - 16, backward) == (32 * want[0], 32 * want[1])


@pytest.mark.parametrize(("vocab", "width"), [(256, 2), (65_536, 2), (65_537, 4), (200_000, 4)])
def test_ids_survive(vocab, width):
    ids = torch.tensor([[0, 255, 256, 65_535], [65_536, 1, vocab // 2, vocab - 1]])
    ids = ids.clamp_max(vocab - 1)
    message = pack_ids(ids, vocab, Header(3, 9, 2**32 + 5))
    assert message.numel() == 16 + 8 * width
    assert bytes(message[:16].tolist()) == struct.pack("<4sIII", b"TWPB", 3, 9, 5)
    assert torch.equal(unpack_ids(message, (2, 4), vocab, Header(3, 9, 5)), ids)


@pytest.mark.parametrize(
    ("want", "shape", "match"),
    [
        (Header(2, 0, 0), (2, 4), "basis version 1"),
        (Header(1, 1, 0), (2, 4), "message 0 of round 1"),
        (Header(1, 0, 1), (2, 4), "stages ran apart"),
        (Header(1, 0, 0), (2, 5), "expected 36 bytes"),
    ],
)
def test_messages_that_do_not_fit_are_refused(want, shape, match):
    message = pack_ids(torch.zeros(2, 4, dtype=torch.int64), 300, Header(1, 0, 0))
    with pytest.raises(WireError, match=match):
        unpack_ids(message, shape, 300, want)
    message[0] = 0
    with pytest.raises(WireError, match="messages out of order"):
        unpack_ids(message, (2, 4), 300, Header(1, 0, 0))


def test_ids_outside_the_vocabulary_are_refused():
    message = pack_ids(torch.full((1, 1), 299), 300, Header(1, 0, 0))
    with pytest.raises(WireError, match="token id of 299"):
        unpack_ids(message, (1, 1), 299, Header(1, 0, 0))


def test_a_boundary_refuses_another_dtype_shape_or_basis():
    _, stages = chained(Basis(64, 8), dtype=torch.float32, wire="bf16")
    x, _ = batch()
    message, z = stages[0](x)
    for bad, match in [
        ((message, z.float()), "expects torch.bfloat16"),
        ((message, z[..., :7]), "one basis and micro-batch shape"),
        ((z,), "got 1 tensors"),
    ]:
        stages[1]._received = 0
        with pytest.raises(WireError, match=match):
            stages[1](*bad)
    stages[1]._received = 0
    stages[1].boundary.basis.version = 2  # one object here: change it after the message was made
    with pytest.raises(WireError, match="basis version 1"):
        stages[1](message, z)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_coefficients_and_their_gradients_are_coded_both_ways(wire):
    basis = Basis(64, 16)
    _, stages = chained(basis, stages=2, dtype=torch.float32, wire=wire)
    _, exact = chained(basis, stages=2, dtype=torch.float32, wire="fp32")
    x, y = batch((2, 8))
    for pair in (stages, exact):
        for stage in pair:
            stage.static_args(2, 8, 300)
        token_loss(through(pair, x), y).backward()
    error = {"bf16": 4e-3, "int8": 2e-2, "int4": 0.3}[wire]
    for got, want in zip(stages, exact, strict=True):
        for (name, p), q in zip(
            got.module.named_parameters(), want.module.parameters(), strict=True
        ):
            difference = (p.grad - q.grad).norm() / q.grad.norm()
            assert difference < error, (name, difference)
    gradient = stages[0].module.layers["0"].attn.wq.weight.grad
    assert not torch.equal(gradient, exact[0].module.layers["0"].attn.wq.weight.grad)


def test_the_ledger_books_both_ways_beside_the_dense_twin():
    ledger = Ledger()
    _, stages = chained(Basis(64, 16), stages=2, dtype=torch.float32, wire="bf16", ledger=ledger)
    x, y = batch((4, 32))
    token_loss(through(stages, x), y).backward()
    forward, backward = 4 * 32 * (2 * 16 + 2) + 16, 4 * 32 * 2 * 16
    assert (
        ledger["pipeline"].wire_bytes
        == forward + backward
        == sum(stages[1].boundary.nbytes((4, 32)))
    )
    assert ledger["pipeline"].dense_bytes == 2 * 4 * 32 * 64 * 4
    assert ledger["pipeline"].calls == 2


def test_local_ids_travel_not_and_must_be_given():
    ledger = Ledger()
    settings = {"dtype": torch.float32, "wire": "bf16"}
    _, stages = chained(Basis(64, 16), stages=2, ids="local", ledger=ledger, **settings)
    _, twin = chained(Basis(64, 16), stages=2, **settings)
    x, y = batch((4, 32))
    out = through(stages, x, tokens=x)
    assert torch.equal(out, through(twin, x))
    token_loss(out, y).backward()
    assert ledger["pipeline"].wire_bytes == 2 * 4 * 32 * 2 * 16
    with pytest.raises(ConfigError, match="tokens="):
        through(stages, x)


def test_without_fixed_rows_the_embedding_lies_in_the_subspace():
    link, stages = chained(Basis(64, 8, dtype=torch.float64), ids="none")
    assert off(stages[0].module.embed.weight.detach(), link.basis) < 1e-12
    x, _ = batch()
    with torch.no_grad():
        assert torch.allclose(through(stages, x), whole_of(stages)(x), atol=1e-12)


# ------------------------------------------------------------------ what a stage may contain


class Block(nn.Module):
    """A block with something behind its write."""

    def __init__(self, dim, behind, bias=False):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim, bias=bias)
        self.behind = behind

    def forward(self, x):
        return x + self.behind(self.down_proj(torch.tanh(self.up(self.norm(x)))))


class First(nn.Module):
    def __init__(self, behind, bias=False, dim=32, vocab=50):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(Block(dim, nn.Identity()), Block(dim, behind, bias))

    def forward(self, ids):
        return self.blocks(self.embed(ids))


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


def wrapped_first(behind, **kwargs):
    torch.manual_seed(0)
    first = First(behind, **kwargs)
    link = Link(Basis(32, 8), num_stages=2)
    link.share(first.embed.weight)
    return link.wrap(first, 0)


@pytest.mark.parametrize(
    "behind",
    [nn.RMSNorm(32), nn.LayerNorm(32), nn.LayerNorm(32, elementwise_affine=False), nn.Dropout(0.5),
     Scale(32)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_what_acts_on_channels_behind_a_write_is_named(behind):
    with pytest.raises(
        ConfigError, match=r"stage 0 leaves the subspace: module 'blocks\.1\.behind'"
    ):
        wrapped_first(behind)


def test_gain_free_post_norms_and_biases_are_fine():
    stage = wrapped_first(nn.RMSNorm(32, elementwise_affine=False), bias=True)
    assert "blocks.1.down_proj.bias" in stage.constraint.names
    bias = stage.module.blocks[1].down_proj.bias.detach()
    assert off(bias, stage.boundary.basis) < 1e-6


def test_a_write_that_no_pattern_names_is_found():
    torch.manual_seed(0)
    first = First(nn.Identity())
    first.extra = nn.Linear(32, 32)
    first.forward = lambda ids: first.blocks(first.embed(ids)) + first.extra(first.embed(ids))
    link = Link(Basis(32, 8), num_stages=2)
    link.share(first.embed.weight)
    with pytest.raises(ConfigError, match="missing in writes="):
        link.wrap(first, 0)


def test_frozen_writes_are_projected_too():
    torch.manual_seed(0)
    first = First(nn.Identity()).requires_grad_(False)
    link = Link(Basis(32, 8), num_stages=2)
    link.share(first.embed.weight)
    assert link.wrap(first, 0).constraint.leaked() < 1e-6


def test_set_up_errors_name_the_cause():
    module = cut(dtype=torch.float32)[0]
    for make, match in [
        (lambda: Basis(64, 65), "rank must be from 1 to dim=64"),
        (lambda: Basis(64, 8, kind="learned"), "kind must be one of"),
        (lambda: Link(Basis(64, 8), num_stages=2, mode="lossless"), "mode must be one of"),
        (lambda: Link(Basis(64, 8), num_stages=2, wire="int3"), "wire must be one of"),
        (lambda: Link(Basis(64, 8), num_stages=2).wrap(module, 0), "call Link.share"),
        (lambda: Link(Basis(64, 8), num_stages=2).share(None), "must share the embedding"),
        (lambda: find_writes(module, 64, ["*.q"]), "no parameter matches writes"),
        (lambda: find_writes(module, 64, ["*.w1.weight"]), "'layers.0.mlp.w1.weight'"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make()


def test_stacked_experts_are_projected_one_by_one():
    cfg = Model(dim=32, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=32, num_experts=2)
    module = build(cfg, 16, 0, stage=0, num_stages=2)
    link = Link(Basis(32, 4), num_stages=2)
    link.share(module.embed.weight)
    stage = link.wrap(module, 0)
    assert "layers.0.mlp.w2" in stage.constraint.names
    assert stage.constraint.leaked() < 1e-6


def test_blocks_after_the_last_boundary_stay_free():
    """V schedule: stages 1 and 2 share a rank, so boundary 1 is none; 0 and 2 are."""
    link = Link(Basis(64, 8), num_stages=4, owners=[0, 1, 1, 0])
    assert [link.is_constrained(i) for i in range(4)] == [True, True, True, False]
    assert [link._side(i) for i in range(4)] == ["wire", "local", "wire", "none"]
    assert Link(Basis(64, 8), num_stages=1).is_constrained(0)
    assert not Link(Basis(64, 8), num_stages=2, owners=[0, 0]).is_constrained(0)


# ------------------------------------------------------------------ top-k against the subspace


@pytest.mark.parametrize(
    ("dim", "rank", "off_want", "kept_want"), [(1024, 64, 0.70, 0.215), (64, 8, 0.55, 0.23)]
)
def test_top_k_leaves_the_subspace(dim, rank, off_want, kept_want):
    """Spec sections 2.7 and 7.4: why all must be projected again after an outer step."""
    basis = Basis(dim, rank, seed=1)
    w = basis.keep_columns(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))
    tiles = w.view(dim // 64, 64, dim // 64, 64).transpose(1, 2).reshape(-1, 4096)
    top = tiles.abs().topk(128, dim=1).indices
    kept = torch.zeros_like(tiles).scatter(1, top, tiles.gather(1, top))
    sent = kept.view(dim // 64, dim // 64, 64, 64).transpose(1, 2).reshape(dim, dim)
    share = (sent.square().sum() / w.square().sum()).item()
    outside = ((sent - basis.keep_columns(sent)).square().sum() / sent.square().sum()).item()
    assert share == pytest.approx(kept_want, abs=0.05)
    assert outside == pytest.approx(off_want, abs=0.05)


def test_an_anchor_is_the_projected_start():
    """Spec section 7.4: at zero inner steps a projected anchor reports exactly nothing."""
    basis = Basis(64, 8)
    module = cut(dtype=torch.float32)[0]
    synced = {n: p.detach().clone() for n, p in module.named_parameters()}
    constraint = Constraint(basis, find_writes(module, 64))
    constraint.project()
    for name, p in module.named_parameters():
        delta = constraint.anchor(name, synced[name]) - p.detach()
        assert not delta.any(), name
        naive = synced[name] - p.detach()
        if name in constraint.names:
            rest = synced[name] - basis.keep_columns(synced[name])
            assert naive.norm().item() == pytest.approx(rest.norm().item(), rel=1e-5)


def test_wrap_is_one_call_for_one_stage_per_rank():
    def check(rank):
        stage = wrap(modules[rank], index=rank, num_stages=2, basis=Basis(64, 8, seed=rank))
        return stage.tables.tokens, stage.boundary.basis.digest

    modules = cut(stages=2, dtype=torch.float32)
    want = FixedRows.of(Basis(64, 8), modules[0].embed.weight).tokens
    (tokens0, digest0), (tokens1, digest1) = run_ranks(2, check)
    assert torch.equal(tokens0, tokens1)
    assert torch.allclose(tokens0, want, atol=1e-7)
    assert digest0 == digest1
