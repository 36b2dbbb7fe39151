"""The report: every number of ours comes from a record, and nothing else does."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest
import synthetic

from forespark.bench.compare import summarize_folder
from forespark.record import append_jsonl, read_jsonl, write_json

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "plot"))

import claims  # noqa: E402
import report  # noqa: E402

RUN = {"fixed": {"K": 7}, "runs": [{"provenance": {"device": "cpu: made up x2"}}]}


def decode(folder):
    records = folder / "bench/decode"
    records.mkdir(parents=True)
    synthetic.write(records)
    write_json(records / "run.json", RUN)
    summarize_folder(records)
    return records


def scheduler(folder):
    records = folder / "bench/scheduler"
    records.mkdir(parents=True)
    head = {"schema": 1, "bench": "scheduler"}
    for decider, median_us in (("plan", 50.0), ("search", 9000.0)):
        time = {"kind": "time", "decider": decider, "n": 192, "K": 15, "round": 0}
        append_jsonl(records / "records.jsonl", head | time | {"median_us": median_us})
    rates = {"kind": "loss", "source": "made-up", "n": 8, "batch": 0, "rate": 0.9999}
    append_jsonl(records / "records.jsonl", head | rates | {"best_rate": 1.0})
    write_json(records / "run.json", RUN)


def ours(folder, out):
    return {(x.claim.topic, x.claim.text): x for x in report.lines(folder, out)}


def test_nothing_is_claimed_without_records(tmp_path):
    found = report.lines(tmp_path, tmp_path)
    assert {line.status for line in found} == {"not run"}
    text = report.markdown(found, report.setting(tmp_path, "smollm2"))
    assert text.count("| n/a | not run |") == len(claims.CLAIMS) and "](" not in text


def test_values_follow_the_records(tmp_path):
    records, out = decode(tmp_path), tmp_path / "figures"
    scheduler(tmp_path)
    before = ours(tmp_path, out)
    drafting = before["time per token", "drafting time against DSpark, heaviest load"]
    # The same step times for all; ForeSpark writes as many tokens in as many steps.
    assert drafting.ours == "−0 %" and drafting.status == "measured on CPU"
    assert drafting.link == "../bench/decode/records.jsonl"
    decision = before["scheduler", "one decision at 192 requests / exhaustive search"]
    assert decision.ours == "50 µs / 9.0 ms"
    lost = before["scheduler", "goodput lost against exhaustive search, mean"]
    assert lost.ours == "0.0100 %"
    rows = read_jsonl(records / "records.jsonl")
    (records / "records.jsonl").unlink()
    for row in rows:
        faster = {"draft_ms": row["draft_ms"] / 4} if row["arm"] == "forespark" else {}
        append_jsonl(records / "records.jsonl", row | faster)
    summarize_folder(records)
    after = ours(tmp_path, out)
    assert after["time per token", "drafting time against DSpark, heaviest load"].ours == "−75 %"


def test_both_forms_say_the_same(tmp_path):
    decode(tmp_path)
    found = report.lines(tmp_path, tmp_path)
    text, page = report.markdown(found, "Ours."), report.page(found, "Ours.")
    plain = html.unescape(re.sub(r"<[^>]+>", "", page))
    for line in found:
        for cell in line.cells():
            assert cell in text and cell in plain
    assert page.count("<a href=") == text.count("](bench/") > 5


def test_records_without_a_device_are_refused(tmp_path):
    records = decode(tmp_path)
    write_json(records / "run.json", {**RUN, "runs": [{"provenance": {}}]})
    with pytest.raises(ValueError, match=r"run\.json: runs without a device"):
        report.lines(tmp_path, tmp_path)


def test_commands_of_the_claims_exist():
    for claim in claims.CLAIMS:
        assert bool(claim.bench) == (claim.ours is not None)
        program = claim.command.removeprefix("python ").split()[0]
        assert not claim.bench or (ROOT / program).exists(), claim.command
