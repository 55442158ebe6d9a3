"""Builds haloconv into python/haloconv for the Python that runs this, when a source is newer than the binary.

Run by make. It is an editable install without dependencies: nothing else in the environment is touched, and a
change of a Python file needs no build.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "haloconv"


def is_installed():
    try:
        origin = importlib.metadata.distribution("haloconv").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return origin is not None and json.loads(origin)["url"] == ROOT.as_uri()


def is_current():
    binary = PACKAGE / "_C.abi3.so"
    if not binary.exists():
        return False
    sources = [ROOT / "setup.py", ROOT / "build_cuda.py", ROOT / "pyproject.toml"]
    sources += [PACKAGE / "_floor.py", PACKAGE / "_version.py"]
    for folder in ("csrc", "cuda"):  # the folder's own date: a file was added or removed
        sources += [ROOT / folder, *ROOT.glob(f"{folder}/*")]
    return max(path.stat().st_mtime for path in sources) < binary.stat().st_mtime


def main():
    if is_installed() and is_current():
        return 0
    print("haloconv: building the extension", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    return subprocess.call([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)])


sys.exit(main())
