"""The link lab: rates that hold, nothing left behind, figures that add up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire.lab import rounds
from thinwire.lab.arms import parse_arm
from thinwire.lab.lab import Plan, summarise
from thinwire.lab.links import parse_rate, shaped_links

TOOLS = ("ip", "tc", "nsenter", "setpriv")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
    reason="namespaces need root, iproute2 and util-linux",
)

SERVER = """
import socket, time
server = socket.create_server(("10.77.0.1", 5000))
print("ready", flush=True)
peer, _ = server.accept()
peer.recv(1)
start, count = time.monotonic(), 0
while data := peer.recv(1 << 20):
    count += len(data)
print(8 * count / (time.monotonic() - start))
"""
CLIENT = """
import socket
peer = socket.create_connection(("10.77.0.1", 5000))
peer.sendall(bytes(4_000_000))
"""
HOLD = """
import time
from thinwire.lab.links import shaped_links
with shaped_links([1e8, 1e8]) as links:
    print(*links.holders, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("2000kbit", 2e6), ("none", 0.0)]
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "-1mbit", "1kbit", "1000gbit", "nan"])
def test_bad_rates(text):
    with pytest.raises(ConfigError, match="--rate"):
        parse_rate(text)


def interfaces():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


@needs_root
def test_links_have_their_rate_and_leave_nothing_behind():
    before = interfaces()
    with shaped_links([4e7, 4e7]) as links:
        assert interfaces() == before
        run = [*links.prefix(0), sys.executable, "-c", SERVER]
        server = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        subprocess.run([*links.prefix(1), sys.executable, "-c", CLIENT], check=True, timeout=60)
        # TCP/IP headers take 3 to 6 %; the bucket passes its burst at once.
        assert 3.2e7 < float(server.stdout.readline()) < 4.6e7
        server.wait(10)
    assert interfaces() == before
    assert not any(alive(pid) for pid in links.holders)


@needs_root
def test_a_killed_lab_leaves_nothing_behind():
    """SIGKILL runs no clean-up code: namespaces must go with their processes."""
    lab = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    holders = [int(pid) for pid in lab.stdout.readline().split()]
    assert len(holders) == 2
    assert all(alive(pid) for pid in holders)
    lab.send_signal(signal.SIGKILL)
    lab.wait(10)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in holders) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in holders)


def test_another_user_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    args = ["lab", "dense-fsdp", "--rate", "1gbit", "--out", str(tmp_path)]
    assert main(args) == 2
    assert capsys.readouterr().err == (
        "thinwire: the lab makes network namespaces, which needs root\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "the following arguments are required: --rate"),
        (["--rate", "1gbit,1gbit,1gbit"], "3 rates for --nproc 2 ranks"),
        (["--rate", "1gbit", "--nproc", "1"], "--nproc must be at least 2"),
        (["--rate", "1gbit", "--compute-scale", "0.5"], "--compute-scale must be at least 1"),
        (["--rate", "1gbit", "dense-fsdp"], "two arms are the same"),
        (["--rate", "1gbit", "hetero"], "names 3 ranks, but 2 run: change --nproc"),
        (["--rate", "1gbit", "sparseloco"], "set --steps to a multiple"),
        (["--rate", "1gbit", "dense-fsdq"], "did you mean 'dense-fsdp'"),
    ],
)
def test_bad_arguments(capsys, changes, message):
    assert main(["lab", "dense-fsdp", *changes]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def answer(step_s, ledger, interface):
    """One rank's rounds of one arm: two rounds of three steps."""
    one = {"step_s": step_s, "ledger_bytes": 3 * ledger, "interface_bytes": 3 * interface}
    return [one, one]


def test_figures_by_hand():
    arms = (parse_arm("dense-fsdp"), parse_arm("static-6bit"))
    plan = Plan(arms, 2, (8e6, 8e6), 1, 2, 3, 1.0, (1, 1))
    # Without a limit: 0.1 s and 0.15 s. At 1 MB/s: 4 MB and 1 MB a step, the slower rank counts.
    free = [[answer([0.1] * 3, 4e6, 4e6), answer([0.15] * 3, 1e6, 1e6)]] * 2
    fast = [answer([4.0, 4.1, 4.2], 4e6, 4.2e6), answer([1.0, 1.0, 1.0], 1e6, 1e6)]
    slow = [answer([4.1, 4.0, 4.4], 4e6, 4.2e6), answer([1.1, 1.2, 1.5], 1e6, 1.1e6)]
    dense, quantized = summarise(plan, free, [fast, slow], 0.0)
    assert dense["step_s_median"] == pytest.approx(4.1)
    assert dense["speedup"] == dense["ideal_speedup"] == 1.0
    assert dense["interface_ratio"] == pytest.approx(1.05)
    assert quantized["ledger_bytes"] == pytest.approx(1e6)
    assert quantized["interface_ratio"] == pytest.approx(1.05)
    assert quantized["speedup"] == pytest.approx(4.1 / 1.2)
    assert quantized["ideal_speedup"] == pytest.approx((0.1 + 4) / (0.1 + 1))
    assert quantized["unshaped_cost"] == pytest.approx(1.5)


def test_an_exchange_every_third_step_counts_a_third():
    arms = (parse_arm("dense-ddp"), parse_arm("sparseloco:sync_every=3"))
    plan = Plan(arms, 2, (8e6, 8e6), 1, 2, 3, 1.0, (1, 3))
    free = [[answer([0.1] * 3, 4e6, 4e6), answer([0.1] * 3, 1e6, 1e6)]] * 2
    # A step of warm-up, so the second of a turn is the third: it exchanges.
    outer = answer([0.1, 1.6, 0.2], 1e6, 1e6)
    _, sparse = summarise(plan, free, [[answer([4.1] * 3, 4e6, 4e6), outer]] * 2, 0.0)
    assert sparse["step_s_median"] == pytest.approx((2 * 0.15 + 1.6) / 3)
    assert sparse["speedup"] == pytest.approx(4.1 / ((2 * 0.15 + 1.6) / 3))


def test_bytes_on_their_way_are_waited_for(monkeypatch):
    counters, met = iter([500, 900, 900, 950]), []
    monkeypatch.setattr(rounds, "sent_bytes", lambda interface: next(counters))
    monkeypatch.setattr(rounds, "QUIET_S", 0.0)
    monkeypatch.setattr(rounds.dist, "barrier", lambda: met.append(1))
    assert rounds._settle("link") == 900
    assert len(met) == 2


@needs_root
@pytest.mark.processes
def test_lab_trains_over_shaped_links(capsys, tmp_path):
    small = "model.dim=64", "model.num_layers=1", "model.hidden_dim=128", "compute.threads=1"
    settings = [word for setting in small for word in ("--set", setting)]
    arms = ["dense-fsdp", "static-6bit:min_shard_numel=64"]
    args = ["--rate", "20mbit", "--rounds", "2", "--steps", "3", "--out", str(tmp_path)]
    assert main(["lab", *arms, *args, *settings]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "lab.json").read_text())
    assert report["rate_bits_per_s"] == [2e7, 2e7]
    dense, quantized = report["arms"]
    for row in (dense, quantized):
        assert row["recipe"] in out
        assert row["step_s_median"] > 0
        # TCP, IP and Ethernet headers, gloo's own and two barriers a round; tiny messages here.
        assert 1.0 <= row["interface_ratio"] < 1.25
        # No step is faster than its own bytes allow; the bucket passes its burst at once.
        assert row["step_s_median"] > 0.8 * 8 * (row["ledger_bytes"] - 65536) / 2e7
    assert quantized["ledger_bytes"] < dense["ledger_bytes"]
