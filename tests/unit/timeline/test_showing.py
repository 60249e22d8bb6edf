"""What is shown of a timeline: tables, trace, picture, and the command that writes them."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_hiertrain.cli import main
from lightning_hiertrain.planning import plan
from lightning_hiertrain.timeline import Timeline, Transfer
from lightning_hiertrain.timeline.predicted import predicted_step
from lightning_hiertrain.timeline.report import timeline_report
from lightning_hiertrain.timeline.summary import time_of_tiers, united
from lightning_hiertrain.timeline.trace import trace_events
from tests.unit.planning.instances import random_profile
from tests.unit.timeline.notes import timeline


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file with a prediction, of another profile."""
    profile = random_profile(2, num_layers=4)
    schedule = plan(profile, batch_size=16, policy="all-edge")
    made = replace(
        timeline(),
        profile=profile,
        tiers=("device", "edge", "cloud"),
        links=(("device", "edge"), ("edge", "cloud")),
        schedule=schedule,
        predicted=predicted_step(profile, schedule, overlap=True),
    )
    path = tmp_path / "timeline.json"
    made.to_json(path)
    return path


def test_a_file_holds_all_of_a_timeline(full: Path) -> None:
    first = Timeline.from_json(full)
    first.to_json(full)
    assert Timeline.from_json(full) == first
    assert first.predicted is not None
    assert first.predicted.transfers
    assert first.profile == random_profile(2, num_layers=4)


def test_tables_say_where_the_time_went_and_add_up() -> None:
    made = timeline()
    text = timeline_report(made, made.steps)
    assert text.startswith("LeNet5, training step 1: 10 s")
    assert re.search(r"waiting for link device>edge +- +1.5 s +15.0%", text)
    assert re.search(r"waiting for edge +4.5 s +45.0%", text)
    assert re.search(r"\nstep +10 s +100.0% +10 s +100.0%", text)
    assert re.search(r"device>edge +4 kB +1.5 s +15.0% +21.33 kbit/s", text)
    assert "to within edge 1 ms" in text
    for causes in time_of_tiers(made, made.steps).values():
        assert sum(causes.values()) == pytest.approx(10.0)


def test_time_without_any_span_counts_as_other() -> None:
    made = timeline()
    bare = replace(made, spans=tuple(span for span in made.spans if span.tier == "edge"))
    assert time_of_tiers(bare, bare.steps)["device"] == {"other": 10.0}


def test_prediction_is_compared_phase_by_phase(full: Path) -> None:
    made = Timeline.from_json(full)
    text = timeline_report(made, made.steps)
    for name in ("forward", "loss", "backward", "update", "step", "edge computing"):
        assert re.search(rf"\n{name} +\S+ m?s +\S+ m?u?s", text), name
    assert "measured / predicted" in text


def test_trace_has_what_viewers_need(full: Path) -> None:
    events = trace_events(Timeline.from_json(full))
    assert json.loads(json.dumps(events)) == events
    rows: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= event.keys()
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for before, after in pairwise(row):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.01, (before, after)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"steps", "tiers", "links", "predicted tiers", "predicted links"}
    phases = {e["name"]: e for e in events if e.get("cat") == "phase"}
    forward = phases["forward"]
    assert (forward["ts"], forward["dur"]) == (0, 4.5e6)


def test_transfers_at_the_same_time_get_rows_of_their_own() -> None:
    made = timeline()
    both = tuple(
        Transfer(source="device", target="edge", queued=1, arrived=2, num_bytes=1, what="weights")
        for _ in range(2)
    )
    events = trace_events(replace(made, transfers=both))
    rows = {event["tid"] for event in events if event.get("cat") == "weights"}
    assert len(rows) == 2


def test_command_prints_and_writes_trace_and_picture(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    status = main(["timeline", str(full), "--trace", str(trace), "--plot", str(picture)])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    assert "waiting for link device>edge" in captured.out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_picture_needs_no_prediction(tmp_path: Path) -> None:
    path, picture = tmp_path / "timeline.json", tmp_path / "picture.svg"
    timeline().to_json(path)
    assert main(["timeline", str(path), "--plot", str(picture)]) == 0
    words = picture.read_text()
    assert "measured, step 1: 10 s" in words or "<svg" in words


def test_another_profile_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = tmp_path / "timeline.json", tmp_path / "profile.json"
    timeline().to_json(path)
    random_profile(3, num_layers=4).to_json(profile)
    assert main(["timeline", str(path), "--profile", str(profile)]) == 0
    assert ", predicted " in capsys.readouterr().out


def wrong_files(folder: Path) -> dict[str, str]:
    good = timeline().to_dict()
    files = {
        "no JSON": "{",
        "a list": "[]",
        "another format": json.dumps({**good, "format": 7}),
        "a schedule": json.dumps(good["schedule"]),
        "no steps": json.dumps({**good, "steps": []}),
        "a span of nobody": json.dumps({**good, "spans": [{**good["spans"][0], "tier": "moon"}]}),
        "a span that says more": json.dumps({**good, "spans": [{**good["spans"][0], "x": 1}]}),
        "times that are words": json.dumps({**good, "spans": [{**good["spans"][0], "end": "x"}]}),
        "infinite times": json.dumps(good).replace('"end": 10.0', '"end": Infinity'),
        "links to nowhere": json.dumps({**good, "links": [["device", "moon"]]}),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


def test_wrong_files_end_with_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*wrong_files(tmp_path), "missing"):
        status = main(["timeline", str(tmp_path / name)])
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, ""), name
        assert re.fullmatch(r"hiertrain: error: .+\n", captured.err), name


def test_a_step_that_was_not_recorded_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    timeline().to_json(path)
    assert main(["timeline", str(path), "--step", "7"]) == 2
    assert "step 7 was not recorded" in capsys.readouterr().err
    assert main(["timeline", str(path), "--step", "1"]) == 0


def test_a_missing_matplotlib_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timeline.json"
    timeline().to_json(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    assert re.fullmatch(
        r"hiertrain: error: .*matplotlib.*pip install matplotlib\n", capsys.readouterr().err
    )


def test_stretches_of_time_are_united() -> None:
    assert united([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
