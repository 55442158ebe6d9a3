"""Breaks the library on purpose, one line at a time, and checks that the tests notice.

    python tests/mutation.py [--short] [--only NAME ...] [--list]

Each mutant is a copy of the working tree in a temporary folder with one piece of text replaced, built there
and tested there by the core of the suite in its short form. A mutant survives, and this script fails, when
fewer than `ENOUGH` tests fail (or, for a mutant with its own number, fewer than that). It also fails when a
mutant's text isn't in the source any more: then the mutant has to follow the source.

--short (or --quick): the three that every change of the rule must be safe against: a (k-1)/2 halo, global
ranks, the last dim.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 8  # failed tests; pytest stops at twice as many
TIMEOUT_S = 400
TESTS = (
    "tests/test_cases.py",
    "tests/test_cases_from_16.py",
    "tests/test_convolution_fuzz.py",
    "tests/test_convolution_paths.py",
    "tests/test_plan.py",
    "tests/test_ops.py",
)


class Mutant(NamedTuple):
    name: str
    what: str
    file: str
    old: str
    new: str
    short: bool = False
    enough: int = ENOUGH
    tests: tuple = TESTS
    select: str = ""  # for pytest -k


MUTANTS = [
    Mutant(
        "half-kernel",
        "the halo is (k-1)/2 whatever stride and padding are",
        "csrc/plan.c",
        "in.begin = out.begin * window->stride - window->pad_lo;\n"
        "    in.end = (out.end - 1) * window->stride - window->pad_lo + reach(window) + 1;",
        "in.begin = out.begin - (window->kernel - 1) / 2;\n    in.end = out.end + (window->kernel - 1) / 2;",
        short=True,
    ),
    Mutant(
        "global-ranks",
        "positions in the group are used as global ranks",
        "python/haloconv/_transport.py",
        "group_peer=peer",
        "peer=peer",
        short=True,
        select="subgroup or case_03",
    ),
    Mutant(
        "last-dim",
        "the exchange is always along the last dim",
        "csrc/kernels.c",
        "const int64_t d = call->dims[i] - 2;",
        "const int64_t d = n - 1;",
        short=True,
    ),
    Mutant(
        "last-column",
        "the last column that a window reads is left out",
        "csrc/plan.c",
        "in.end = (out.end - 1) * window->stride - window->pad_lo + reach(window) + 1;",
        "in.end = (out.end - 1) * window->stride - window->pad_lo + reach(window);",
    ),
    Mutant(
        "no-dilation",
        "the reach of a window ignores the dilation",
        "csrc/plan.c",
        "return window->dilation * (window->kernel - 1);",
        "return window->kernel - 1;",
    ),
    Mutant(
        "left-padding",
        "padding is taken from the right side",
        "csrc/plan.c",
        "in.begin = out.begin * window->stride - window->pad_lo;",
        "in.begin = out.begin * window->stride - window->pad_hi;",
        enough=3,
    ),
    Mutant(
        "even-shards",
        "shards are cut as floor(size / world)",
        "csrc/shard.c",
        r"regex:\(size \+ world - 1\) / world|hc_ceil_div\(size, world\)",
        "size / world",
    ),
    Mutant(
        "clip-off-by-one",
        "a segment loses its last column",
        "csrc/plan.c",
        "const hc_interval both = hc_intersect(extent, image);",
        "hc_interval both = hc_intersect(extent, image); if (peer > 0 && hc_length(both) > 1) { --both.end; }",
    ),
    Mutant(
        "neighbours-only",
        "only the two direct neighbours send",
        "csrc/plan.c",
        "    if (peer != rank) {\n",
        "    if (peer == rank - 1 || peer == rank + 1) {\n",
    ),
    Mutant(
        "adjoint-without-zero-columns",
        "windows that touch the strip only from before it are dropped in backward",
        "csrc/plan.c",
        "  if (before < behind) {",
        "  if (false) {",
    ),
    Mutant(
        "adjoint-crop",
        "outputs that lie before the strip aren't cropped in backward",
        "csrc/plan.c",
        "fit.crop_lo = hc_max(0, -before);",
        "fit.crop_lo = 0;",
        enough=3,
    ),
    Mutant(
        "touching-rounds-down",
        "the first window that touches a strip is found by rounding down",
        "csrc/plan.c",
        "hc_ceil_div(in.begin + window->pad_lo - reach(window), window->stride)",
        "hc_floor_div(in.begin + window->pad_lo - reach(window), window->stride)",
    ),
    Mutant(
        "no-wrap",
        "periodic intervals don't wrap at the left",
        "csrc/plan.c",
        "turn = hc_floor_div(extent.begin, size);",
        "turn = 0;",
        enough=3,
    ),
    Mutant(
        "reduce-overwrites",
        "the adjoint overwrites instead of adding",
        "csrc/halo.c",
        "HC_TRY(hc_move(true, &place, &wire, status));",
        "HC_TRY(hc_move(false, &place, &wire, status));",
        enough=2,
    ),
    Mutant(
        "no-wait",
        "the exchange isn't waited for",
        "csrc/halo.c",
        "  return hc_transport_wait(&exchange->request, status);",
        "  return exchange->request.ticket < 0 ? HC_ERROR_ARGUMENT : status->code;",
    ),
    Mutant(
        "fast-too-often",
        "the fast path is taken where the local convolution yields too many outputs",
        "csrc/convolution_fast.c",
        "left >= right && left - right < dim->window.stride;",
        "left >= right && left - right <= dim->window.stride;",
        enough=3,
    ),
    Mutant(
        "fast-strip-short",
        "one boundary output too few is mended on the left",
        "csrc/convolution_fast.c",
        "lower = hc_min(hc_ceil_div(fast->padding, window->stride),",
        "lower = hc_min(fast->padding / window->stride,",
        enough=1,
    ),
    Mutant(
        "fast-not-added",
        "the strips' input gradient overwrites that of the local pass",
        "csrc/convolution_fast.c",
        "columns, tensor_dim, dim->in_own, true,",
        "columns, tensor_dim, dim->in_own, false,",
    ),
    Mutant(
        "weight-gradient-label",
        "weight gradients are labelled Replicate though each rank holds its part",
        "python/haloconv/_convolution.py",
        '"spatial": (Replicate(), Partial()),',
        '"spatial": (Replicate(), Replicate()),',
    ),
    Mutant(
        "output-label",
        "the output is labelled Replicate",
        "python/haloconv/_convolution.py",
        "            out.append(Shard(dim))\n",
        "            out.append(Replicate())\n",
    ),
    Mutant(
        "bias-everywhere",
        "the bias gradient is summed over the input instead of the output gradient",
        "csrc/convolution.c",
        "HC_TRY(hc_tensor_sum_to_channels(grad_output, &found.bias, status));",
        "HC_TRY(hc_tensor_sum_to_channels(input, &found.bias, status));",
    ),
    Mutant(
        "groups-of-all",
        "every rank takes part in the first mesh dim's group",
        "python/haloconv/_convolution.py",
        "group_names=tuple(group_name(mesh, mesh_dim) for _, mesh_dim in spatial),",
        "group_names=tuple(group_name(mesh, 0) for _, mesh_dim in spatial),",
    ),
]


def copy_tree(target):
    """The files that git tracks or would track, as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def build(folder):
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def mutate(folder, mutant):
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if mutant.old.startswith("regex:"):
        changed, count = re.subn(mutant.old[len("regex:") :], mutant.new, text)
    else:
        count = text.count(mutant.old)
        changed = text.replace(mutant.old, mutant.new)
    if count < 1:
        raise SystemExit(f"mutant {mutant.name}: its text isn't in {mutant.file} any more:\n{mutant.old}")
    path.write_text(changed, encoding="utf-8")


