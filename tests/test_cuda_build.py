"""What the build promises of the CUDA kernels: who gets them, what is in the library, and that nothing needs it.

Decisions are tested with made-up compilers; the library itself is that of the build under test, where there is one.
"""

import ctypes
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import haloconv
import haloconv._C
import hostkernels as host
import pytest
import torch
from test_build import ROOT, ends_with_sentence, needs_source, output, setup

LIBRARY = Path(haloconv._C.__file__).with_name("libhaloconv_cuda.so")
DEFAULT = [("80", False), ("90", False), ("100", False), ("100", True)]
ENTRY_POINTS = [
    "blocks_add",
    "blocks_copy",
    "blocks_fill",
    "device_check",
    "device_set",
    "error_text",
    "tell",
]

needs_library = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the CUDA kernels were not built: there is no nvcc, or torch is a CPU build"
)


def builder():
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "build_cuda.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses asks for it
    spec.loader.exec_module(module)
    return module


def fake_torch(site, cuda):
    (site / "torch").mkdir(parents=True)
    line = "None" if cuda is None else f"'{cuda}'"
    (site / "torch" / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {line}\nhip = None\n")
    return site / "torch"


def fake_nvcc(path, version):
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """plan(torch's CUDA, nvcc's version, **environment): what would be built on a machine like that."""
    module = builder()
    monkeypatch.setattr(
        module.os, "access", lambda path, mode: str(tmp_path) in str(path) and Path(path).exists()
    )

    def make(cuda, nvcc, **environment):
        environment.setdefault("PATH", str(tmp_path / "bin"))
        if nvcc is not None:
            fake_nvcc(tmp_path / "bin" / "nvcc", nvcc)
        return module.plan(fake_torch(tmp_path / "site", cuda), environment)

    make.module = module
    return make


@needs_source
@pytest.mark.parametrize("wish", [{}, {"USE_CUDA": "auto"}, {"USE_CUDA": "1"}, {"USE_CUDA": "on"}])
def test_nvcc_of_torchs_major_version_is_used(plan, tmp_path, wish):
    """Fails when kernels aren't built where they can be. No card is asked for: there is none here."""
    made = plan("13.2", "13.0", **wish)
    assert made.nvcc == str(tmp_path / "bin" / "nvcc")
    assert list(made.archs) == DEFAULT
    assert "sm_80 sm_90 sm_100 compute_100 (PTX)" in made.text


@needs_source
@pytest.mark.parametrize(
    "cuda, nvcc, why",
    [
        ("13.0", None, "nvcc was not found"),
        ("12.8", "13.0", "torch is built for CUDA 12.8, and .*nvcc is of 13.0"),
        ("11.8", "11.8", "expected 12.0 or newer"),
        (None, "13.0", "torch is a CPU build"),
        (None, None, "torch is a CPU build"),
    ],
)
def test_what_is_missing_leaves_a_build_without_kernels(plan, cuda, nvcc, why):
    """Fails when a machine without the right compiler can't build haloconv, or isn't told why it has no kernels."""
    made = plan(cuda, nvcc)
    assert made.nvcc is None
    assert re.search(f"^not built: .*{why}", made.text)


@needs_source
@pytest.mark.parametrize("cuda, nvcc", [("13.0", None), ("12.8", "13.0"), ("11.8", "11.8"), (None, None)])
def test_use_cuda_1_insists(plan, cuda, nvcc):
    """Fails when someone who asked for the kernels gets a build without."""
    with pytest.raises(plan.module.CudaError):
        plan(cuda, nvcc, USE_CUDA="1")


@needs_source
def test_use_cuda_1_builds_for_a_cpu_torch(plan):
    """Fails when a wheel for CUDA machines can't be made where torch is a CPU build."""
    assert plan(None, "13.0", USE_CUDA="1").nvcc is not None


@needs_source
def test_use_cuda_0_builds_none(plan):
    """Fails when the switch doesn't."""
    made = plan("13.0", "13.0", USE_CUDA="0")
    assert (made.nvcc, made.text) == (None, "not built: USE_CUDA=0")


@needs_source
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("USE_CUDA", "yes", "USE_CUDA is 'yes', expected auto, 0 or 1"),
        ("MAX_JOBS", "0", "MAX_JOBS is '0', expected a positive number"),
        ("TORCH_CUDA_ARCH_LIST", "Hopper", "TORCH_CUDA_ARCH_LIST is 'Hopper', expected a list like"),
    ],
)
def test_nonsense_in_the_environment_is_refused(plan, name, value, message):
    """Fails when a switch that was mistyped is taken for something else."""
    with pytest.raises(plan.module.CudaError, match=message):
        plan("13.0", "13.0", **{name: value})


