"""Builds python/haloconv/libhaloconv_cuda.so, the CUDA kernels, as a part of setup.py.

Whether they are built is decided by what is installed, never by a visible card: a machine that builds needs none.

    USE_CUDA=auto  (the default) if there is an nvcc of the CUDA major version that torch was built for, and it can
                   compile them (it may lack headers); else the build goes on without them, and says why
    USE_CUDA=1     also for a CPU build of torch, for a wheel that goes elsewhere; what is missing ends the build
    USE_CUDA=0     never

nvcc is that of CUDA_HOME, else the one in the PATH, in /usr/local/cuda, or of the pip package nvidia-cuda-nvcc (which
needs nvidia-cuda-cccl as well). The code is compiled for ARCHS, and as PTX of the newest for cards to come;
TORCH_CUDA_ARCH_LIST ("9.0;10.0+PTX") names others. MAX_JOBS limits how many are compiled at once.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

LIBRARY = "libhaloconv_cuda.so"
ARCHS = "8.0;9.0;10.0+PTX"
MIN_CUDA = (12, 0)  # __grid_constant__, C++17, and PTX for compute capability 9.0


class CudaError(Exception):
    """What the user asked for can't be had; the text says why."""


@dataclasses.dataclass
class Plan:
    """nvcc None: not built, and `text` says why; else where it is, and its `version`."""

    nvcc: str | None
    text: str
    version: tuple = ()
    flags: tuple = ()
    archs: tuple = ()  # of (number, is PTX), as in ("90a", False)
    jobs: int = 1
    insists: bool = False  # whether the build must end where they can't be compiled


def torch_cuda(torch):
    """The CUDA version of the torch in that folder, as text, or None for a CPU build. torch is not imported."""
    path = torch / "version.py"
    found = (
        re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", path.read_text(encoding="utf-8"), re.M)
        if path.exists()
        else None
    )
    return found and found.group(1)


def find_nvcc(torch, environment):
    """The nvcc's path and the flags that its layout needs, or (None, what was looked at)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not os.access(nvcc, os.X_OK):
            return None, f"CUDA_HOME is {home}, which has no bin/nvcc"
        return str(nvcc), libraries_of(nvcc)
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    if nvcc is None and os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        nvcc = "/usr/local/cuda/bin/nvcc"
    if nvcc is not None:
        return nvcc, libraries_of(Path(nvcc).resolve())
    for nvcc in sorted(torch.parent.glob("nvidia/*/bin/nvcc"), reverse=True):
        if os.access(nvcc, os.X_OK):
            return str(nvcc), libraries_of(nvcc)
    return None, "no nvcc in CUDA_HOME, the PATH, /usr/local/cuda, or site-packages"


def libraries_of(nvcc):
    """nvcc looks in lib64; pip packages have a lib."""
    libraries = nvcc.parent.parent / "lib"
    return (f"-L{libraries}",) if libraries.is_dir() else ()


def version_of(nvcc):
    try:
        text = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
        return tuple(int(number) for number in re.search(r"release (\d+)\.(\d+)", text).groups())
    except (OSError, subprocess.CalledProcessError, AttributeError) as error:
        raise CudaError(f"{nvcc} does not tell its version ({error})") from error


def parse_archs(text):
    """ "9.0;10.0+PTX" as [("90", False), ("100", False), ("100", True)]."""
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", word)
        if match is None:
            raise CudaError(f"TORCH_CUDA_ARCH_LIST is '{text}', expected a list like '{ARCHS}'")
        number = match.group(1) + match.group(2)
        archs += [(number, False)] + [(number, True)] * (match.group(3) is not None)
    return tuple(dict.fromkeys(archs))


def plan(torch, environment):
    """What to build, for the torch in that folder. Raises CudaError where USE_CUDA=1 can't be met."""
    wish = environment.get("USE_CUDA", "auto").lower() or "auto"
    wish = {"on": "1", "true": "1", "off": "0", "false": "0"}.get(wish, wish)
    if wish not in ("auto", "0", "1"):
        raise CudaError(f"USE_CUDA is '{environment['USE_CUDA']}', expected auto, 0 or 1")
    if wish == "0":
        return Plan(None, "not built: USE_CUDA=0")
    cuda = torch_cuda(torch)
    nvcc, flags = find_nvcc(torch, environment)
    if wish == "auto" and cuda is None:
        return Plan(None, "not built: torch is a CPU build (USE_CUDA=1 builds them all the same)")
    try:
        if nvcc is None:
            raise CudaError(f"nvcc was not found: {flags}")
        version = version_of(nvcc)
        if version < MIN_CUDA:
            raise CudaError(
                f"{nvcc} is of CUDA {version[0]}.{version[1]}, expected {MIN_CUDA[0]}.{MIN_CUDA[1]} or newer"
            )
        if cuda is not None and int(cuda.partition(".")[0]) != version[0]:
            raise CudaError(f"torch is built for CUDA {cuda}, and {nvcc} is of {version[0]}.{version[1]}")
    except CudaError as error:
        if wish == "1":
            raise
        return Plan(None, f"not built: {error}")
    archs = parse_archs(environment.get("TORCH_CUDA_ARCH_LIST") or ARCHS)
    text = f"by {nvcc} {version[0]}.{version[1]} for {names(archs)}, torch's CUDA is {cuda or 'none'}"
    return Plan(nvcc, text, version, flags, archs, jobs(environment), insists=wish == "1")