def run_tests(folder, mutant, enough):
    environment = dict(
        os.environ,
        PYTHONPATH=str(folder / "python"),
        HALOCONV_FUZZ_CASES="60",
        HALOCONV_MUTATION="1",
        HALOCONV_GRACE_S="3",
        HALOCONV_TIMEOUT_FACTOR="0.25",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        f"--maxfail={2 * enough}",
    ]
    command += ["--deselect", "tests/test_convolution_fuzz.py::test_census_of_the_random_windows"]
    if mutant and mutant.select:
        command += ["-k", mutant.select]
    process = subprocess.Popen(
        [*command, *(mutant.tests if mutant else TESTS[:1])],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session that we started
        text, _ = process.communicate()
    lines = text.splitlines()
    failed = len([line for line in lines if line.startswith(("FAILED ", "ERROR "))])
    if not failed and lines:  # killed before its summary: the progress dots
        failed = sum(
            line.split("[")[0].count("F") for line in lines if re.fullmatch(r"[.FEsx]+( *\[ *\d+%\])?", line)
        )
    return failed, (lines or ["no output"])[-1], text


def try_mutant(mutant, keep):
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"haloconv_{mutant.name}_") as name:
        folder = Path(name)
        copy_tree(folder)
        mutate(folder, mutant)
        built = build(folder)
        if built.returncode:
            raise SystemExit(f"mutant {mutant.name} doesn't compile:\n{built.stdout}{built.stderr}")
        failed, last, text = run_tests(folder, mutant, mutant.enough)
    caught = failed >= mutant.enough
    print(
        f"{'✓' if caught else '✗'} {mutant.name}: {mutant.what}: {failed} tests failed "
        f"(at least {mutant.enough} must), {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if not caught:
        print(f"   {last}")
        if keep:
            print(text[-6000:])
    return caught


def run(mutants, options, attempt):
    """What is the same for all sets of mutants: the choice, --list, and the verdict. Returns the exit status.

    attempt: (mutant, verbose) -> whether tests noticed it.
    """
    chosen = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    unknown = set(options.only or ()) - {mutant.name for mutant in chosen}
    if unknown:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.what} ({mutant.file})")
        return 0
    survivors = [mutant.name for mutant in chosen if not attempt(mutant, options.verbose)]
    if survivors:
        print(f"survived: {', '.join(survivors)}: the tests don't notice")
    return 1 if survivors else 0


def command_line(description):
    """The options that `run` reads; a script may add its own."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--verbose", action="store_true", help="print pytest's output")
    return parser


def main():
    parser = command_line(__doc__)
    parser.add_argument(
        "--short", "--quick", action="store_true", help="only the three most important mutants"
    )
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if mutant.short or not options.short]
    return run(mutants, options, try_mutant)


if __name__ == "__main__":
    sys.exit(main())