@needs_source
def test_arch_list_and_jobs_are_honoured(plan, tmp_path):
    """Fails when TORCH_CUDA_ARCH_LIST or MAX_JOBS does not reach nvcc."""
    made = plan("13.0", "13.0", TORCH_CUDA_ARCH_LIST="8.6 9.0a;12.0+PTX", MAX_JOBS="2")
    line = plan.module.command(made, ROOT, tmp_path / "out.so", True)
    codes = [line[i + 1] for i, word in enumerate(line) if word == "-gencode"]
    assert codes == [
        "arch=compute_86,code=sm_86",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_120,code=sm_120",
        "arch=compute_120,code=compute_120",
    ]
    assert line[line.index("--threads") + 1] == "2"
    assert "all-warnings" in line


@needs_source
def test_where_nvcc_is_looked_for(plan, tmp_path):
    """Fails when CUDA_HOME does not win over the PATH, or the compiler of the pip packages is not found."""
    module, torch_folder = plan.module, tmp_path / "site" / "torch"
    wheel = fake_nvcc(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc", "13.0")
    (wheel.parent.parent / "lib").mkdir()
    assert module.find_nvcc(torch_folder, {}) == (str(wheel), (f"-L{wheel.parent.parent / 'lib'}",))
    path = fake_nvcc(tmp_path / "bin" / "nvcc", "13.0")
    assert module.find_nvcc(torch_folder, {"PATH": str(path.parent)})[0] == str(path)
    home = fake_nvcc(tmp_path / "home" / "bin" / "nvcc", "13.0")
    environment = {"PATH": str(path.parent), "CUDA_HOME": str(tmp_path / "home")}
    assert module.find_nvcc(torch_folder, environment)[0] == str(home)
    found, why = module.find_nvcc(torch_folder, {"PATH": str(path.parent), "CUDA_HOME": str(tmp_path / "no")})
    assert found is None
    assert "CUDA_HOME is" in why


@needs_source
def test_use_cuda_1_without_nvcc_ends_with_a_sentence(tmp_path):
    """Fails when a build that can't be what was asked for ends in a traceback, or goes on."""
    environment = {"USE_CUDA": "1", "CUDA_HOME": str(tmp_path / "nowhere")}
    done = setup(tmp_path, "build", version="2.14.1", environment=environment)
    ends_with_sentence(done, "nvcc was not found", "USE_CUDA=0")
    assert "✗ CUDA kernels" in done.stdout


@needs_source
@pytest.mark.parametrize("wish, werror", [("auto", False), ("auto", True), ("1", False)])
def test_a_compiler_that_fails(plan, tmp_path, wish, werror):
    """Fails when an nvcc without its headers leaves no working build, or someone who insists is not told."""
    made = plan("13.0", "13.0", USE_CUDA=wish)
    Path(made.nvcc).write_text(
        "#!/bin/sh\necho 'cuda_fp16.h:1: fatal error: nv/target: No such file'; exit 1\n"
    )
    target, reports = tmp_path / "library.so", []
    target.write_text("of a build before")

    def build():
        plan.module.build(made, ROOT, tmp_path / "temp", target, werror, lambda *words: reports.append(words))

    if wish == "1" or werror:
        with pytest.raises(plan.module.CudaError, match="nv/target"):
            build()
    else:
        build()
        assert reports[0][0] is False
        assert "nv/target" in reports[0][2]
    assert not target.exists()


@needs_source
def test_a_real_compiler_compiles_without_warnings(tmp_path):
    """Fails when nvcc warns: each warning is an error here, as in `HALOCONV_WERROR=1 python setup.py build_ext`."""
    module = builder()
    folder = Path(torch.__file__).parent
    made = module.plan(folder, os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0", "USE_CUDA": "auto"})
    if made.nvcc is None:
        pytest.skip(f"nothing to compile with: {made.text}")
    reports = []
    target = tmp_path / "library.so"
    for _ in range(2):
        module.build(made, ROOT, tmp_path / "temp", target, True, lambda *words: reports.append(words))
    assert len(reports) == 1  # the second time there was nothing to do
    assert code_in(target) == {("sm", 90)}


@needs_library
def test_the_library_exports_its_entry_points_alone():
    """Fails when a symbol of CUDA's runtime, which is inside, could be taken by another library, or the other way."""
    symbols = output("nm", "-D", "--defined-only", str(LIBRARY)).splitlines()
    assert [line.split()[-1] for line in symbols] == [f"hc_cuda_{name}" for name in ENTRY_POINTS]


@needs_library
def test_the_library_links_neither_cuda_nor_torch():
    """Fails when the library can't be loaded where there is no CUDA, or is tied to one version of its runtime."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", str(LIBRARY)))
    system = (
        "libc.so",
        "libm.so",
        "libpthread.so",
        "libdl.so",
        "librt.so",
        "libgcc_s.so",
        "ld-linux",
        "libstdc++.so",
    )
    assert [name for name in needed if not name.startswith(system)] == []
    undefined = output("nm", "-D", "-u", str(LIBRARY))  # of libstdc++ only what its oldest versions have
    assert set(re.findall(r"@(GLIBCXX\S*|CXXABI\S*)", undefined)) <= {"CXXABI_1.3"}
    assert ctypes.CDLL(str(LIBRARY)).hc_cuda_tell is not None


def code_in(path):
    """{("sm", 90), ("compute", 100), ...}: what a library's fat binaries hold, read as cuobjdump does."""
    data, found = path.read_bytes(), set()
    at = data.find(b"\x50\xed\x55\xba")
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            found.add(({1: "compute", 2: "sm"}[kind], arch))
            entry += entry_header + entry_size
        at = data.find(b"\x50\xed\x55\xba", end)
    return found


@needs_library
@pytest.mark.skipif("TORCH_CUDA_ARCH_LIST" in os.environ, reason="another list was asked for")
def test_the_library_has_code_for_the_cards_promised():
    """Fails when a card from 8.0 on would find no code, or what the library says of itself is not true."""
    assert code_in(LIBRARY) == {("sm", 80), ("sm", 90), ("sm", 100), ("compute", 100)}
    about = haloconv._C.cuda_library()
    if about["path"] is not None:
        assert about["archs"] == "sm_80 sm_90 sm_100 compute_100 (PTX)"


@needs_library
def test_the_library_keeps_its_errors_to_itself():
    """Fails when the library, called where there may be no card, does not answer with an error that has a text."""
    library = host.load(LIBRARY)
    about = host.About()
    library.hc_cuda_tell(ctypes.byref(about))
    assert (about.abi, about.host) == (1, 0)
    assert about.runtime_version >= 12000
    block = host.array_of([host.Block(None, None, [1], [1], [1])])
    assert library.hc_cuda_blocks_copy(block, 1, 4, None) == host.INVALID_VALUE
    assert library.hc_cuda_error_text(host.INVALID_VALUE) == b"invalid argument"
    assert library.hc_cuda_error_text(host.MISALIGNED) == b"misaligned address"
    if not torch.cuda.is_available():
        error = library.hc_cuda_device_check(0)
        assert error != 0
        assert library.hc_cuda_error_text(error)


LOAD = "import haloconv, haloconv._C as c, json; print(json.dumps(c.cuda_library()))"


def loaded(**environment):
    clean = {name: value for name, value in os.environ.items() if name != "HALOCONV_CUDA_LIBRARY"}
    command = [sys.executable, "-c", LOAD]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120)


def test_a_named_library_must_load(tmp_path):
    """Fails when HALOCONV_CUDA_LIBRARY names what can't be used and haloconv goes on without."""
    done = loaded(HALOCONV_CUDA_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode != 0
    assert "ImportError: HALOCONV_CUDA_LIBRARY is '" in done.stderr


def test_a_library_of_another_kind_is_refused(tmp_path):
    """Fails when a library without the entry points, or of another interface, is called."""
    source = tmp_path / "other.c"
    source.write_text("int hc_cuda_blocks_copy(void) { return 0; }\n")
    target = tmp_path / "other.so"
    output("gcc", "-shared", "-fPIC", str(source), "-o", str(target))
    done = loaded(HALOCONV_CUDA_LIBRARY=str(target))
    assert done.returncode != 0
    assert "has no hc_cuda_tell" in done.stderr


def test_kernels_can_be_switched_off():
    """Fails when a machine on which the kernels are trouble can't do without them."""
    done = loaded(HALOCONV_CUDA_LIBRARY="0")
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert (about["path"], about["reason"]) == (None, "switched off by HALOCONV_CUDA_LIBRARY=0")


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
@needs_library
def test_a_cuda_build_of_torch_loads_the_library():
    """Fails when the kernels lie there and are not used. No card is needed to load them."""
    done = loaded()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(LIBRARY)