def jobs(environment):
    """How many files to compile at once."""
    wanted = environment.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not wanted.isdecimal() or int(wanted) < 1:
        raise CudaError(f"MAX_JOBS is '{wanted}', expected a positive number")
    return int(wanted)


def names(archs):
    return " ".join(f"compute_{number} (PTX)" if ptx else f"sm_{number}" for number, ptx in archs)


def command(plan, root, target, werror):
    """nvcc's command line. The runtime is linked statically, see cuda/blocks.cu."""
    archs = [
        word
        for number, ptx in plan.archs
        for word in ("-gencode", f"arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}")
    ]
    warnings = ["-Wall", "-Wextra", "-Wshadow"]
    return [
        *(plan.nvcc, "-shared", "-std=c++17", "-O3", *archs, *plan.flags),
        *("-cudart", "static", "--threads", str(min(plan.jobs, len(plan.archs)))),
        *("-Xcompiler", ",".join(["-fPIC", "-fvisibility=hidden", *warnings, *["-Werror"] * werror])),
        *("-Xlinker", "--as-needed,--exclude-libs,ALL,-s"),  # the runtime's symbols are not ours to show
        *(("--Werror", "all-warnings") if werror else ()),
        f'-DHC_CUDA_ARCHS="{names(plan.archs)}"',
        str(root / "cuda" / "blocks.cu"),
        *("-o", str(target)),
    ]


def build(plan, root, temporary, target, werror, report):
    """Compiles, unless what lies at `target` is of the same sources and the same command."""
    temporary.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    line = command(plan, root, target, werror)
    stamp = temporary / "cuda.txt"
    sources = [*(root / "cuda").iterdir(), root / "csrc" / "block.h", root / "build_cuda.py"]
    newest = max(path.stat().st_mtime for path in sources)
    if (
        target.exists()
        and target.stat().st_mtime > newest
        and stamp.exists()
        and stamp.read_text(encoding="utf-8") == repr(line)
    ):
        return
    started = time.monotonic()
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0 or (werror and "warning" in done.stdout):
        target.unlink(missing_ok=True)
        print(done.stdout, flush=True)
        wrong = re.search(r"^.*\b(?:error|warning)\b.*$", done.stdout, re.M)
        why = wrong.group().strip() if wrong else f"it ended with {done.returncode}"
        if plan.insists or werror:
            raise CudaError(f"nvcc could not compile cuda/blocks.cu: {why}")
        report(False, LIBRARY, f"not built: nvcc could not compile it: {why}")
        return
    stamp.write_text(repr(line), encoding="utf-8")
    size = target.stat().st_size
    report(True, LIBRARY, f"{size / 1e6:.2f} MB, compiled in {time.monotonic() - started:.0f} s")
