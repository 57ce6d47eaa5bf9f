import json

import pytest
from test_compare_summary import RUNS, trained
from test_report_page import Page

from thinwire.errors import RunError
from thinwire.lab.summary import summarise
from thinwire.report import write, write_compare


def comparison(folder, runs=RUNS, **changes):
    data = {
        "format": "thinwire.compare/1",
        "settings": {"steps": 4, "data": "stdlib", "nproc": 2, "seeds": [0, 1, 2], "margin": 0.05},
        **summarise(runs, margin=0.05),
        "failures": [],
        "versions": [{"torch": "2.13.0"}],
    } | changes
    path = folder / "compare.json"
    path.write_text(json.dumps(data))
    return path


def test_page_shows_the_table_and_three_charts(tmp_path):
    out = write_compare(comparison(tmp_path))
    assert out == tmp_path / "compare.html"
    found = Page(out.read_text())
    assert found.links == []
    six = "six | 3 | 2.1200 ± 0.0635 | +0.0200 | −0.0048 to +0.0448 | equivalent | 508 B | 1.98x"
    assert found.rows[2][:8] == six.split(" | ")
    assert ["six", "2.0100", "2.1200", "2.2300"] in found.rows
    assert [chart["label"] for chart in found.charts] == [
        "steps",
        "tokens",
        "bytes sent by one rank",
    ]
    assert found.charts[2]["lines"][0]["x"] == [1001, 2002, 3003, 4004]
    assert 'class="band"' in out.read_text()


def test_failures_and_mixed_versions_are_told(tmp_path):
    failure = {"arm": "<six>", "seed": 3, "message": "<b>disk</b> full", "log": "x"}
    versions = [{"torch": "2.12"}, {"torch": "2.13"}]
    text = write_compare(comparison(tmp_path, failures=[failure], versions=versions)).read_text()
    found = Page(text)
    assert "<six>, seed 3, failed: <b>disk</b> full" in found.text
    assert any("different versions" in part for part in found.text)
    assert ["torch", "2.12", "2.13"] in found.rows


def test_one_arm_or_one_seed_still_has_a_page(tmp_path):
    found = Page(write_compare(comparison(tmp_path, RUNS[:1])).read_text())
    assert any("Nothing to compare" in part for part in found.text)
    alone = [trained("a", 0, 2.0), trained("b", 0, 2.1)]
    text = write_compare(comparison(tmp_path, alone)).read_text()
    assert 'class="band"' not in text
    assert "gives no interval" in text


def test_report_recognises_a_comparison(tmp_path):
    comparison(tmp_path)
    page = write([tmp_path], tmp_path / "page.html")
    assert "six against dense" in page.read_text()


BROKEN = [
    ('{"format": "other"}', "is not a comparison"),
    ('{"format": "thinwire.compare/1"}', "lacks a part"),
    ("{", "not valid JSON"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_comparisons(tmp_path, text, message):
    path = tmp_path / "compare.json"
    path.write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        write_compare(path)
    assert "\n" not in str(caught.value)
