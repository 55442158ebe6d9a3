"""Builds haloconv and its one extension module, ``haloconv._C``.

``pip install --no-build-isolation .`` is the install line. ``_C`` is C11, compiled by the C compiler alone:
no C++ compiler, no header of torch's. It uses Python's limited API and libtorch's stable C ABI, so that a
binary built against one torch runs on every later one, and on every Python from the floor on.

torch is needed to build (libtorch_cpu.so is linked), and it must be the torch that haloconv will run with:
that is why it is not among the build requirements, where an isolated build would fetch another one. What
asks only for metadata (``setup.py --version``, ``egg_info``, ``sdist``) works without torch.

The CUDA kernels are a library of their own, which _C loads where it is of use: see build_cuda.py. One wheel serves
CPU and CUDA builds of torch.

Environment: HALOCONV_WERROR=1 makes warnings errors, HALOCONV_SANITIZE=1 builds with AddressSanitizer and
UndefinedBehaviorSanitizer, HALOCONV_FAULTS=1 compiles the fault-injection hooks of the tests in. USE_CUDA=auto|0|1,
CUDA_HOME and TORCH_CUDA_ARCH_LIST: of the CUDA kernels. MAX_JOBS: how many files are compiled at once.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip runs this file without its folder

import build_cuda  # noqa: E402

INSTALL = "`pip install --no-build-isolation .`"


def constants(name):
    """The constants of a module of the package, which can't be imported before it is built."""
    values = {}
    exec((ROOT / "python" / "haloconv" / name).read_text(encoding="utf-8"), values)
    return values


FLOOR = constants("_floor.py")
VERSION = constants("_version.py")["__version__"]
MIN_PYTHON = FLOOR["MIN_PYTHON"]
MIN_TORCH = FLOOR["MIN_TORCH"]


def dotted(numbers):
    return ".".join(str(number) for number in numbers)


def stop(sentence):
    """Ends the build with one sentence instead of a traceback."""
    sys.stdout.flush()
    raise SystemExit(f"haloconv: {sentence}")


def report(found, part, detail):
    """One line of the build's report; pip shows it with -v, and whenever the build fails."""
    line = f"{'✓' if found else '✗'} {part}: {detail}"
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)


def installed(distribution):
    """A distribution's version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python_and_setuptools():
    if sys.version_info < MIN_PYTHON:
        stop(
            f"Python {dotted(MIN_PYTHON)} or newer is needed and this is {dotted(sys.version_info[:3])}: "
            f"run `pip install torch`, then {INSTALL}, with a newer Python."
        )
    requirements = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"setuptools>=(\d+)", requirements).group(1)
    found = installed("setuptools") or "none"
    if found == "none" or int(found.partition(".")[0]) < int(needed):
        stop(
            f"setuptools {needed} or newer is needed and {found} is installed: "
            f"run `pip install --upgrade setuptools`, then {INSTALL}."
        )


check_python_and_setuptools()

from setuptools import Extension, setup  # noqa: E402  after the check that gives the clearer message
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.dist_info import dist_info  # noqa: E402


def find_torch():
    """The folder of the installed torch's libraries, found without importing it."""
    floor = dotted(MIN_TORCH)
    version = installed("torch")
    if version is None:
        report(False, "torch", f"not installed for {sys.executable}")
        stop(
            f"torch {floor} or newer must be installed where haloconv is built: "
            f"run `pip install torch`, then {INSTALL}."
        )
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < MIN_TORCH:
        report(False, "torch", version)
        stop(
            f"torch {version} is installed and haloconv needs {floor} or newer: "
            f"run `pip install --upgrade torch`, then {INSTALL}."
        )
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if libraries is None or not (libraries / "libtorch_cpu.so").exists():
        report(False, "torch", f"{version}, without libtorch_cpu.so")
        stop(
            f"the installed torch {version} is incomplete: "
            f"run `pip install --force-reinstall torch`, then {INSTALL}."
        )
    report(True, "torch", f"{version} ({floor} or newer is needed)")
    return libraries


def check_platform():
    if sys.platform != "linux":
        stop(f"it runs on Linux only, and this is {sys.platform}: run {INSTALL} on a Linux machine.")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        stop(
            "the free-threaded build of Python has no limited API: "
            f"run `pip install torch`, then {INSTALL}, with the regular one."
        )


def check_compiler(command):
    """Stops unless the C compiler is there, and Python's header."""
    compiler = shutil.which(command[0])
    if compiler is None:
        report(False, "C compiler", f"{command[0]} not found")
        stop(f"no C compiler was found: run `apt-get install gcc` or its like, then {INSTALL}.")
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    report(True, "C compiler", version.partition("\n")[0] or compiler)
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        report(False, "Python.h", f"not in {include}")
        stop(f"Python's C header is missing: run `apt-get install python3-dev` or its like, then {INSTALL}.")


def switched_on(name):
    return os.environ.get(name, "0") not in ("", "0")


def sanitizers():
    return ["-fsanitize=address,undefined"] if switched_on("HALOCONV_SANITIZE") else []


