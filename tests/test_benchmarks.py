"""The benchmarks' fast modes: their results, not their times."""

import json
import os
import subprocess
import sys
from itertools import pairwise

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


@pytest.mark.long
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


def test_speed_table(tmp_path):
    """Fails when what is timed has another loss or other gradients than the unsplit network, a baseline cannot run, or
    a speedup is not the published table's."""
    pytest.importorskip("timm")
    rows = run("speed_table.py", tmp_path, ranks=2)["rows"]
    by_name = {row["name"]: row for row in rows}
    assert {"one rank", "haloconv", "pipeline", "separate strips", "torch's legacy route"} <= set(by_name)
    one, split, pipeline = (by_name[name] for name in ("one rank", "haloconv", "pipeline"))
    for row in rows:
        if row["name"].startswith(("one rank", "haloconv")):
            assert row["error"] < 1e-3
    assert split["speedup"] == pytest.approx(2 * one["step_ms"] / split["step_ms"])
    assert split["efficiency"] == pytest.approx(split["speedup"] / 2)
    # a convolution of each of the 12 blocks has a halo, forward and backward; two all-reduces and more are not messages
    assert split["messages"] >= 24 and split["sent_mib"] > 0
    assert split["exchange_ms"] > 0 and split["reduction_ms"] > 0
    legacy = by_name["torch's legacy route"]
    assert legacy["step_ms"] > 0 and legacy["error"] > 0 and legacy["speedup"] > 0, legacy["note"]
    assert pipeline["bubble"] == pytest.approx(1 / 3)  # two stages, two micro-batches
    assert 0 < pipeline["idle"] < 1 and 0.5 <= pipeline["balance"] <= 1


def test_scaling_model(tmp_path):
    """Fails when a step cannot be predicted, memory is not that of the measured rows, or the shares do not add up."""
    pytest.importorskip("timm")
    rows = run("scaling_model.py", tmp_path, ranks=2)["rows"]
    by_part = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    assert set(by_part) == {"calibration", "held out", "memory", "published", "scale"}
    for row in by_part["held out"] + by_part["published"]:
        shares = [row[f"{name}_share"] for name in ("compute", "exchange", "reduction")]
        assert sum(shares) == pytest.approx(1) and row["predicted"] > 0 and row["actual"] > 0
    assert all(abs(row["deviation"]) < 0.15 for row in by_part["memory"])
    assert by_part["published"][0]["deviation"] == pytest.approx(0)  # what calibrates
    for row in by_part["scale"]:
        assert row["data_parallel"] * row["spatial"] + row["idle_cards"] == row["cards"]
        if row["spatial"] == 1:
            assert row["exchange_share"] == 0
    assert max(row["cards"] for row in by_part["scale"]) == 10_000


def test_counted_work():
    """Fails when counted work is not that of the shapes: flops by hand, messages by the plan, lines in the width."""
    pytest.importorskip("timm")
    script = (
        "from memory_cases import Case; import scaling_count as c; import json\n"
        "def at(width): return c.count(Case(model='convnext_atto', input=(2, 3, 64, width), optimizer='sgd'), 64)\n"
        "one, four = at(64), at(512)\n"
        "direct = c._counted(Case(model='convnext_atto', input=(2, 3, 64, 512), optimizer='sgd'))\n"
        "print(json.dumps([one.flops(), four.flops(), direct.flops(), four.exchanges(4), four.boundary(4),\n"
        "    four.activation_bytes, direct.activation_bytes, one.parameter_bytes]))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.join(ROOT, "python"), os.path.join(ROOT, "benchmarks")]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, four, direct, exchanges, boundary, kept, kept_direct, parameters = json.loads(done.stdout)
    assert four == pytest.approx(direct) and kept == pytest.approx(kept_direct)
    assert 7.8 < four / one < 8
    assert exchanges[:2] == [24, 48]  # 12 blocks, there and back, two neighbours of an inner rank
    # channels double as rows halve: a column has 40 · 16 float32 of each of two images in every block; three to a side
    assert exchanges[2] == 24 * 2 * 3 * 2 * 40 * 16 * 4
    assert 0 < boundary < 1 and parameters > 1e7


def test_timeline(tmp_path):
    """Fails when a rank's lanes lack its exchanges, convolutions or all-reduces, or overlap where they may not."""
    pytest.importorskip("timm")
    rows = run("timeline.py", tmp_path, ranks=2)["rows"]
    for number in (0, 1):
        own = {row["lane"]: row for row in rows if row["rank"] == number}
        assert all(row["total_ms"] > 0 for lane, row in own.items() if lane != "gradients: all-reduce")
        spans = sorted(
            s for lane, row in own.items() if not lane.startswith("gradients") for s in row["spans"]
        )
        assert all(a[1] <= b[0] + 2e-3 for a, b in pairwise(spans))  # rounded to 1e-3
