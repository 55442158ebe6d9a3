"""csrc/torch_abi.h repeats prototypes that torch has only in C++ headers: are they torch's own?

A compiler compares them: a generated C++ file includes torch's headers and then ours, so a prototype that
differs is a conflicting declaration. And libtorch itself is asked whether it exports each name.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "torch_abi.h"
TORCH = Path(torch.__file__).parent

# torch's headers that declare what we use; the generated ones hold one function an operator.
TORCH_HEADERS = (
    "torch/csrc/stable/c/shim.h",
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
)

# Declared weak because the oldest supported torch lacks them, with the release that brings each. On an older
# one the reference stays NULL.
WEAK = {"torch_exception_get_what_without_backtrace": (2, 13)}

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not HEADER.exists(), reason="csrc/ is not there: an installed copy is being tested"),
]


def version():
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def declarations():
    """{name: its declaration} of every function that torch_abi.h declares."""
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", " ", text, flags=re.MULTILINE).replace('extern "C" {', " ")
    found = {}
    for statement in re.split(r"[;{}]", text):
        declaration = " ".join(statement.split())
        named = re.match(r"(?!typedef\b)[^(]*?\b((?:aoti_)?torch_\w+)\s*\(", declaration)
        if named:
            found[named.group(1)] = declaration
    return found


def compiles(folder, header):
    """What g++ says of torch's headers followed by `header`: empty when the two agree."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: torch's C++ headers cannot be read")
    source = folder / "compare.cpp"
    numbers = torch.__version__.split("+")[0].split(".")
    # torch hides what is newer than the version an extension says it targets, and the device shims.
    lines = [
        f"#define TORCH_TARGET_VERSION ((({numbers[0]}ULL) << 56) | (({numbers[1]}ULL) << 48))",
        "#define USE_CUDA 1",
        *(f"#include <{name}>" for name in TORCH_HEADERS if (TORCH / "include" / name).exists()),
        f'#include "{header}"',
    ]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", *include, str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    return done.stdout if done.returncode else ""


def exported(library):
    nm = subprocess.run(
        ["nm", "-D", "--defined-only", str(TORCH / "lib" / library)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    return {line.split()[-1].partition("@")[0] for line in nm.stdout.splitlines()}


def changed(declaration):
    """The declaration with one parameter more."""
    head = declaration.partition("__attribute__")[0].rpartition(")")[0]
    name, _, parameters = head.partition("(")
    return f"{name}(int);" if parameters.strip() in ("", "void") else f"{head}, int);"


def test_prototypes_are_torchs_own(tmp_path):
    """Fails when a prototype in torch_abi.h is not the one in torch's headers."""
    assert compiles(tmp_path, HEADER) == ""


def test_every_function_is_in_torchs_headers(tmp_path):
    """Fails when torch's headers lack a function, so that nothing above compared its prototype.

    Taking the address of each name, with our header left out, needs torch's own declaration of it.
    """
    names = [name for name in declarations() if version() >= WEAK.get(name, (0, 0))]
    assert len(names) > 20
    uses = tmp_path / "uses.h"
    uses.write_text("\n".join(f"static auto *use_{name} = &{name};" for name in names), encoding="utf-8")
    assert compiles(tmp_path, uses) == ""


def test_a_wrong_prototype_is_noticed(tmp_path):
    """Fails when the comparison above has no teeth: with one parameter more, each must be refused."""
    found = {name: text for name, text in declarations().items() if version() >= WEAK.get(name, (0, 0))}
    wrong = tmp_path / "wrong.h"
    lines = ['extern "C" {', *(changed(text) for text in found.values()), "}"]
    wrong.write_text("\n".join(lines), encoding="utf-8")
    said = compiles(tmp_path, wrong)
    noticed = set(
        re.findall(r"error: conflicting declaration of C function .*?\b((?:aoti_)?torch_\w+)\(", said)
    )
    assert noticed == set(found)


def test_libtorch_exports_every_function():
    """Fails when the extension would not load: `undefined symbol`."""
    needed = {name for name in declarations() if version() >= WEAK.get(name, (0, 0))}
    assert needed - exported("libtorch_cpu.so") == set()


def test_weak_functions_are_the_ones_newer_than_the_floor():
    """Fails when a function is weak without a release to its name, or the other way round."""
    weak = {name for name, text in declarations().items() if re.search(r"__attribute__\s*\(\(weak\)\)", text)}
    assert weak == set(WEAK)
    floor = {}
    exec((ROOT / "python" / "haloconv" / "_floor.py").read_text(encoding="utf-8"), floor)
    assert all(since > floor["MIN_TORCH"] for since in WEAK.values())


def test_c_alone_reads_the_header(tmp_path):
    """Fails when torch_abi.h needs C++ or anything of torch's to be compiled."""
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{HEADER}"\n', encoding="utf-8")
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)], check=True
    )
