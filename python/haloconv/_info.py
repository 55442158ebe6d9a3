"""What is built, loaded and chosen here, and why not.

Nothing here needs a GPU, and nothing starts one: libraries that torch has loaded are asked for their versions. A module
that has something to say adds a section::

    @section("transport")
    def _transport():
        return {"chosen": "nccl", "why": "..."}

A section is a dict of plain values, dicts and lists, which ``--json`` prints as it is. One that fails says so in its
place: a report on what is wrong must not be stopped by it.
"""

import ctypes
import json
import os
import platform
import sys

import torch
import torch.distributed as dist

from . import _C
from ._version import __version__

_sections = {}


def section(name):
    """Registers a function under a heading; a later one of the same name replaces it."""

    def register(function):
        _sections[name] = function
        return function

    return register


def collect():
    """All sections, in the order in which they were registered."""
    result = {}
    for name, function in _sections.items():
        try:
            result[name] = function()
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"}
    return result


def loaded(soname):
    """A library of that name as it is loaded in this process, with its path, or (None, None)."""
    try:
        library = ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None, None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = [line.split(maxsplit=5)[5].strip() for line in maps if f"/{soname}" in line]
    return library, paths[0] if paths else soname


def dotted(number, parts):
    """13000 with (1000, 10) is 13.0: how CUDA, NCCL and cuDNN write versions as one number."""
    words = []
    for divisor in parts:
        words.append(number // divisor)
        number %= divisor
    return ".".join(str(word) for word in words)


@section("haloconv")
def _haloconv():
    return {"version": __version__, "path": os.path.dirname(__file__), "extension": _C.__file__}


@section("python")
def _python():
    return {"version": platform.python_version(), "path": sys.executable}


@section("torch")
def _torch():
    return {
        "version": torch.__version__,
        "path": os.path.dirname(torch.__file__),
        "cuda": torch.version.cuda or "none: a CPU build",
        "process groups": [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)],
    }


def _has_backend(name):
    return dist.is_available() and getattr(dist, f"is_{name}_available")()


@section("CUDA runtime")
def _runtime():
    major = (torch.version.cuda or "0").partition(".")[0]
    library, path = loaded(f"libcudart.so.{major}")
    if library is None:
        return {"loaded": False, "why": "torch is a CPU build" if major == "0" else "torch has not loaded it"}
    version = ctypes.c_int()
    if library.cudaRuntimeGetVersion(ctypes.byref(version)) != 0:
        return {"loaded": True, "path": path, "version": "unknown"}
    return {"loaded": True, "path": path, "version": dotted(version.value, (1000, 10))}


@section("NCCL")
def _nccl():
    library, path = loaded("libnccl.so.2")
    if library is None:
        return {"loaded": False, "why": "torch has not loaded libnccl.so.2"}
    version = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(version)) != 0:
        return {"loaded": True, "path": path, "version": "unknown"}
    return {"loaded": True, "path": path, "version": dotted(version.value, (10000, 100, 1))}


@section("cuDNN")
def _cudnn():
    library, path = loaded("libcudnn.so.9")
    if library is None:
        return {"loaded": False, "why": "torch has not loaded libcudnn.so.9"}
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return {"loaded": True, "path": path, "version": dotted(library.cudnnGetVersion(), (10000, 100, 1))}


@section("CUDA kernels")
def _kernels():
    about = _C.cuda_library()
    if about["path"] is None:
        return {"loaded": False, "why": about["reason"]}
    if about["for_tests"]:
        return {"loaded": True, "path": about["path"], "for": "tests: they run on the host"}
    driver = about["driver"]
    return {
        "loaded": True,
        "path": about["path"],
        "code for": about["archs"],
        "built with CUDA": dotted(about["runtime"], (1000, 10)),
        "driver's CUDA": dotted(driver, (1000, 10)) if driver else "none: there is no driver",
    }


@section("devices")
def _devices():
    if not torch.cuda.is_available():
        return {"cuda": "none seen"}
    return {f"cuda:{index}": _device(index) for index in range(torch.cuda.device_count())}


def _device(index):
    properties = torch.cuda.get_device_properties(index)
    reason = _C.cuda_device(index)
    return {
        "name": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "GiB": round(properties.total_memory / 2**30, 1),
        "kernels": "haloconv's" if reason is None else f"torch's: {reason}",
    }


@section("environment")
def _environment():
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("HALOCONV_")}


def lines(report, indent=""):
    """The report for a person."""
    for name, value in report.items():
        if isinstance(value, dict):
            yield f"{indent}{name}" + ("" if value else ": nothing set")
            yield from lines(value, indent + "    ")
        else:
            yield f"{indent}{name}: {_text(value)}"


def _text(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="as JSON, for programs and bug reports")


def main(arguments):
    report = collect()
    print(json.dumps(report, indent=1) if arguments.json else "\n".join(lines(report)))
    return 0
