"""The benchmarks' fast modes: their results, not their times."""

import json
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KEYS = {"benchmark", "date", "command", "versions", "machine", "rows"}


def run(script, directory, *options, ranks=1, plots=True):
    """The script's JSON; it must end with 0, which says that its own checks hold."""
    out, picture = directory / "out.json", directory / "out.png"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        sys.executable,
        *(launcher if ranks > 1 else []),
        f"benchmarks/{script}",
        "--fast",
        "--json",
        out,
    ]
    command += ["--plot", picture, *options] if plots else options
    environment = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not plots or picture.stat().st_size > 1000
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


def test_conv(tmp_path):
    """Fails when a benchmarked convolution differs from the unsplit one, or a rival of it cannot run."""
    rows = run("conv.py", tmp_path, ranks=2)["rows"]
    assert {row["kind"] for row in rows} == {"dense", "depthwise"}
    for row in rows:
        assert row["error"] < 5e-2 and row["bytes"] > 0  # bfloat16; the script has a limit for each dtype
        assert all(row[f"{name}_ms"] > 0 for name in ("halo", "local", "beside", "extended", "raw"))


def test_conv_sweep(tmp_path):
    """Fails when the widths down to the crossover cannot be swept."""
    rows = run("conv.py", tmp_path, "--sweep", ranks=2, plots=False)["rows"]
    assert len({row["input"][-1] for row in rows}) > 1
    assert all(row["error"] < 1e-4 and row["speedup"] > 0 for row in rows)


def test_depthwise(tmp_path):
    """Fails when the loops in C differ from ATen in float64, or the rule never chooses them."""
    rows = run("depthwise.py", tmp_path)["rows"]
    assert any("+" in row["auto"] for row in rows)
    assert all(row["error"] < 2e-2 for row in rows)


def test_overhead(tmp_path):
    """Fails when an exchange brings other columns, or a layer other values."""
    rows = run("overhead.py", tmp_path, ranks=2, plots=False)["rows"]
    assert {row["bytes"] for row in rows} == {24576, 393216, 3145728, None}


def test_training(tmp_path):
    """Fails when a split step's loss or gradients differ from the unsplit ones."""
    pytest.importorskip("timm")
    rows = run("training.py", tmp_path, ranks=2, plots=False)["rows"]
    assert [row["name"] for row in rows] == ["split", "independent", "unsplit", "strip"]
    assert rows[0]["error"] < 1e-3 and rows[0]["exchange_ms"] > 0
