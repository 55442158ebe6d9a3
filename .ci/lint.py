"""What `make lint` runs: every linter and every rule of the repository that a machine can check.

With --fix, ruff and clang-format rewrite the files first.
Run with the Python of an environment that holds requirements-lint.txt; tools are taken from beside it, else
from the PATH. All checks run even when one fails; the exit status is 1 if any did.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 700
SOURCES = (
    "csrc/",
    "cuda/",
    "python/",
    "benchmarks/",
    "examples/",
    "tests/",
    ".ci/",
    "setup.py",
    "build_cuda.py",
)
PRODUCT = ("csrc/", "cuda/", "python/")


def tracked():
    """The files of the repository: those in git and those about to be, minus those deleted."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split(
        "\n"
    )
    return [name for name in names if name and (ROOT / name).is_file()]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def tool(name):
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"haloconv: {name} was not found: run `pip install -r requirements-lint.txt`.")
    return found


def run(*command):
    """The output of a command that failed, or None."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return None if done.returncode == 0 else done.stdout or f"{command[0]} ended with {done.returncode}"


def each(function, items):
    """What is wrong with the items, in their order, looked at on every core: the last checks compile each source."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "".join(filter(None, pool.map(function, items))) or None


def matches(names, pattern):
    """Every line that a pattern finds in the files, as file:line: text, or None."""
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in names
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if re.search(pattern, line)
    ]
    return "\n".join(found) or None


def check_cpp(names):
    return "\n".join(name for name in names if re.search(r"\.(cc|cpp|cxx|hpp|hh|hxx|C)$", name)) or None


def check_length(names):
    long = [
        f"{name}: {len(text_of(name).splitlines())} lines"
        for name in names
        if name.startswith(SOURCES)
        and not name.endswith(".json")  # results, written by a program
        and len(text_of(name).splitlines()) > MAX_LINES
    ]
    return "\n".join(long) or None


def check_machine_paths(names):
    texts = [name for name in names if b"\0" not in (ROOT / name).read_bytes()[:4096]]
    return matches(texts, r"(^|[^A-Za-z0-9_.~}])/(work|root|farm|home)/")


def check_open_ends(names):
    words = "|".join(["TODO", "FIXME", "XXX", "HACK"])
    pattern = rf"\b({words})\b|NotImplemented" + r"Error|not implemented yet"
    return matches([name for name in names if name.startswith(PRODUCT)], pattern)


def check_clang_format(names):
    wrong = [name for name in names if run(tool("clang-format"), "--dry-run", "-Werror", name)]
    return "\n".join(f"{name} is not formatted: run `make format`" for name in wrong) or None


def check_clang_tidy(sources):
    wrong = run(sys.executable, "setup.py", "--quiet", "compile_commands")
    if wrong:
        return wrong
    # gcc's own warnings are gcc's business (the check after this one); clang need not know all its options.
    command = [tool("clang-tidy"), "-p", "build", "--quiet", "--extra-arg=-Wno-unknown-warning-option"]
    return each(lambda source: run(*command, source), sources)


def check_gcc(sources):
    """Compiles with warnings as errors, optimised: some warnings need the optimiser."""
    entries = json.loads((ROOT / "build" / "compile_commands.json").read_text(encoding="utf-8"))
    if len(entries) != len(sources):
        return "build/compile_commands.json does not list every source"
    arguments = {entry["file"]: entry["arguments"] for entry in entries}
    return each(lambda source: run(*arguments[source], "-Werror", "-o", os.devnull), sources)


def main():
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"
    names = tracked()
    sources = [name for name in names if re.fullmatch(r"csrc/.*\.c", name)]
    formatted = [name for name in names if re.fullmatch(r"(csrc|cuda)/.*\.(c|h|cu|cuh)", name)]
    python = [name for name in names if name.endswith(".py")]
    shell = [
        name for name in names if name.startswith(".ci/") and text_of(name).startswith("#!/usr/bin/env bash")
    ]
    checks = [
        ("no C++ file", check_cpp, names),
        (f"no file of more than {MAX_LINES} lines", check_length, names),
        ("no path of one machine", check_machine_paths, names),
        ("nothing left open", check_open_ends, names),
        ("shell scripts parse", lambda files: run("bash", "-n", *files), shell),
        (
            "ruff check",
            lambda files: run(tool("ruff"), "check", "--quiet", "--output-format=concise", *files),
            python,
        ),
        (
            "ruff format",
            lambda files: run(tool("ruff"), "format", "--check", "--output-format=concise", *files),
            python,
        ),
        ("clang-format", check_clang_format, formatted),
        ("clang-tidy", check_clang_tidy, sources),
        ("gcc -Werror", check_gcc, sources),
    ]
    if "--fix" in sys.argv:
        run(tool("ruff"), "check", "--quiet", "--fix", *python)
        run(tool("ruff"), "format", "--quiet", *python)
        run(tool("clang-format"), "-i", *formatted)
    failed = 0
    for title, check, files in checks:
        start = time.monotonic()
        wrong = check(files) if files else "there is nothing to check: did the layout change?"
        took = time.monotonic() - start
        print(f"{'✗' if wrong else '✓'} {title} ({len(files)} files, {took:.1f} s)", flush=True)
        if wrong:
            failed += 1
            print(wrong.rstrip(), flush=True)
    print(f"lint: {len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
