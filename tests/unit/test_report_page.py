import json
import re
from html.parser import HTMLParser

import pytest
from report_fixture import make_run, metrics_lines, run_record

from thinwire import cli
from thinwire.errors import RunError
from thinwire.report import ReportConfig, report, write

VOID = {"meta", "br", "col"}


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes, cell rows and the data of charts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.links, self.rows, self.charts, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("href", "src", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if tags and tags[-1] == "script" and self.open[-1][1].get("type") == "application/json":
            self.charts.append(json.loads(data))
        elif "script" not in tags and "style" not in tags:
            self.text.append(data)
        if "td" in tags or "th" in tags:
            self.rows[-1][-1] += data


def page(*runs, out):
    return Page(write(list(runs), out).read_text())


def test_one_run_shows_the_numbers_of_its_files(tmp_path):
    found = page(make_run(tmp_path), out=tmp_path / "deep" / "page.html")
    text = " ".join(found.text)
    for part in ("static-6bit", "2.250", "3.246", "2.125", "1.96x", "3 min 05 s", "421 ms"):
        assert part in text, part
    for row in (
        "weights | 40 | 4.00 MB | 1.60 MB | 100 kB | 2.50x | 2.60x | 250 ms",
        "gradients | 20 | 900 kB | 900 kB | 0 B | 1.00x | 1.00x | –",
        "all links | 60 | 4.90 MB | 2.50 MB | 100 kB | 1.96x | 2.00x | 250 ms",
    ):
        assert row.split(" | ") in found.rows
    assert ["weights", "1-D parameter", "2", "1.28 kB"] in found.rows
    assert ["head.bias", "weights", "1-D parameter", "1.02 kB"] in found.rows
    assert ["optimizer_bytes", "9.83 MB"] in found.rows
    assert ["torch", "2.13.0"] in found.rows
    assert "betas: [0.9, 0.95]" in "".join(found.text)


def test_loss_is_drawn_against_steps_and_running_bytes(tmp_path):
    found = page(make_run(tmp_path), out=tmp_path / "page.html")
    steps, sent = found.charts[:2]
    assert steps["lines"][0]["x"] == list(range(1, 21))
    assert sent["lines"][0]["x"] == [125_000 * step for step in range(1, 21)]
    assert steps["lines"][0]["y"] == pytest.approx([5.0 / s for s in range(1, 21)], rel=1e-4)
    assert sent["x"] == "bytes"


def test_every_further_number_gets_a_chart(tmp_path):
    lines = metrics_lines(bits=6.0, level={"a": 1, "b": 2}, comment="text", flag=True)
    found = page(make_run(tmp_path, lines=lines), out=tmp_path / "page.html")
    names = [[line["name"] for line in chart["lines"]] for chart in found.charts[2:]]
    assert names == [["lr"], ["step_s"], ["bits"], ["a", "b"], ["weights", "gradients"]]


def test_several_runs_stand_side_by_side(tmp_path):
    first = make_run(tmp_path, "one")
    second = make_run(tmp_path, "two", run_record(recipe="dense", config={"model": {"dim": 128}}))
    found = page(first, second, out=tmp_path / "page.html")
    assert found.rows[1][:7] == [
        "one",
        "static-6bit",
        "2.250",
        "3.246",
        "2.125",
        "2.50 MB",
        "1.96x",
    ]
    assert ["model.dim", "64", "128"] in found.rows
    assert [line["name"] for line in found.charts[0]["lines"]] == ["one", "two"]


def test_runs_with_equal_names_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / parent, "run") for parent in ("a", "b")]
    found = page(*runs, runs[0], out=tmp_path / "page.html")
    names = [line["name"] for line in found.charts[0]["lines"]]
    assert names == ["a/run (1)", "b/run", "a/run (3)"]


def test_nothing_is_fetched_and_everything_is_escaped(tmp_path):
    evil = "</script><script>alert('x')</script>&\"<b>"
    record = run_record(
        recipe=evil,
        config={evil: evil, "deep": {evil: [evil]}},
        versions={evil: evil},
        layer_errors={evil: 0.5},
        exemptions=[{"link": evil, "name": evil, "reason": evil, "nbytes": 1}],
        ledger={evil: {"calls": 1, "dense_bytes": 4, "wire_bytes": 2, "exempt_bytes": 0}},
    )
    lines = metrics_lines(**{evil: {evil: 1.0}})
    text = write([make_run(tmp_path, record=record, lines=lines)], tmp_path / "p.html").read_text()
    found = Page(text)
    assert found.links == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert text.count("<script") == len(found.charts) + 1
    assert "<script>alert" not in text
    assert "<b>" not in re.sub(r"<b>[^<]*</b>", "", text)
    assert [evil, "0.500"] in found.rows


