"""The ledger's sums, formulas and the contract that a requested compression happened."""

import pytest

from thinwire.comm import Ledger
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.errors import ConfigError, ContractError


def test_formulas_count_what_one_rank_sends():
    assert [all_gather_sent(100, r) for r in (1, 2, 4)] == [0, 100, 300]
    assert [reduce_scatter_sent(100, r) for r in (1, 2, 4)] == [0, 100, 300]
    assert [all_reduce_sent(400, r) for r in (1, 2, 4)] == [0, 400, 600]
    assert all_reduce_sent(1, 3) == 2  # 2*1*2/3 rounded up: a byte is a byte


def test_totals_ratios_and_steps():
    ledger = Ledger()
    ledger.book("weights", dense_bytes=1000, wire_bytes=300, exempt_bytes=100)
    assert ledger.end_step() == {"weights": 300}
    ledger.book("weights", dense_bytes=1000, wire_bytes=300, exempt_bytes=100)
    ledger.book("scalars", dense_bytes=8, wire_bytes=8)
    assert ledger.end_step() == {"weights": 300, "scalars": 8}
    assert ledger.end_step() == {}
    weights = ledger["weights"]
    assert (weights.calls, weights.dense_bytes, weights.wire_bytes) == (2, 2000, 600)
    assert weights.ratio == 2000 / 600
    assert weights.compressed_ratio == 1800 / 400
    assert set(ledger.to_dict()) == {"weights", "scalars"}


def test_check_passes_fails_and_says_why():
    ledger = Ledger()
    ledger.expect("weights", num_ranks=2)
    with pytest.raises(ContractError, match="carried no message"):
        ledger.check()
    ledger.book("weights", dense_bytes=100, wire_bytes=100)
    with pytest.raises(ContractError, match="sent 100 bytes for 100 dense bytes"):
        ledger.check()
    ledger.book("weights", dense_bytes=100, wire_bytes=10)
    assert "weights: 110 bytes in 2 calls" in ledger.check()


def test_exempt_bytes_do_not_count_as_compression():
    ledger = Ledger()
    ledger.expect("gradients", num_ranks=2)
    ledger.book("gradients", dense_bytes=100, wire_bytes=100, exempt_bytes=100)
    with pytest.raises(ContractError, match="100 more were exempt"):
        ledger.check()


def test_saved_totals_continue():
    ledger = Ledger()
    ledger.book("tensor", dense_bytes=10, wire_bytes=5)
    again = Ledger()
    again.load_totals(ledger.to_dict())
    again.book("tensor", dense_bytes=10, wire_bytes=5)
    assert again["tensor"].wire_bytes == 10
    assert again.end_step() == {"tensor": 5}


def test_timing_only_when_asked():
    for timing in (False, True):
        ledger = Ledger(timing=timing)
        with ledger.timed("weights", "encode_s"):
            sum(range(1000))
        assert (ledger["weights"].encode_s > 0) == timing


def test_unknown_links_are_refused():
    with pytest.raises(ConfigError, match="choose one of weights"):
        Ledger().book("wieghts", dense_bytes=1, wire_bytes=1)
