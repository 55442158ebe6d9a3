"""The memory of a training step: one card, gradient checkpointing, a pipeline, haloconv, haloconv with checkpointing.

    python benchmarks/memory_table.py                    # the named configurations, on tensors without memory
    python benchmarks/memory_table.py --grid             # all combinations for a --model, --input, --dtype, --optimizer
    python benchmarks/memory_table.py --measure cpu      # nets that fit, on real ranks over gloo, beside `fake`
    python benchmarks/memory_table.py --measure cuda --grid    # one GPU a rank

The default is ConvNeXt-XL on an input of 7×3×512×2048, for which figures have been published, at full size, on any
machine. `--measure cpu` and `cuda` start the ranks themselves: this is a plain Python script. Each configuration takes
about a minute on tensors without memory; `--keep` measures only what --json does not hold yet.

The exit status is 1 if what the table is to show does not hold: see `checks`. benchmarks/README.md defines the columns.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import memory_measure
from harness import Benchmark, Column
from memory_cases import CHECKPOINTING, Case

COLUMNS = {
    "flops": Column("flops", ".3g"),
    "work_ratio": Column("work", ".3f"),
    "activations_ratio": Column("of one card's", ".3f"),
    "reserved_gib": Column("reserved", ".2f"),
    "fake_gib": Column("fake GiB", ".3f"),
    "fake_ratio": Column("fake / real", ".3f"),
    "loss": Column("loss", ".5f"),
}
SHOWN = ["name", "model", "input", "dtype", "optimizer", "peak_gib", "published", "ratio", "parameters_gib"]
SHOWN += [
    "gradients_gib",
    "states_gib",
    "activations_gib",
    "activations_ratio",
    "temporaries_gib",
    "halos_gib",
]
SHOWN += ["work_ratio", "reserved_gib", "fake_gib", "fake_ratio", "step_ms", "loss"]

BF16 = "bfloat16 autocast"
EXAMPLE = "convnext_xlarge, elementwise norm"
HALF = (7, 3, 512, 1024)
ON_4 = dict(way="haloconv", ranks=4, dtype=BF16)
SHARDED = dict(optimizer="adam", sharded_states=True)

# (configuration, the published figure that it is compared with or None)
NAMED = [
    # one card
    (Case(model=EXAMPLE, input=HALF, optimizer="sgd"), None),
    (Case(model=EXAMPLE, input=HALF, optimizer="adam"), 43.28),
    (Case(model=EXAMPLE, input=HALF, optimizer="adam", checkpointing="block"), None),
    (Case(input=HALF, optimizer="adam"), None),
    (Case(), None),
    (Case(dtype=BF16), None),
    (Case(dtype=BF16, optimizer="adam"), None),
    (Case(dtype=BF16, checkpointing="pointwise"), None),
    (Case(dtype=BF16, checkpointing="block"), None),
    (Case(dtype=BF16, checkpointing="stage"), None),
    (Case(dtype=BF16, checkpointing="stage", optimizer="adam"), None),
    (Case(dtype=BF16, checkpointing="block", optimizer="adam"), 11.89),
    # a pipeline
    (Case(way="pipeline", ranks=4, dtype=BF16, optimizer="adam"), None),
    # haloconv
    (Case(way="haloconv", ranks=4), None),
    (Case(**ON_4), None),
    (Case(**ON_4, checkpointing="pointwise"), 7.21),
    (Case(**ON_4, checkpointing="block"), None),
    (Case(**ON_4, checkpointing="stage"), None),
    (Case(**ON_4, **SHARDED), None),
    (Case(**ON_4, **SHARDED, checkpointing="pointwise"), None),
    (Case(**ON_4, **SHARDED, checkpointing="block"), None),
    (
        Case(**ON_4, optimizer="momentum", sharded_states=True, checkpointing="block", gathered="float32"),
        3.05,
    ),
    (Case(**ON_4, **SHARDED, checkpointing="stage"), None),
    (Case(way="haloconv", ranks=4, model=EXAMPLE, input=HALF, **SHARDED), None),
    (Case(way="haloconv", ranks=4, model=EXAMPLE, input=HALF, **SHARDED, checkpointing="block"), None),
    (Case(way="haloconv", ranks=2, dtype=BF16, **SHARDED), None),
    (Case(way="haloconv", ranks=8, dtype=BF16, **SHARDED), None),
    # cameras
    (Case(input=(6, 3, 720, 1280), dtype=BF16, optimizer="adam"), None),
    (Case(**{**ON_4, **SHARDED, "input": (6, 3, 720, 1280)}, checkpointing="block"), None),
    (Case(input=(11, 3, 2160, 3840), dtype=BF16, optimizer="adam", checkpointing="block"), None),
    (
        Case(
            way="haloconv", ranks=8, input=(11, 3, 2160, 3840), dtype=BF16, **SHARDED, checkpointing="block"
        ),
        None,
    ),
]

# Nets that fit on any machine, for real ranks beside fake tensors.
FITTING = [
    ("convnext_atto", (4, 3, 256, 1024)),
    ("resnet10t", (4, 3, 256, 1024)),
    ("convnext_tiny/4", (4, 3, 256, 1024)),
]
FAST = ("convnext_atto", (4, 3, 256, 1024))


def grid(model, shape, dtype, optimizer, ranks):
    """All combinations."""
    base = Case(model=model, input=shape, dtype=dtype, optimizer=optimizer)
    cases = [replace(base, checkpointing=what) for what in CHECKPOINTING]
    for number in ranks:
        cases.append(replace(base, way="pipeline", ranks=number))
        for sharded in (False, True):
            split = replace(base, way="haloconv", ranks=number, sharded_states=sharded)
            cases += [replace(split, checkpointing=what) for what in CHECKPOINTING]
    return cases


def key_of(row):
    """What tells one row, or `Case.as_row`, from another."""
    return tuple(str(row[key]) for key in ("name", "model", "input", "dtype", "optimizer"))


def related(rows):
    """Fills in what is a ratio to another row: the work and the activations of one card."""

    def same(row, *keys):
        return [r for r in rows if r["name"].startswith("one card") and all(r[k] == row[k] for k in keys)]

    for row in rows:
        plain = [r for r in same(row, "model", "input") if r["checkpointing"] == "none" and r["flops"]]
        if plain and row["flops"]:
            row["work_ratio"] = row["flops"] * row["ranks"] / plain[0]["flops"]
        alike = [r for r in same(row, "model", "input", "dtype", "checkpointing") if r["activations_gib"]]
        if alike and row["activations_gib"] and row["name"].startswith("haloconv"):
            row["activations_ratio"] = row["activations_gib"] / alike[0]["activations_gib"]


def checks(rows):
    """What the table is to show, as (sentence, whether it holds), of the rows that are there."""
    found = []

    def row_of(case):
        return next((row for row in rows if key_of(row) == key_of(case.as_row())), None)

    for what, most in (("pointwise", 7.21), ("block", 3.05)):
        row = row_of(Case(**ON_4, **SHARDED, checkpointing=what))
        if row is not None:
            found.append((f"{row['name']}: {row['peak_gib']:.2f} GiB <= {most}", row["peak_gib"] <= most))
    one, four = row_of(Case(dtype=BF16, optimizer="adam")), row_of(Case(**ON_4, **SHARDED))
    if one and four:
        less = 1 - four["peak_gib"] / one["peak_gib"]
        found.append((f"{four['name']}: {100 * less:.1f} % less than one card, >= 70", less >= 0.7))
    for row in rows:
        ratio, most = row["activations_ratio"], 1.04 / row["ranks"]
        if ratio is not None:
            sentence = f"{row['name']}, {row['dtype']}: activations {ratio:.3f} of one card's <= {most:.3f}"
            found.append((sentence, ratio <= most))
        if row["published"]:
            off = row["peak_gib"] / row["published"] - 1
            found.append((f"{row['name']}: {100 * off:+.1f} % of {row['published']}", abs(off) <= 0.05))
        if row["fake_ratio"]:
            off = row["fake_ratio"] - 1
            where = f"{row['model']}, {row['name']}"
            found.append((f"{where}: fake {100 * off:+.1f} % off measured", abs(off) <= 0.05))
    losses = {}
    for row in rows:
        if row["loss"] is not None:
            first = losses.setdefault((row["model"], str(row["input"]), row["dtype"]), row["loss"])
            off = abs(row["loss"] - first)
            # float32; bfloat16 has 8 bits
            allowed = (1e-4 if row["dtype"] == "float32" else 2e-2) * abs(first)
            found.append((f"{row['model']}, {row['name']}: loss {off:.1e} off one card's", off <= allowed))
    return found


def plot(rows):
    def draw(figure):
        axes = figure.add_subplot()
        parts = ("parameters", "states", "activations", "temporaries")
        names = [f"{row['name']}\n{row['model']}, {row['dtype']}, {row['optimizer']}" for row in rows]
        left = [0.0] * len(rows)
        for part in parts:
            width = [row[f"{part}_gib"] or 0.0 for row in rows]
            axes.barh(names, width, left=left, label=part)
            left = [a + b for a, b in zip(left, width)]
        axes.plot([row["peak_gib"] for row in rows], names, "k|", label="peak")
        axes.tick_params(axis="y", labelsize=5)
        axes.set_xlabel("GiB per card")
        axes.set_xscale("symlog", linthresh=4)
        axes.legend()
        axes.invert_yaxis()

    return draw


def measure_fake(bench, cases, kept):
    """`kept`: key -> columns that are known."""
    with bench.progress(len(cases)) as advance:
        for case, published in cases:
            columns = kept.get(key_of(case.as_row())) or memory_measure.fake(case)
            row = bench.add(measured="fake", published=published, **case.as_row(), **columns)
            if published:
                row |= {"ratio": row["peak_gib"] / published, "of": "published"}
            bench.save()
            advance(case.name)


def measure_real(bench, cases, device, rounds, compare, kept):
    """Real ranks; with `compare` beside fake tensors. Cases that have as many ranks take turns when they are timed.
    `kept`: key -> columns that are known."""
    with bench.progress(len(cases)) as advance:
        groups = {}
        for case in cases:
            groups.setdefault((case.model, case.ranks), []).append(case)
        for group in groups.values():
            missing = [case for case in group if key_of(case.as_row()) not in kept]
            found = iter(memory_measure.measured(missing, device, rounds) if missing else ())
            for case in group:
                columns = kept.get(key_of(case.as_row())) or next(found)
                if compare:
                    columns["fake_gib"] = columns.get("fake_gib") or memory_measure.fake(case)["peak_gib"]
                    columns["fake_ratio"] = columns["fake_gib"] / columns["peak_gib"]
                bench.add(measured=device, **case.as_row(), **columns)
                bench.save()
                advance(case.name)


def fitting(nets):
    """Each net on one card and on two; a ConvNeXt with all that can be asked for, too."""
    cases = []
    for model, shape in nets:
        base = Case(model=model, input=shape, optimizer="adam")
        split = replace(base, way="haloconv", ranks=2)
        cases += [base, split]
        if model.startswith("convnext"):
            cases += [replace(base, checkpointing="block"), replace(split, checkpointing="block")]
            cases += [replace(base, checkpointing="pointwise"), replace(split, checkpointing="pointwise")]
            cases += [replace(split, sharded_states=True)]
    return cases


def main(argv=None):
    bench = Benchmark("memory_table", __doc__, COLUMNS)
    add = bench.parser.add_argument
    add("--measure", choices=["fake", "cpu", "cuda"], default="fake")
    add("--grid", action="store_true", help="all combinations, not the named ones")
    add(
        "--model",
        default="convnext_xlarge",
        help="of the grid: timm's name, or 'NAME/4', or 'NAME, elementwise norm'",
    )
    add(
        "--input",
        type=lambda text: tuple(map(int, text.split("x"))),
        default=(7, 3, 512, 2048),
        metavar="NxCxHxW",
    )
    add("--dtype", choices=["float32", BF16], default=BF16)
    add("--optimizer", choices=["none", "sgd", "momentum", "adam"], default="adam")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8])
    add("--rounds", type=int, default=0, help="timed steps of each, for --measure cpu and cuda")
    add("--keep", action="store_true", help="do not measure again what --json holds")
    args = bench.parse(argv)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    wanted = grid(args.model, args.input, args.dtype, args.optimizer, args.ranks) if args.grid else None
    if args.fast:
        model, shape = FAST
        one = Case(model=model, input=shape, dtype=BF16, checkpointing="pointwise", optimizer="adam")
        split = replace(one, way="haloconv", ranks=4, sharded_states=True)
        measure_fake(bench, [(one, None), (split, None)], {})
        base = Case(model=model, input=shape, optimizer="adam")
        real = [base, replace(base, way="haloconv", ranks=2)]
        measure_real(bench, real, "cpu", 0, True, {})
    elif args.measure == "fake":
        cases = [(case, None) for case in wanted] if wanted else NAMED
        measure_fake(bench, cases, _kept(args.json) if args.keep else {})
    else:
        cases = wanted or fitting(FITTING)
        kept = _kept(args.json) if args.keep and not args.rounds else {}  # times of one run only
        measure_real(bench, cases, args.measure, args.rounds, wanted is None, kept)
    related(bench.rows)
    found = checks(bench.rows)
    bench.finish(SHOWN, plot=plot(bench.rows))
    for sentence, holds in found:
        bench.console.print("✓" if holds else "[red]✗[/red]", sentence)
    return 0 if all(holds for _, holds in found) else 1


def _kept(path):
    """Rows of an earlier run, by key; what is a ratio is made anew."""
    if path is None or not Path(path).exists():
        return {}
    kept = {}
    for row in json.loads(Path(path).read_text())["rows"]:
        names = [name for name in row if name.endswith("_gib") or name in ("flops", "loss")]
        names = [name for name in names if row[name] is not None]
        kept[key_of(row)] = {name: row[name] for name in names}
    return kept


if __name__ == "__main__":
    sys.exit(main())
