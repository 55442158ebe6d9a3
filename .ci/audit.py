"""Does a built wheel keep to the two stable ABIs it promises?  python .ci/audit.py dist/haloconv-*.whl

Python's limited API from the floor on (abi3audit), and libtorch's stable C ABI (torch-abi-audit) with no
symbol newer than the oldest supported torch, but for weak ones, whose absence the code allows for. Both
floors are read from python/haloconv/_floor.py.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from torch_abi_audit.cli import main as torch_abi_audit
from torch_abi_audit.torch_versions import stable_shim_versions

ROOT = Path(__file__).resolve().parent.parent


def too_new(binary, floor):
    """Each undefined symbol that the oldest supported torch lacks; the weak ones are left out."""
    nm = subprocess.run(["nm", "-D", "-u", binary], check=True, stdout=subprocess.PIPE, text=True).stdout
    since = stable_shim_versions()
    undefined = [line.split()[-2:] for line in nm.splitlines()]
    return [
        f"{name} (since {since[name]})"
        for kind, name in undefined
        if kind == "U" and since.get(name, floor)[:2] > floor
    ]


def cuda_links(binary):
    """The CUDA libraries that a binary would need at load time: there must be none, so that one wheel serves all."""
    dynamic = subprocess.run(["readelf", "-d", binary], check=True, stdout=subprocess.PIPE, text=True).stdout
    needed = [line.partition("[")[2].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    return [
        name
        for name in needed
        if name.startswith(("libcu", "libnccl", "libnv", "libtorch_cuda", "libc10_cuda"))
    ]


def main():
    (wheel,) = sys.argv[1:]
    constants = {}
    exec((ROOT / "python" / "haloconv" / "_floor.py").read_text(encoding="utf-8"), constants)
    failed = subprocess.call([sys.executable, "-m", "abi3audit", "--strict", "--summary", wheel]) != 0
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            binary = archive.extract("haloconv/_C.abi3.so", folder)
            kernels = [name for name in archive.namelist() if name == "haloconv/libhaloconv_cuda.so"]
            linked = [name for file in kernels for name in cuda_links(archive.extract(file, folder))]
            linked += cuda_links(binary)
            print("CUDA kernels:", "in the wheel" if kernels else "not built")
        failed |= torch_abi_audit(["--verbose", "--check", "both", binary]) != 0
        new = too_new(binary, constants["MIN_TORCH"])
    if new:
        print("newer than the oldest supported torch, and not weak:", *new)
    if linked:
        print("linked to CUDA, which the wheel must not be:", *linked)
    failed |= bool(new) or bool(linked)
    print("audit:", "failed" if failed else "passed")
    return int(failed)


sys.exit(main())
