"""What the build promises: one C extension for every Python and torch from the floors on, and clear ends.

The builds that must fail are run with made-up torch distributions, so nothing is downloaded or compiled.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import haloconv
import haloconv._C
import pytest

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(haloconv._C.__file__)
IN_TREE = (ROOT / "setup.py").exists()
INSTALL = "`pip install --no-build-isolation .`"

needs_source = pytest.mark.skipif(
    not IN_TREE, reason="setup.py is not there: an installed copy is being tested"
)


def output(*command, **options):
    options |= {"check": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, timeout=250, **options).stdout


def setup(folder, *arguments, version=None, library=True, environment=()):
    """Runs setup.py where the only torch is a made-up one of that version (None: there is no torch).

    Nothing of site-packages is in sys.path but setuptools, as in an isolated build.
    """
    site = folder / "site"
    site.mkdir()
    real = Path(importlib.util.find_spec("setuptools").origin).parent.parent
    for path in [real / "setuptools", real / "_distutils_hack", *real.glob("setuptools-*.dist-info")]:
        (site / path.name).symlink_to(path)
    if version is not None:
        metadata = site / f"torch-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        (site / "torch" / "lib").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text("raise ImportError('the build must not import torch')\n")
        if library:
            (site / "torch" / "lib" / "libtorch_cpu.so").write_text("")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALOCONV_")}
    clean |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    if arguments == ("build",):
        arguments += ("--build-base", str(folder / "build"))
    return subprocess.run(
        [sys.executable, "-S", "setup.py", *arguments],
        cwd=ROOT,
        env=clean | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )


def ends_with_sentence(done, *words):
    """The build stopped, with no traceback, and its last line is a sentence that says what to run."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("haloconv: "), done.stdout
    assert INSTALL in last, done.stdout
    for word in words:
        assert word in last, done.stdout


@needs_source
def test_build_without_torch_says_what_to_run(tmp_path):
    """Fails when an isolated build ends in `No module named torch` (CASES 30)."""
    done = setup(tmp_path, "build")
    ends_with_sentence(done, "torch 2.11 or newer must be installed", "`pip install torch`")
    assert "✗ torch: not installed" in done.stdout


@needs_source
@pytest.mark.parametrize("version", ["2.5.0", "2.10.1+cu128", "1.13.1"])
def test_build_with_an_old_torch_says_what_to_run(tmp_path, version):
    """Fails when a torch older than the floor is built against."""
    done = setup(tmp_path, "build", version=version)
    ends_with_sentence(
        done, f"torch {version} is installed", "2.11 or newer", "`pip install --upgrade torch`"
    )


@needs_source
def test_build_with_half_a_torch_says_what_to_run(tmp_path):
    """Fails when a torch without its library is taken for one."""
    done = setup(tmp_path, "build", version="2.14.1", library=False)
    ends_with_sentence(done, "incomplete", "`pip install --force-reinstall torch`")


@needs_source
def test_build_without_a_compiler_says_what_to_run(tmp_path):
    """Fails when a missing compiler ends in a traceback."""
    done = setup(tmp_path, "build", version="2.14.1", environment={"CC": "no-such-compiler"})
    ends_with_sentence(done, "no C compiler", "`apt-get install gcc`")
    assert "✓ torch: 2.14.1" in done.stdout


@needs_source
def test_metadata_needs_no_torch(tmp_path):
    """Fails when asking for the version or making a source archive wants torch."""
    done = setup(tmp_path, "--version")
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() == haloconv.__version__


@needs_source
def test_source_archive_is_complete_and_needs_no_torch(tmp_path):
    """Fails when a header or another file that the build reads is left out of the source archive."""
    done = setup(tmp_path, "--quiet", "sdist", "--dist-dir", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stdout
    (archive,) = (tmp_path / "dist").iterdir()
    names = {name.partition("/")[2] for name in output("tar", "tzf", str(archive)).splitlines()}
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("csrc/*.[ch]", "cuda/*.[ch]", "cuda/*.cu", "python/haloconv/*.py", "benchmarks/*.sh")
        for path in ROOT.glob(pattern)
    }
    assert wanted | {"setup.py", "build_cuda.py", "pyproject.toml", "LICENSE", "README.md"} <= names


@needs_source
def test_the_floors_are_written_once():
    """Fails when a second constant for the oldest Python or torch appears in the build's files."""
    for name in ("setup.py", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"torch\s*[><=]=\s*\d|\b2\.11\b|requires-python\s*=|>=\s*3\.1\d", text), name


def test_the_metadata_has_the_floors():
    """Fails when pip would install haloconv for a Python or torch that it does not run on."""
    try:
        metadata = importlib.metadata.metadata("haloconv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("haloconv is imported from a folder, not installed")
    assert metadata["Requires-Python"] == ">={}.{}".format(*floors()["MIN_PYTHON"])
    assert metadata.get_all("Requires-Dist") == ["torch>={}.{}".format(*floors()["MIN_TORCH"])]


def floors():
    values = {}
    exec((Path(haloconv.__file__).parent / "_floor.py").read_text(encoding="utf-8"), values)
    return values


def test_extension_exports_its_init_function_alone():
    """Fails when a function is visible that another library could collide with."""
    symbols = output("nm", "-D", "--defined-only", str(BINARY)).splitlines()
    assert [line.split()[-1] for line in symbols] == ["PyInit__C"]


def test_extension_links_libtorch_cpu_alone():
    """Fails when the binary is tied to one Python, to CUDA, to a C++ library, or to one machine."""
    dynamic = output("readelf", "-d", str(BINARY))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    system = ("libtorch_cpu.so", "libc.so", "libm.so", "libpthread.so", "libdl.so", "libgcc_s.so", "ld-linux")
    if os.environ.get("HALOCONV_SANITIZE"):
        system += ("libasan.so", "libubsan.so")
    assert [name for name in needed if not name.startswith(system)] == []
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_extension_has_the_stable_name():
    """Fails when the binary is named for one version of Python."""
    assert BINARY.name == "_C.abi3.so"


def test_haloconv_imports_torch_first():
    """Fails when importing haloconv before torch ends in an undefined symbol (CASES 29, 36)."""
    program = "import haloconv, sys; assert 'torch' in sys.modules; print(haloconv.__version__)"
    assert output(sys.executable, "-c", program).strip() == haloconv.__version__


@needs_source
def test_wheel_is_for_every_python_from_the_floor_on(tmp_path):
    """Fails when the wheel is tagged for one Python, or holds anything but the package."""
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path / "build")]
    quick = os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0"}
    output(*command, "bdist_wheel", "--dist-dir", str(tmp_path / "dist"), cwd=ROOT, env=quick)
    (wheel,) = (tmp_path / "dist").iterdir()
    oldest = "cp{}{}".format(*floors()["MIN_PYTHON"])
    assert re.fullmatch(
        rf"haloconv-{re.escape(haloconv.__version__)}-{oldest}-abi3-linux_\w+\.whl", wheel.name
    )
    names = zipfile.ZipFile(wheel).namelist()
    assert "haloconv/_C.abi3.so" in names
    assert {name.partition("/")[0] for name in names} == {
        "haloconv",
        f"haloconv-{haloconv.__version__}.dist-info",
    }
