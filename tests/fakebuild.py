"""Builds the stand-in for NCCL and CUDA (tests/fakes/) and a haloconv that takes it, and runs tests with them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror"]


def sanitizer_libraries():
    """What must be preloaded before a sanitized library (see .ci/sanitize)."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    return [
        os.path.realpath(subprocess.check_output(["gcc", f"-print-file-name={n}"], text=True).strip())
        for n in names
    ]


def build(folder, root=ROOT, sanitize=False):
    """Builds both into `folder`, from the tree `root`. Returns the environment in which tests use them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if sanitize else []
    fakes = root / "tests" / "fakes"
    shared = ["gcc", *WARNINGS, *flags, "-shared", "-fPIC", "-fvisibility=hidden"]
    cuda, memory = folder / "fake_cuda.so", folder / "fake_memory.so"
    sources = [str(fakes / "fake_cuda.c"), str(fakes / "fake_nccl.c")]
    subprocess.run([*shared, "-o", str(cuda), *sources, "-ldl", "-lpthread", "-lrt"], check=True, timeout=100)
    if not sanitize:
        subprocess.run(
            [*shared, "-o", str(memory), str(fakes / "fake_memory.c"), "-ldl"], check=True, timeout=100
        )
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            f"--build-base={folder}",
            f"--build-lib={folder / 'lib'}",
        ],
        cwd=root,
        env=dict(os.environ, HALOCONV_FAULTS="1", HALOCONV_SANITIZE="1" if sanitize else "0", USE_CUDA="0"),
        check=True,
        capture_output=True,
        timeout=300,
    )
    environment = dict(
        os.environ,
        PYTHONPATH=str(folder / "lib"),
        HALOCONV_FAKE_CUDA=str(cuda),
        HALOCONV_TRANSPORT="nccl",
        HALOCONV_SANITIZE="1" if sanitize else "0",
        OMP_NUM_THREADS="1",
        # AddressSanitizer notices by itself what is freed too early
        LD_PRELOAD=" ".join(sanitizer_libraries()) if sanitize else str(memory),
    )
    if sanitize:
        environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1:quarantine_size_mb=16"
        environment["PYTHONMALLOC"] = "malloc"
    return environment


def run_pytest(environment, *arguments, root=ROOT, timeout=600, **variables):
    """(exit status, how many tests passed, how many did not, the output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        cwd=root,
        env=dict(environment, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    last = (done.stdout.splitlines() or [""])[-1]

    def count(words):
        return sum(int(number) for number in re.findall(rf"(\d+) (?:{words})", last))

    return done.returncode, count("passed"), count("failed|errors?"), done.stdout
