"""Builds haloconv and its one extension module, ``haloconv._C``.

``pip install --no-build-isolation .`` is the install line. ``_C`` is C11, compiled by the C compiler alone: no
C++ compiler, no header of torch's. It uses Python's limited API and libtorch's stable C ABI, so the binary that
is built against one torch runs on every later one, and on every Python from the floor on.

torch is needed to build (libtorch_cpu.so is linked), and it must be the torch that haloconv will run with: that
is why it is not among the build requirements, where an isolated build would fetch another one. What asks only
for metadata (``setup.py --version``, ``egg_info``, ``sdist``) works without torch.

Environment: HALOCONV_WERROR=1 makes warnings errors, HALOCONV_SANITIZE=1 builds with AddressSanitizer and
UndefinedBehaviorSanitizer, HALOCONV_FAULTS=1 compiles the fault-injection hooks of the tests in.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent
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
    raise SystemExit("haloconv: " + sentence)


if sys.version_info < MIN_PYTHON:
    stop(
        "Python %s or newer is needed and this is %s: run `pip install torch`, then %s, with a newer Python."
        % (dotted(MIN_PYTHON), dotted(sys.version_info[:3]), INSTALL)
    )

MIN_SETUPTOOLS = re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")).group(
    1
)
try:
    SETUPTOOLS = importlib.metadata.version("setuptools")
except importlib.metadata.PackageNotFoundError:
    SETUPTOOLS = "none"
if SETUPTOOLS == "none" or int(SETUPTOOLS.partition(".")[0]) < int(MIN_SETUPTOOLS):
    stop(
        "setuptools %s or newer is needed and %s is installed: run `pip install --upgrade setuptools`, then %s."
        % (MIN_SETUPTOOLS, SETUPTOOLS, INSTALL)
    )

from setuptools import Extension, setup  # noqa: E402  after the checks that give the clearer message
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.dist_info import dist_info  # noqa: E402


def report(found, part, detail):
    """One line of the build's report; pip shows it with -v, and whenever the build fails."""
    line = "%s %s: %s" % ("✓" if found else "✗", part, detail)
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)


def find_torch():
    """The installed torch's version and the folder of its libraries, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        report(False, "torch", "not installed for %s" % sys.executable)
        stop(
            "torch %s or newer must be installed where haloconv is built: run `pip install torch`, then %s."
            % (dotted(MIN_TORCH), INSTALL)
        )
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH:
        report(False, "torch", version)
        stop(
            "torch %s is installed and haloconv needs %s or newer: run `pip install --upgrade torch`, then %s."
            % (version, dotted(MIN_TORCH), INSTALL)
        )
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if libraries is None or not (libraries / "libtorch_cpu.so").exists():
        report(False, "torch", "%s, without libtorch_cpu.so in %s" % (version, libraries))
        stop(
            "the installed torch %s is incomplete: run `pip install --force-reinstall torch`, then %s."
            % (version, INSTALL)
        )
    report(True, "torch", "%s (%s or newer is needed)" % (version, dotted(MIN_TORCH)))
    return libraries


def check_platform():
    if sys.platform != "linux":
        stop("it runs on Linux only, and this is %s: run %s on a Linux machine." % (sys.platform, INSTALL))
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        stop(
            "the free-threaded build of Python has no limited API: run `pip install torch`, then %s, "
            "with the regular one." % INSTALL
        )


def check_compiler(command):
    """Stops unless the C compiler runs and Python's header is there."""
    compiler = shutil.which(command[0])
    if compiler is None:
        report(False, "C compiler", "%s not found" % command[0])
        stop("no C compiler was found: install gcc (on Debian `apt-get install gcc`), then run %s." % INSTALL)
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout
    report(True, "C compiler", version.partition("\n")[0] or compiler)
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        report(False, "Python.h", "not in %s" % sysconfig.get_path("include"))
        stop(
            "Python's C header was not found: install it (on Debian `apt-get install python3-dev`), then run %s."
            % INSTALL
        )


