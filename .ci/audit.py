"""Does a built wheel keep to the two stable ABIs it promises?  python .ci/audit.py dist/haloconv-*.whl

Python's limited API from the floor on (abi3audit), and libtorch's stable C ABI with no symbol newer than
the oldest supported torch (torch-abi-audit); both floors are read from python/haloconv/_floor.py.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from torch_abi_audit.cli import main as torch_abi_audit

ROOT = Path(__file__).resolve().parent.parent


def main():
    (wheel,) = sys.argv[1:]
    floor = {}
    exec((ROOT / "python" / "haloconv" / "_floor.py").read_text(encoding="utf-8"), floor)
    failed = subprocess.call([sys.executable, "-m", "abi3audit", "--strict", "--summary", wheel])
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            binary = archive.extract("haloconv/_C.abi3.so", folder)
        if torch_abi_audit(["--verbose", "--check", "both", binary]):
            failed = 1
        report = io.StringIO()
        with contextlib.redirect_stdout(report):
            torch_abi_audit(["--json", binary])
    (extension,) = json.loads(report.getvalue())["extensions"]
    needs = extension["torch"]["min_torch_version"]
    if tuple(int(number) for number in needs.split(".")[:2]) > floor["MIN_TORCH"]:
        print(f"the binary needs torch {needs}, newer than the floor {floor['MIN_TORCH']}")
        failed = 1
    print("audit:", "failed" if failed else "passed")
    return failed


sys.exit(main())