def compile_arguments():
    arguments = [
        "-std=c11",
        "-O3",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Wconversion",
        "-Wstrict-prototypes",
        "-Wmissing-prototypes",
        "-fexceptions",  # torch's C++ exceptions pass through our frames
        "-fvisibility=hidden",
    ]
    if switched_on("HALOCONV_SANITIZE"):
        arguments += ["-g", "-fno-omit-frame-pointer", *sanitizers(), "-fno-sanitize-recover=all"]
    if switched_on("HALOCONV_SANITIZE") or switched_on("HALOCONV_FAULTS"):
        arguments += ["-O0"]  # for tests alone, which build it often: a fifth of the time
    if switched_on("HALOCONV_WERROR"):
        arguments += ["-Werror"]
    return arguments


def macros():
    abi = (MIN_TORCH[0] << 56) | (MIN_TORCH[1] << 48)
    defines = [
        ("Py_LIMITED_API", "0x{:02X}{:02X}0000".format(*MIN_PYTHON)),
        ("HC_TORCH_ABI_VERSION", f"0x{abi:016X}ULL"),
    ]
    if switched_on("HALOCONV_FAULTS"):
        defines += [("HC_FAULTS", None)]
    return defines


class BuildExt(build_ext):
    """Checks what the build needs, and keeps one Python's habits out of a binary meant for all of them."""

    def run(self):
        check_platform()
        (extension,) = self.extensions
        if not extension.sources:
            stop(f"csrc/ holds no C source: run {INSTALL} in a complete copy of the repository.")
        extension.library_dirs = [str(find_torch())]
        super().run()

    def build_extensions(self):
        check_compiler(self.compiler.compiler_so)
        self.build_cuda()
        # A Python that was built shared adds its own folder as a run path.
        self.compiler.linker_so = [word for word in self.compiler.linker_so if "-rpath" not in word]
        self.compile_at_once()
        stamp, flags = Path(self.build_temp) / "flags.json", self.flags()
        # setuptools compares dates only; other flags or another torch must build anew as well.
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != flags:
            self.force = True
        super().build_extensions()
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(flags, encoding="utf-8")  # last: a build that failed has made nothing

    def compile_at_once(self):
        """setuptools compiles one source after another; here MAX_JOBS of them at a time."""
        compile_all = self.compiler.compile
        try:
            jobs = build_cuda.jobs(os.environ)
        except build_cuda.CudaError as error:
            stop(f"{error}: mend that, then run {INSTALL}.")

        def compile_each(sources, **options):
            with ThreadPoolExecutor(jobs) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each

    def build_cuda(self):
        """Makes the kernels, or removes an old library that this build would not make."""
        target = self.cuda_library()
        try:
            plan = build_cuda.plan(Path(self.extensions[0].library_dirs[0]).parent, os.environ)
            report(plan.nvcc is not None, "CUDA kernels", plan.text)
            if plan.nvcc is not None:
                build_cuda.build(
                    plan, ROOT, Path(self.build_temp), target, switched_on("HALOCONV_WERROR"), report
                )
            else:
                target.unlink(missing_ok=True)
        except build_cuda.CudaError as error:
            report(False, "CUDA kernels", error)
            stop(f"{error}: mend that, or build without them by USE_CUDA=0, then run {INSTALL}.")

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        made = Path(self.build_lib) / "haloconv" / build_cuda.LIBRARY
        if made.exists():
            self.copy_file(str(made), str(self.cuda_library()))
        else:
            self.cuda_library().unlink(missing_ok=True)

    def cuda_library(self):
        """Where the kernels go, beside _C: in the build's folder, or in place once that is done."""
        return Path(self.get_ext_fullpath(self.extensions[0].name)).with_name(build_cuda.LIBRARY)

    def get_outputs(self):
        made = self.cuda_library()
        return super().get_outputs() + [str(made)] * made.exists()

    def get_libraries(self, ext):
        return ext.libraries  # a Python that was built shared adds libpython3.x, the library of one version

    def flags(self):
        """What an object depends on besides the sources."""
        (extension,) = self.extensions
        compiler = self.compiler.compiler_so
        return json.dumps([compiler, extension.extra_compile_args, macros(), extension.library_dirs])


class DistInfo(dist_info):
    """pip asks for this first: stop here, before it fetches the dependencies of what can't be built."""

    def run(self):
        check_platform()
        find_torch()
        super().run()


class CompileCommands(build_ext):
    """What clang-tidy reads to know how a source is compiled. Needs neither torch nor a compiler."""

    description = "write build/compile_commands.json"

    def run(self):
        (extension,) = self.extensions
        defines = [f"-D{name}={value}" if value else f"-D{name}" for name, value in macros()]
        command = ["gcc", *compile_arguments(), "-fPIC", *defines, "-I" + sysconfig.get_path("include")]
        entries = [
            {"directory": str(ROOT), "file": source, "arguments": [*command, "-c", source]}
            for source in extension.sources
        ]
        target = ROOT / "build" / "compile_commands.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(entries, indent=1), encoding="utf-8")


def relative(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


setup(
    version=VERSION,
    python_requires=f">={dotted(MIN_PYTHON)}",
    install_requires=[f"torch>={dotted(MIN_TORCH)}"],
    ext_modules=[
        Extension(
            "haloconv._C",
            sources=relative("csrc/*.c"),
            depends=relative("csrc/*.h") + relative("cuda/*.*"),
            define_macros=macros(),
            extra_compile_args=compile_arguments(),
            extra_link_args=sanitizers(),
            libraries=["torch_cpu", "m"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*MIN_PYTHON)}},
    cmdclass={"build_ext": BuildExt, "dist_info": DistInfo, "compile_commands": CompileCommands},
)