def test_layer_errors_show_the_largest_first(tmp_path):
    errors = {f"layers.{i}": i / 1000 for i in range(1, 41)}
    found = page(
        make_run(tmp_path, record=run_record(layer_errors=errors)), out=tmp_path / "p.html"
    )
    rows = [row[0] for row in found.rows if row and row[0].startswith("layers.")]
    assert rows == [f"layers.{i}" for i in range(40, 28, -1)]
    assert "Largest 12 of 40; the median is 0.0205." in found.text


def test_non_finite_losses_leave_gaps(tmp_path):
    lines = metrics_lines(3)
    lines[1]["loss"] = float("nan")
    found = page(make_run(tmp_path, lines=lines), out=tmp_path / "p.html")
    assert found.charts[0]["lines"][0]["y"] == [5.0, None, pytest.approx(5 / 3, rel=1e-4)]


def test_a_run_on_one_rank_and_a_run_without_steps_have_pages(tmp_path):
    alone = [{"step": 1, "loss": 2.0, "wire": {}}]
    found = page(make_run(tmp_path, "a", run_record(ledger={}), alone), out=tmp_path / "p.html")
    assert len(found.charts) == 1
    assert any("Nothing was sent" in text for text in found.text)
    found = page(make_run(tmp_path, "b", run_record(result={}), []), out=tmp_path / "q.html")
    assert found.charts == []
    assert any("has not ended" in text for text in found.text)


def test_page_goes_beside_the_run_unless_told_otherwise(tmp_path):
    first, second = make_run(tmp_path, "a"), make_run(tmp_path, "b")
    assert report(ReportConfig(runs=(first,))) == first / "report.html"
    assert report(ReportConfig(runs=(first, second))) == tmp_path / "report.html"
    assert report(ReportConfig(runs=(first,), out=tmp_path / "x.html")) == tmp_path / "x.html"
    with pytest.raises(RunError, match="no run given"):
        report(ReportConfig(runs=()))


def test_a_page_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write the page"):
        write([make_run(tmp_path)], tmp_path / "file" / "page.html")


def test_what_the_run_ran_on_and_what_each_rank_sent(tmp_path):
    first = {"pipeline": {"calls": 1, "dense_bytes": 8000, "wire_bytes": 2000}}
    other = {"gradients": {"calls": 1, "dense_bytes": 500, "wire_bytes": 500}}
    record = run_record(
        num_ranks=2,
        mesh={"pp": 2, "dp_shard": 1},
        device="cpu",
        data={"source": "stdlib"},
        ledger=first,
        ledger_ranks=[first, first | other],
    )
    found = page(make_run(tmp_path, record=record), out=tmp_path / "p.html")
    assert "run · 2 ranks (pp 2) · cpu · data stdlib" in found.text
    assert ["0", "2.00 kB", "0 B", "2.00 kB"] in found.rows
    assert ["1", "2.00 kB", "500 B", "2.50 kB"] in found.rows


def test_command_line(tmp_path, capsys):
    run = make_run(tmp_path)
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    for bad in (["report"], ["report", str(tmp_path / "none")], ["report", str(run), "--foo"]):
        assert cli.main(bad) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_outer_rounds_show_who_was_left_out(tmp_path):
    lines = metrics_lines(4)
    good = {"committed": True, "accepted": [0, 1], "left_out": {}, "tokens": {"0": 512, "1": 512}}
    lines[1]["outer"] = good
    lines[2]["outer"] = good | {
        "accepted": [0],
        "left_out": {"1": "no message"},
        "tokens": {"0": 9},
    }
    lines[3]["outer"] = {"committed": False, "why": "replicas disagree", "accepted": []}
    found = page(make_run(tmp_path, lines=lines), out=tmp_path / "page.html")
    rows = [" | ".join(row) for row in found.rows]
    assert any(row.startswith("0 | 2 | 0 | 521") for row in rows)
    assert any(row.startswith("1 | 1 | 1 | 512") and "no message (1x)" in row for row in rows)
    assert "2 rounds committed, 1 aborted: replicas disagree." in " ".join(found.text)
