import json

import pytest
from report_fixture import make_run, metrics_lines, run_record

from thinwire.errors import RunError
from thinwire.report.load import load_run


def test_a_cut_off_last_line_is_left_out_and_told(tmp_path):
    run = make_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    loaded = load_run(run)
    assert [line["step"] for line in loaded.metrics] == list(range(1, 21))
    assert loaded.notes == ["The last line of metrics.jsonl (line 21) was cut off and is left out."]


def test_steps_repeated_after_a_resume_count_once(tmp_path):
    again = [line | {"loss": 9.0} for line in metrics_lines()[15:]]
    loaded = load_run(make_run(tmp_path, lines=metrics_lines() + again))
    assert [line["step"] for line in loaded.metrics] == list(range(1, 21))
    assert [line["loss"] for line in loaded.metrics[15:]] == [9.0] * 5
    assert loaded.notes == ["5 steps were run twice (after a resume); the later ones are shown."]


def test_totals_and_ratio(tmp_path):
    loaded = load_run(make_run(tmp_path))
    assert loaded.total("wire_bytes") == 2_500_000
    assert loaded.ratio == pytest.approx(4_900_000 / 2_500_000)
    assert loaded.recipe == "static-6bit"


def broken(tmp_path, name, content):
    run = make_run(tmp_path)
    (run / name).write_bytes(content)
    return run


BROKEN = [
    ("run.json", b'{"config": {', "not valid JSON"),
    ("run.json", b"[1]", "holds a JSON list"),
    ("run.json", b"\xff\xfe\x00", "not UTF-8"),
    ("run.json", b'{"config": 3}', "key 'config' must be an object, got int"),
    ("run.json", b'{"ledger": {"weights": {"calls": "x"}}}', "ledger\\['weights'\\]"),
    ("run.json", b'{"exemptions": [{"name": "a"}]}', "exemptions\\[0\\]"),
    ("run.json", b'{"exemptions": {"a": 1}}', "must be a list"),
    ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "line 2"),
    ("metrics.jsonl", b'{"loss": 1}\n{"step": 3}\n', "line 1"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_files_are_one_line_errors(tmp_path, name, content, message):
    with pytest.raises(RunError, match=message) as caught:
        load_run(broken(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_directories_that_are_no_run(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RunError, match=r"no run\.json \(it is empty\)"):
        load_run(empty)
    with pytest.raises(RunError, match="does not exist"):
        load_run(tmp_path / "nowhere")
    run = make_run(tmp_path / "many", "inner")
    with pytest.raises(RunError, match=r"holds some: give .*inner"):
        load_run(tmp_path / "many")
    with pytest.raises(RunError, match="is a file"):
        load_run(run / "run.json")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics.jsonl does not exist"):
        load_run(run)


def test_non_finite_layer_errors_are_dropped(tmp_path):
    record = json.loads(json.dumps(run_record(layer_errors={"a": 0.5, "b": float("nan")})))
    assert load_run(make_run(tmp_path, record=record)).layer_errors == {"a": 0.5}


def test_what_auto_chose_is_told(tmp_path):
    auto = {"chosen": "aquavit", "words": "chose aquavit: expected 0.5 s a step"}
    record = run_record(auto=auto | {"measured": {"over_expected": 1.254}})
    assert load_run(make_run(tmp_path, record=record)).notes == [
        "compress auto chose aquavit: expected 0.5 s a step; steps took 1.25 times what was "
        "expected."
    ]
    record = run_record(auto=auto | {"measured": {"over_expected": None}})
    notes = load_run(make_run(tmp_path, "b", record=record)).notes
    assert notes == ["compress auto chose aquavit: expected 0.5 s a step."]
