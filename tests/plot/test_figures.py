"""Figures and tables from made-up records: complete, partial, none; and never torch."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from forespark.bench.compare import summarize_folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "plot"))  # the folder that running plot/x.py puts there

import breakdown  # noqa: E402
import learning  # noqa: E402
import pareto  # noqa: E402
import results  # noqa: E402
import style  # noqa: E402
import table  # noqa: E402


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = synthetic.write(tmp_path_factory.mktemp("full"))
    summarize_folder(folder)
    return folder


def run(name, *args):
    command = [sys.executable, str(ROOT / "plot" / f"{name}.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_command_writes_pdf_png_and_csv(full, tmp_path):
    done = run("pareto", "--records", full, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pareto.pdf").read_bytes()[:4] == b"%PDF"
    assert (tmp_path / "pareto.png").read_bytes()[1:4] == b"PNG"
    rows = list(csv.DictReader((tmp_path / "pareto.csv").open()))
    assert len(rows) == 25 and {row["rounds"] for row in rows} == {"3"}
    assert str(tmp_path / "pareto.png") in done.stdout


def test_figures_never_import_torch(full, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'plot')!r})\n"
        "import pareto, breakdown, table, report, results\n"
        f"sys.argv = ['x', '--records', {str(full)!r}, '--out', {str(tmp_path)!r}]\n"
        "pareto.main(); breakdown.main(); table.main(); report.main()\n"
        "bad = {'torch', 'vllm', 'hydra', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_breakdown_is_normalized_to_ar_and_adds_up(full):
    points = results.points(results.read(full))
    rows = breakdown.breakdown(points)
    parts = rows[["verify_ms", "draft_ms", "other_ms"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(rows["normalized"].to_numpy())
    ar = rows[rows["arm"] == "ar"]
    assert ar["normalized"].to_numpy() == pytest.approx(1.0) and (ar["draft_ms"] == 0).all()


def texts(fig):
    found = [text.get_text() for axes in fig.axes for text in axes.texts]
    return " ".join([*found, fig.get_supxlabel()])


def test_missing_arms_are_named(tmp_path):
    folder = synthetic.write(tmp_path, arms=("ar", "forespark"), rounds=1, steps=False)
    points = results.points(results.read(folder))
    fig = pareto.draw(points, None, "smollm2", "decode")
    assert "not measured: DFlash 2, DSpark, ForeSpark w/o JS" in texts(fig)
    assert len(fig.axes[0].containers) == 2  # no point is invented for the others
    rows = breakdown.breakdown(points)
    assert rows["verify_ms"].isna().all() and len(rows) == 10
    assert "not measured" in texts(breakdown.draw(rows, {"ar", "forespark"}, "smollm2"))


def test_without_ar_nothing_is_normalized(tmp_path):
    folder = synthetic.write(tmp_path, arms=("dspark",), rounds=1)
    rows = breakdown.breakdown(results.points(results.read(folder)))
    assert not len(rows)
    assert "no AR records" in texts(breakdown.draw(rows, {"dspark"}, "smollm2"))


@pytest.mark.parametrize("module", [pareto, breakdown, table])
def test_no_records_is_no_crash(tmp_path, module, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # runs/smollm2 is not there
    monkeypatch.setattr(sys, "argv", ["x"])
    module.main()
    assert capsys.readouterr().out


def test_one_point_curve(tmp_path):
    folder = synthetic.write(tmp_path, arms=("ar", "forespark"), loads=(8,), rounds=1)
    summarize_folder(folder)
    points = results.points(results.read(folder))
    style.save(pareto.draw(points, None, "smollm2", "decode"), tmp_path, "one")
    text = table.render(points, results.summary(folder), "smollm2", "decode")
    assert "n/a (no overlap)" in text


def test_table(full):
    text = table.render(
        results.points(results.read(full)), results.summary(full), "smollm2", "decode"
    )
    lines = text.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 25
    assert any("ForeSpark |" in line and "[" in line for line in lines)
    assert "outputs equal AR's" in text


def test_summary_of_other_records_is_not_used(tmp_path, capsys):
    folder = synthetic.write(tmp_path, arms=("ar", "forespark"), loads=(1,), rounds=1)
    summarize_folder(folder)
    assert results.summary(folder) is not None
    synthetic.write(folder, arms=("dspark",), loads=(1,), rounds=1)
    assert results.summary(folder) is None
    assert "made from other records" in capsys.readouterr().err
    points = results.points(results.read(folder))
    assert "n/a" in table.render(points, None, "smollm2", "decode")


def test_other_schema_names_file_and_line(tmp_path, capsys):
    folder = synthetic.write(tmp_path, arms=("ar",), loads=(1,), rounds=1)
    line = json.loads((folder / "records.jsonl").read_text()) | {"schema": 7}
    with (folder / "records.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="line 2: got schema 7"):
        results.read(folder)
    with pytest.raises(SystemExit) as ended:
        results.run(lambda: results.read(folder))
    assert ended.value.code == 2 and "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([1], r"line 2: got \[1\], want one object a line"),
        ({"throughput_tokens_per_s": "fast"}, "line 2: throughput_tokens_per_s: got 'fast'"),
        ({"timed_tokens": 3}, "line 2: timed_tokens: got 3, want a list"),
        ({"arm": None}, "line 2: arm: got None"),
        ({"decode_steps": "z"}, "line 2: decode_steps: got 'z'"),
        ({"load": True}, "line 2: load: got True"),
    ],
)
def test_damaged_record_is_named(tmp_path, change, message):
    folder = synthetic.write(tmp_path, arms=("ar",), loads=(1,), rounds=1)
    line = json.loads((folder / "records.jsonl").read_text())
    row = line | change if isinstance(change, dict) else change
    with (folder / "records.jsonl").open("a") as out:
        out.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"records\.jsonl, {message}"):
        results.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], r"got \[\], want an object"),
        ({"pairs": None}, "pairs: got None"),
        ({"pairs": [{"arm": "ar"}]}, r"pairs\[0\]: got"),
        ({"best_over_strongest": {}}, "best_over_strongest: got {}"),
        ({"same_outputs_as_ar": {"ar": 1}}, "same_outputs_as_ar: got"),
    ],
)
def test_damaged_summary_is_named(tmp_path, change, message):
    folder = synthetic.write(tmp_path, arms=("ar", "forespark"), loads=(1,), rounds=1)
    path = summarize_folder(folder)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | change if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=rf"summary\.json: {message}"):
        results.summary(folder)


def test_named_folder_and_target_must_exist(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--records", str(tmp_path / "none")], "no such folder"),
        (["--records", str(tmp_path / "file")], "no such folder"),
        (["--target", "nope"], "unknown target 'nope': want one of glm53"),
    ):
        monkeypatch.setattr(sys, "argv", ["pareto.py", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as ended:
            results.run(pareto.main)
        error = capsys.readouterr().err
        assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_figures_script_refuses_a_missing_folder(tmp_path):
    command = ["bash", "scripts/figures.sh", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "is there" in done.stderr
    assert not (tmp_path / "none").exists()


def test_python_without_pandas_is_told_what_to_run(tmp_path):
    (tmp_path / "plot").mkdir()
    for name in ("environment.py", "table.py"):
        shutil.copy(ROOT / "plot" / name, tmp_path / "plot")
    command = [sys.executable, "-S", str(tmp_path / "plot/table.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "run ./setup.sh" in done.stderr
    if (ROOT / ".venv").exists():  # found there: the figure goes on
        command = [sys.executable, "-S", "plot/table.py", "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "usage: table.py" in done.stdout, done.stderr


def test_every_arm_looks_different():
    looks = style.LOOKS.values()
    assert set(style.ARMS) < set(style.LOOKS)
    for what in ("label", "marker", "color"):
        assert len({getattr(look, what) for look in looks}) == len(looks)

    def lightness(color):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    # In greyscale line style and marker carry it.
    assert len({style.LOOKS[arm].line for arm in style.ARMS}) == len(style.ARMS)
    assert max(map(lightness, (look.color for look in looks))) < 190  # visible on white


def test_learning_curves_of_every_drafter_found(tmp_path):
    for name, fields in {"dspark": {}, "forespark": {"post_brier": 0.1}}.items():
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "split": split, "accepted_length": 1 + step / 100, **fields}
            for step in (50, 100)
            for split in ("train", "validation")
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    out = tmp_path / "figures"
    done = run("learning", "--records", tmp_path, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((out / "learning.csv").open()))
    assert [(row["drafter"], row["step"]) for row in rows] == [
        ("dspark", "50"), ("dspark", "100"), ("forespark", "50"), ("forespark", "100"),
    ]  # fmt: skip
    assert (out / "learning.png").read_bytes()[1:4] == b"PNG"
    assert "| ForeSpark | 100 | n/a | 2.00 | 0.100 |" in (out / "learning.md").read_text()


def test_learning_curves_count_on_over_the_runs_of_a_drafter(tmp_path):
    (tmp_path / "dspark").mkdir()
    for number in range(1, 11):  # run 10 comes after run 2
        name = "metrics.jsonl" if number == 1 else f"metrics-{number}.jsonl"
        row = {"split": "validation", "accepted_length": number}
        lines = [json.dumps({"step": s, "elapsed_s": 36.0 * s, **row}) + "\n" for s in (0, 100)]
        (tmp_path / "dspark" / name).write_text("".join(lines))
    frame = learning.read(tmp_path)
    assert frame["step"].tolist() == [s for n in range(10) for s in (100 * n, 100 * n + 100)]
    assert frame["accepted_length"].tolist()[-1] == 10
    assert "| DSpark | 1000 | 10.0 | 10.00 | n/a |" in learning.render(frame)


def test_training_rows_that_are_none_or_damaged(tmp_path):
    path = tmp_path / "dspark" / "metrics.jsonl"
    path.parent.mkdir()
    path.touch()
    assert not len(learning.read(tmp_path))
    for row, message in (
        ([], "got \\[\\], want one object"),
        ({"step": 1}, "missing fields \\['split'\\]"),
        ({"step": "z", "split": "train"}, "step: got 'z'"),
        ({"step": 1, "split": "train", "post_brier": "z"}, "post_brier: got 'z'"),
    ):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=f"metrics.jsonl, line 1: {message}"):
            learning.read(tmp_path)


def test_no_training_records_give_an_empty_figure(tmp_path):
    done = run("learning", "--records", tmp_path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr


def test_unknown_flag_leaves_the_readme_alone():
    before = (ROOT / "README.md").read_bytes()
    command = [sys.executable, "scripts/readme_results.py", "--chek"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "usage:" in done.stderr
    assert (ROOT / "README.md").read_bytes() == before


def test_heads_table_beside_joint_training(tmp_path):
    values = {"post_bce": 0.5, "post_brier": 0.0721, "pre_bce": 0.6, "pre_token_error": 1.25}
    for name, hours, fields in (
        ("forespark", 3, values), ("heads-0a1b", 0.5, values | {"pre_bce": 0.65}),
        ("dspark", 2, {}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "split": "validation", "elapsed_s": 36 * hours * step, **fields}
            for step in (50, 100)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    done = run("heads", "--records", tmp_path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "heads.md").read_text()
    assert "| cost | 3.0 h, 100 steps | 0.5 h, 100 steps |" in text
    assert "loss / Brier score | 0.5000 / 0.0721 | 0.5000 / 0.0721 |" in text
    assert "accepted-token error | 0.600 / 1.250 | 0.650 / 1.250 |" in text
    assert set(learning.read(tmp_path)["drafter"]) == {"forespark", "dspark"}
    shutil.rmtree(tmp_path / "heads-0a1b")
    assert run("heads", "--records", tmp_path, "--out", tmp_path).returncode == 0
    assert "| 0.600 / 1.250 | n/a |" in (tmp_path / "heads.md").read_text()
