"""The benchmarks' fast modes: their results, not their times."""

import json
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KEYS = {"benchmark", "date", "command", "versions", "machine", "rows"}


def run(script, directory, *options):
    """The script's JSON; it must end with 0, which says that its own checks hold."""
    out, picture = directory / "out.json", directory / "out.png"
    command = [sys.executable, f"benchmarks/{script}", "--fast", "--json", out, "--plot", picture, *options]
    environment = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 1000
    report = json.loads(out.read_text())
    assert set(report) == KEYS and len({tuple(row) for row in report["rows"]}) == 1
    return report


def test_memory_table(tmp_path):
    """Fails when fake tensors and real ranks differ in memory by more than 5 %, split and unsplit in their losses, or
    when the parts of a row do not add up."""
    pytest.importorskip("timm")
    rows = run("memory_table.py", tmp_path)["rows"]
    assert [row["measured"] for row in rows] == ["fake", "fake", "cpu", "cpu"]
    for row in rows:
        held = row["parameters_gib"] + row["states_gib"] + max(row["activations_gib"], row["gradients_gib"])
        assert row["peak_gib"] == pytest.approx(held + row["temporaries_gib"])
    one, sharded = rows[:2]
    # a quarter of everything that a rank keeps, up to the rows of small parameters that four ranks do not divide
    for part in ("parameters_gib", "gradients_gib", "states_gib"):
        assert sharded[part] == pytest.approx(one[part] / 4, rel=0.02)
    assert 4 * sharded["flops"] < 1.01 * one["flops"]  # uneven shards are a little more
    assert all(row["fake_ratio"] for row in rows[2:])