def switched_on(name):
    return os.environ.get(name, "0") not in ("", "0")


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
        arguments += ["-O1", "-g", "-fno-omit-frame-pointer", *sanitizers(), "-fno-sanitize-recover=all"]
    if switched_on("HALOCONV_WERROR"):
        arguments += ["-Werror"]
    return arguments


def sanitizers():
    return ["-fsanitize=address,undefined"] if switched_on("HALOCONV_SANITIZE") else []


def macros():
    abi = (MIN_TORCH[0] << 56) | (MIN_TORCH[1] << 48)
    defines = [
        ("Py_LIMITED_API", "0x%02X%02X0000" % MIN_PYTHON),
        ("HC_TORCH_ABI_VERSION", "0x%016XULL" % abi),
    ]
    if switched_on("HALOCONV_FAULTS"):
        defines += [("HC_FAULTS", None)]
    return defines


class BuildExt(build_ext):
    """Checks what the build needs, and keeps this one Python's habits out of a binary meant for all of them."""

    def run(self):
        if not self.extensions[0].sources:
            stop("csrc/ holds no C source: run %s in a complete copy of the repository." % INSTALL)
        check_platform()
        self.extensions[0].library_dirs = [str(find_torch())]
        super().run()

    def build_extensions(self):
        check_compiler(self.compiler.compiler_so)
        report(False, "cuda part", "not built in this version")
        # A Python of a shared build adds its own folder as a run path.
        self.compiler.linker_so = [word for word in self.compiler.linker_so if "-rpath" not in word]
        self.rebuild_if_changed()
        super().build_extensions()

    def get_libraries(self, ext):
        return ext.libraries  # a Python of a shared build adds libpython3.x, which belongs to one version

    def rebuild_if_changed(self):
        """setuptools compares dates only: other flags or another torch must build anew as well."""
        extension = self.extensions[0]
        stamp = Path(self.build_temp) / "flags.json"
        flags = json.dumps(
            [
                self.compiler.compiler_so,
                extension.extra_compile_args,
                macros(),
                extension.library_dirs,
                VERSION,
            ]
        )
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != flags:
            self.force = True
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(flags, encoding="utf-8")


class DistInfo(dist_info):
    """pip asks for this first: it stops here, before it fetches the dependencies of what can't be built."""

    def run(self):
        check_platform()
        find_torch()
        super().run()


class CompileCommands(build_ext):
    """Writes build/compile_commands.json, which clang-tidy reads. Needs neither torch nor a compiler."""

    description = "write build/compile_commands.json"

    def run(self):
        define = ["-D%s=%s" % item if item[1] else "-D%s" % item[0] for item in macros()]
        include = ["-I" + str(path) for path in dict.fromkeys([sysconfig.get_path("include")])]
        commands = [
            {
                "directory": str(ROOT),
                "file": source,
                "arguments": ["gcc", *compile_arguments(), "-fPIC", *define, *include, "-c", source],
            }
            for source in self.extensions[0].sources
        ]
        target = ROOT / "build" / "compile_commands.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(commands, indent=1), encoding="utf-8")
        print("wrote %s for %d files" % (target.relative_to(ROOT), len(commands)))


def relative(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


setup(
    version=VERSION,
    python_requires=">=" + dotted(MIN_PYTHON),
    install_requires=["torch>=" + dotted(MIN_TORCH)],
    ext_modules=[
        Extension(
            "haloconv._C",
            sources=relative("csrc/*.c"),
            depends=relative("csrc/*.h"),
            define_macros=macros(),
            extra_compile_args=compile_arguments(),
            extra_link_args=sanitizers(),
            libraries=["torch_cpu"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp%d%d" % MIN_PYTHON}},
    cmdclass={"build_ext": BuildExt, "dist_info": DistInfo, "compile_commands": CompileCommands},
)
