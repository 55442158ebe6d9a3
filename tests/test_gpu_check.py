"""benchmarks/gpu_check.sh is for machines with a card; its short form runs here, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostkernels as host
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ["kernels_are_exact", "kernel_times", "graph_capture", "autocast_2"]

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("HALOCONV_SANITIZE")), reason="it starts processes of its own, one after another"
)


def run_script(out, *options, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), "installed", str(out), *options],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_short_form_passes_on_the_cpu(tmp_path):
    """Fails when a check of the script is broken, or its report is not what its reader expects."""
    out = tmp_path / "report.json"
    library = str(host.path())
    done = run_script(out, "--device", "cpu", "--only", *CHECKS, HALOCONV_CUDA_LIBRARY=library)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert list(report["checks"]) == CHECKS
    assert report["info"]["CUDA kernels"]["path"] == library
    assert report["checks"]["kernels_are_exact"]["boxes"] > 100
    assert report["checks"]["kernel_times"]["channels_last"]["pack_over_torch"] > 0
    assert report["checks"]["graph_capture"] == {"skipped": "needs a card"}
    assert report["checks"]["autocast_2"]["largest_error"] < 0.06


def test_a_failed_check_fails_the_script(tmp_path):
    """Fails when wrong kernels would pass: here a library whose copies do nothing."""
    source = tmp_path / "idle.c"
    lines = ["struct about { int abi, host, runtime, driver; char archs[96]; };"]
    lines.append("void hc_cuda_tell(struct about *a) { *a = (struct about){1, 1, 0, 0, {0}}; }")
    for name in ("blocks_copy", "blocks_fill", "blocks_add", "device_check", "device_set"):
        lines.append(f"int hc_cuda_{name}() {{ return 0; }}")
    lines.append('const char *hc_cuda_error_text(int e) { return e ? "an error" : ""; }')
    source.write_text("\n".join(lines))
    library = tmp_path / "idle.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    out = tmp_path / "report.json"
    done = run_script(out, "--device", "cpu", "--only", CHECKS[0], HALOCONV_CUDA_LIBRARY=str(library))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a box is wrong" in json.loads(out.read_text())["checks"][CHECKS[0]]["error"]


def test_a_check_that_hangs_is_ended(tmp_path, monkeypatch):
    """Fails when a rank that hangs outlives its check's limit, or holds the script up."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check as script

    stuck = tmp_path / "stuck.py"
    stuck.write_text(
        "import os, sys, time\n"
        f"open({str(tmp_path / 'pid')!r} + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "print('rank', os.environ['RANK'], 'is here', flush=True)\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(script, "__file__", str(stuck))
    result = script.run_check("autocast_2", "cpu", 2)
    assert result["ok"] is False and "longer than 2 s" in result["error"]
    for rank in range(2):
        assert f"rank {rank} is here" in result["log"]
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
