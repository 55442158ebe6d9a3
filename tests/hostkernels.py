"""The kernels of cuda/ as a library for the host, by ctypes: what cuda/blocks_host.c exports.

It is compiled where it is asked for, into a folder that goes with the process; under `make sanitize` with the
sanitizers.
"""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "cuda" / "blocks_host.c"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Wmissing-prototypes"]
FLAGS = ["-std=c11", "-O2", "-g", *WARNINGS, "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
DIMS, SPAN_DIMS, SPANS, UNITS_MAX = 6, 7, 16, 2**30  # csrc/block.h, cuda/block_body.h, cuda/block_launch.h
OTHER, FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = range(5)  # hc_element
INVALID_VALUE, MISALIGNED = 1, 716  # cudaError_t

Int64s = ctypes.c_int64 * DIMS


class Block(ctypes.Structure):
    """hc_block. Strides in elements."""

    _fields_ = [
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("ndim", ctypes.c_int64),
        ("sizes", Int64s),
        ("target_strides", Int64s),
        ("source_strides", Int64s),
    ]

    def __init__(self, target, source, sizes, target_strides, source_strides):
        arrays = [Int64s(*values) for values in (sizes, target_strides, source_strides)]
        super().__init__(target, source, len(sizes), *arrays)


class Divider(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("divisor", "magic", "shift")]


class Span(ctypes.Structure):
    """hc_span. Strides in bytes."""

    _fields_ = [
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("target_strides", ctypes.c_int64 * SPAN_DIMS),
        ("source_strides", ctypes.c_int64 * SPAN_DIMS),
        ("sizes", Divider * (SPAN_DIMS - 1)),
        ("units", ctypes.c_uint32),
        ("ndim", ctypes.c_int16),
        ("width", ctypes.c_int16),
    ]


class About(ctypes.Structure):
    """hc_cuda_about."""

    _fields_ = [(name, ctypes.c_int32) for name in ("abi", "host", "runtime_version", "driver_version")] + [
        ("archs", ctypes.c_char * 96)
    ]


def build(folder, *flags):
    """Compiles the library into a folder; its path."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    target = Path(folder) / "libhaloconv_host.so"
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'cuda'}"]
    subprocess.run([compiler, *FLAGS, *flags, *includes, str(SOURCE), "-o", str(target)], check=True)
    return target


@functools.cache
def path():
    folder = tempfile.mkdtemp(prefix="haloconv-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder, *(SANITIZERS if os.environ.get("HALOCONV_SANITIZE") == "1" else ()))


@functools.cache
def library():
    return load(path())


def load(where):
    found = ctypes.CDLL(str(where))
    int64, void = ctypes.c_int64, ctypes.c_void_p
    blocks = ctypes.POINTER(Block)
    for name, result, *arguments in [
        ("hc_cuda_blocks_copy", ctypes.c_int, blocks, int64, int64, void),
        ("hc_cuda_blocks_fill", ctypes.c_int, blocks, int64, int64, void, void),
        ("hc_cuda_blocks_add", ctypes.c_int, blocks, int64, ctypes.c_int, void),
        ("hc_cuda_error_text", ctypes.c_char_p, ctypes.c_int),
        ("hc_cuda_tell", None, ctypes.POINTER(About)),
        ("hc_cuda_device_check", ctypes.c_int, ctypes.c_int),
        ("hc_cuda_device_set", ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
        ("hc_host_geometry", None, ctypes.c_int, ctypes.c_uint64),
        ("hc_host_launch_count", int64),
        ("hc_host_divide", ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32),
        ("hc_host_spans", int64, blocks, int64, int64, ctypes.c_bool, int64, ctypes.POINTER(Span)),
    ]:
        function = getattr(found, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
    return found


def array_of(blocks):
    return (Block * len(blocks))(*blocks)


def spans_of(blocks, element_size, adds=False):
    """The spans that blocks become, as a list; an error as a negative number."""
    count = library().hc_host_spans(array_of(blocks), len(blocks), element_size, adds, 0, None)
    if count < 0:
        return count
    spans = (Span * count)()
    library().hc_host_spans(array_of(blocks), len(blocks), element_size, adds, count, spans)
    return list(spans)


if __name__ == "__main__":  # hostkernels.py FOLDER: builds it there, and prints its path
    os.makedirs(sys.argv[1], exist_ok=True)
    print(build(sys.argv[1]))
