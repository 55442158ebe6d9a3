"""csrc/nccl_abi.h repeats declarations of NCCL, the CUDA runtime and libtorch_cuda: are they theirs?

A compiler compares them with the real headers, as in test_torch_abi.py; the libraries that torch has loaded are asked
for each name. No card is needed.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "nccl_abi.h"
SITE = Path(torch.__file__).parent.parent / "nvidia"

pytestmark = pytest.mark.skipif(
    not HEADER.exists(), reason="csrc/ is not there: an installed copy is being tested"
)

# What the real headers call the numbers that ours repeat.
CHECKS = """
static_assert(ncclSuccess == 0 && ncclSystemError == 2 && ncclInvalidArgument == 4 && ncclInvalidUsage == 5, "");
static_assert(ncclInProgress == 7 && ncclUint8 == 1 && NCCL_UNIQUE_ID_BYTES == 128, "");
static_assert(sizeof(ncclUniqueId) == 128, "");
static_assert(NCCL_API_MAGIC == HC_NCCL_MAGIC, "");
static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8, "");
static_assert(offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16, "");
static_assert(HC_NCCL_FLOOR == NCCL_VERSION(2, 14, 0), "");
static_assert(HC_NCCL_CONFIG_BYTES == 24 && offsetof(ncclConfig_t, cgaClusterSize) == 20, "");
static_assert(cudaSuccess == 0 && cudaErrorNotReady == 600 && cudaEventDisableTiming == 2, "");
static_assert(cudaStreamCaptureStatusNone == 0 && cudaStreamCaptureModeRelaxed == 2, "");
"""


def names(which):
    """The functions of HC_NCCL_FUNCTIONS and its like."""
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"X\((\w+)\)", re.search(rf"#define HC_{which}_FUNCTIONS\(X\)(.*)", text).group(1))


def declared():
    """{name: its declaration}."""
    text = re.sub(
        r"/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*", " ", HEADER.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    found = {}
    for statement in text.split(";"):
        named = re.match(r"\s*(?:const )?\w+\s*\*?\s*((?:nccl|cuda|aoti_|torch_)\w+)\s*\(", statement)
        if named:
            found[named.group(1)] = " ".join(statement.split()) + ";"
    return found


def compile_behind_the_real_ones(folder, ours):
    include = [f"-I{path}" for path in SITE.glob("*/include")] + [
        f"-I{Path(torch.__file__).parent / 'include' / part}" for part in ("", "torch/csrc/api/include")
    ]
    nvcc = shutil.which("nvcc")
    if shutil.which("g++") is None or nvcc is None or not list(SITE.glob("*/include/nccl.h")):
        pytest.skip(
            "needs g++, CUDA's headers (the wheel of the runtime has some of them only), and NCCL's wheel"
        )
    dry = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], stderr=subprocess.PIPE, text=True).stderr
    include.insert(0, f"-I{re.search(r'TOP=(.+)', dry).group(1)}/include")
    version = torch.__version__.split("+")[0].split(".")
    source = folder / "compare.cpp"
    source.write_text(
        f"#define TORCH_TARGET_VERSION ((({version[0]}ULL) << 56) | (({version[1]}ULL) << 48))\n"
        "#define USE_CUDA 1\n#include <cstddef>\n#include <cuda_runtime_api.h>\n#include <nccl.h>\n"
        "#include <torch/csrc/stable/c/shim.h>\n#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
        '#define HC_REAL_CUDA_HEADERS\nextern "C" {\n' + ours + "\n}\n",
        encoding="utf-8",
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", "-w", *include, str(source)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    ).stdout


def test_declarations_are_the_real_ones(tmp_path):
    """Fails when a prototype or a number is not the one in the headers of NCCL, CUDA or torch."""
    uses = "\n".join(f"static auto *use_{name} = &{name};" for name in declared())
    assert compile_behind_the_real_ones(tmp_path, f'#include "{HEADER}"\n{CHECKS}\n{uses}') == ""


def test_wrong_declarations_are_noticed(tmp_path):
    """Fails when the comparison has no teeth: each with one parameter more must be refused."""
    wrong = [re.sub(r"\((?:void)?\);$", "(int);", text) if "(void)" in text else text[:-2] + ", int);"
             for text in declared().values()]  # fmt: skip
    said = compile_behind_the_real_ones(tmp_path, "\n".join(wrong))
    noticed = set(re.findall(r"conflicting declaration of C function .*?\b(\w+)\(", said))
    assert noticed == set(declared())


def test_the_table_has_every_function():
    """Fails when a function is declared and not looked up, or the other way round."""
    listed = [*names("NCCL"), *names("CUDART"), *names("TORCH_CUDA")]
    assert len(listed) == len(set(listed)) > 25 and set(listed) == set(declared())


def test_the_real_libraries_have_every_function():
    """Fails when torch's own NCCL, CUDA runtime or libtorch_cuda lacks a function."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    mode = os.RTLD_NOLOAD | os.RTLD_NOW
    nccl, cuda = ctypes.CDLL("libnccl.so.2", mode=mode), ctypes.CDLL("libtorch_cuda.so", mode=mode)
    for name in names("NCCL"):
        assert getattr(nccl, name)
    for name in [*names("CUDART"), *names("TORCH_CUDA")]:
        assert getattr(cuda, name)


def test_the_real_library_answers():
    """Fails when the table is not filled from torch's NCCL, or its version is too old."""
    from haloconv import _C

    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="without CUDA"):
            _C.nccl_version()
        return
    if _C.fake_device():
        pytest.skip("a stand-in is in its place")
    assert _C.nccl_version() >= 21400
    major, minor, patch = torch.cuda.nccl.version()
    assert _C.nccl_version() == 10000 * major + 100 * minor + patch
    first, second = _C.nccl_new_id(), _C.nccl_new_id()
    assert len(first) == 128 and first != second


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("HALOCONV_TRANSPORT", "mpi", "'auto', 'nccl' or 'c10d'"),
        ("HALOCONV_TIMEOUT", "soon", "seconds above 0"),
    ],
)
def test_bad_settings_are_named(name, value, expected):
    """Fails when a wrong setting is taken for another."""
    done = subprocess.run(
        [sys.executable, "-c", "import haloconv"],
        env=dict(os.environ, **{name: value}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert f"{name} is '{value}', expected" in done.stderr and expected in done.stderr, done.stderr
