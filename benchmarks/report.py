"""docs/report.md: what this machine can measure, quickly, beside what was published.

    python benchmarks/report.py [--fast] [--keep] [--out docs]        # make report

Runs speed_table.py, scaling_model.py and timeline.py on two ranks, takes the memory tables from
results/memory_table.json and memory_table_cpu.json (half an hour of counting, which no machine changes), and writes
tables and PNGs, each with its command and date. `--keep` runs nothing whose JSON is there; `--fast` runs the fast modes
into a folder of its own.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from harness import PUBLISHED_SPEED
from matplotlib.figure import Figure
from scaling_model import LIMIT
from scaling_model import draw as draw_scaling
from speed_table import draw as draw_speed
from timeline import draw as draw_timeline

HERE = Path(__file__).resolve().parent
COUNTED = ["memory_table", "memory_table_cpu"]
RUNS = {
    "speed_table": [],
    "scaling_model": [],
    "timeline": [],
}


def run(name, options, out):
    """The JSON of one benchmark on two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(HERE / f"{name}.py"), "--json", str(out), *options]
    print(f"report: {name} ...", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def table(headings, rows):
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def shown(value, form=".2f"):
    return "–" if value is None else format(value, form) if not isinstance(value, str) else value


def source(report):
    """Command, date and machine."""
    words, machine = report["command"].split(), report["machine"]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    if "--plot" in words:
        at = words.index("--plot")
        del words[at : at + 2]
    return f"`{' '.join(words)}`, {report['date']}, {machine['cores']} cores, torch {report['versions']['torch']}.\n"


def save(draw, path, size=(9, 5)):
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=80)


def of_input(row):
    return "×".join(map(str, row["input"]))


# ---- parts ----


def memory_bars(rows):
    def plot(figure):
        axes = figure.subplots()
        at = range(len(rows))
        names = [
            f"{row['name']} ({row['dtype'].split()[0]}, {row['optimizer']}, width {row['input'][-1]}"
            f"{', elementwise norm' if 'elementwise' in row['model'] else ''})"
            for row in rows
        ][::-1]
        left = [0.0] * len(rows)
        for part in ("parameters_gib", "states_gib", "activations_gib", "temporaries_gib"):
            values = [row[part] or 0.0 for row in rows][::-1]
            if part == "activations_gib":  # at the peak gradients have taken their place, where they are more
                values = [max(row[part] or 0.0, row["gradients_gib"] or 0.0) for row in rows][::-1]
            axes.barh(at, values, left=left, label=part.removesuffix("_gib"))
            left = [a + b for a, b in zip(left, values)]
        for index, row in enumerate(rows[::-1]):
            if row["published"] is not None:
                axes.plot([row["published"]], [index], "k|", markersize=14)
        axes.set_yticks(at, names)
        axes.set_xlabel("GiB a card (black mark: published)")
        axes.tick_params(axis="y", labelsize=6)
        axes.legend()

    return plot


def memory(report, folder):
    rows = [row for row in report["rows"] if row["input"][-1] <= 2048 and row["input"][2] == 512]
    chosen = [row for row in rows if row["activations_gib"] is not None]
    save(memory_bars(chosen), folder / "memory.png", (10, 6))
    published = [row for row in report["rows"] if row["published"] is not None]
    yield "## Memory\n"
    yield "ConvNeXt-XL, counted on tensors without memory, GiB a card; configurations in benchmarks/README.md.\n"
    yield table(
        ["configuration", "input", "dtype", "optimizer", "published", "here", "here / published"],
        [
            [r["name"], of_input(r), r["dtype"], r["optimizer"], shown(r["published"]), shown(r["peak_gib"])]
            + [shown(r["peak_gib"] / r["published"], ".3f")]
            for r in published
        ],
    )
    yield "![memory](memory.png)\n"
    yield (
        "All configurations. *Work*: convolutions and products of all cards, to those of one card without"
        " recomputation, the least that recomputing costs in time. *Activations*: to those of one card with the same"
        " dtype and recomputation.\n"
    )
    yield table(
        ["configuration", "model", "input", "dtype", "optimizer", "GiB", "work", "activations"],
        [
            [r["name"], r["model"], of_input(r), r["dtype"], r["optimizer"], shown(r["peak_gib"])]
            + [shown(r["work_ratio"]), shown(r["activations_ratio"], ".3f")]
            for r in report["rows"]
        ],
    )
    yield source(report)


def measured_memory(report, folder):
    """Networks that fit: counted against measured on real ranks, and what recomputing saves."""
    rows = report["rows"]
    plain = {r["model"]: r["peak_gib"] for r in rows if r["name"] == "one card"}
    yield "### Counted and measured\n"
    yield (
        "Networks that fit, on real ranks: what the C library handed out at once, beside the same count as above."
        " The last column is to one card without recomputation.\n"
    )
    yield table(
        [
            "configuration",
            "model",
            "input",
            "optimizer",
            "measured GiB",
            "counted",
            "counted / measured",
            "of one card",
        ],
        [
            [r["name"], r["model"], of_input(r), r["optimizer"], shown(r["peak_gib"], ".3f")]
            + [shown(r["fake_gib"], ".3f"), shown(r["fake_ratio"], ".3f")]
            + [shown(r["peak_gib"] / plain[r["model"]], ".0%")]
            for r in rows
        ],
    )
    yield source(report)


def speed(report, folder):
    rows = report["rows"]
    save(draw_speed(rows), folder / "speed.png")
    yield "## Speed\n"
    yield (
        "Whole iterations. Speedup = t(one rank) · width / width(one rank) / t, as in the published table; efficiency ="
        " speedup / ranks. `ratio` is to the plain row of the same size. Ranks of this machine share its cores, caches"
        " and load: *separate strips*, which exchange nothing, say how much of a row that is. *torch's legacy route*"
        " loses the input gradients of padded convolutions; the error, to the largest gradient, need not show it.\n"
    )
    yield table(
        ["configuration", "input", "ranks", "ms", "10 to 90 %", "speedup", "efficiency", "ratio", "images/s"]
        + ["exchanges", "gradients", "bubble / idle / balance", "error"],
        [
            [r["name"], of_input(r), r["ranks"], shown(r["step_ms"], ".1f")]
            + [f"{shown(r['step_ms_p10'], '.1f')} to {shown(r['step_ms_p90'], '.1f')}", shown(r["speedup"])]
            + [shown(r["efficiency"], ".0%"), shown(r["ratio"]), shown(r["images_per_s"])]
            + [shown(r["exchange_share"], ".1%"), shown(r["reduction_share"], ".1%")]
            + [" / ".join(shown(r[key], ".2f") for key in ("bubble", "idle", "balance"))]
            + [", ".join(filter(None, [shown(r["error"], ".0e"), r["note"]]))]
            for r in rows
        ],
    )
    by_name = {r["name"]: r for r in rows}
    one, split = (by_name.get(f"{name}, each block recomputed") for name in ("one rank", "haloconv"))
    if one and split:
        yield (
            f"Recomputing each block changes a step's time by {one['ratio'] - 1:+.0%} on one rank and by"
            f" {split['ratio'] - 1:+.0%} split (published: +30 % for 60 to 75 % less memory; what it saves here is in"
            " the table of measured memory above).\n"
        )
    pipeline = by_name.get("pipeline")
    if pipeline:
        yield (
            f"The pipeline's schedule leaves {pipeline['bubble']:.0%} of it empty (its bubble); measured, stages"
            f" compute nothing for {pipeline['idle']:.0%} of a step, and the mean stage takes"
            f" {pipeline['balance']:.2f} of the largest one's time (its balance).\n"
        )
    yield "![speedup](speed.png)\n"
    yield source(report)
    first = PUBLISHED_SPEED[1024, 1]
    yield "Published (ConvNeXt-XL, cards; measured here by the same script with `--device cuda`, where cards are):\n"
    yield table(
        ["width / cards", "ms", "speedup", "efficiency", "same width a card, here (small net, ranks)"],
        [
            [f"{w}/{n}", ms, shown(first * w / 1024 / ms), shown(first * w / 1024 / ms / n, ".0%")]
            + [beside(rows, w, n)]
            for (w, n), ms in PUBLISHED_SPEED.items()
        ],
    )


def beside(rows, width, ranks):
    """Our speedup where the images grow as the published ones do, by the same factor."""
    first = next(r for r in rows if r["name"] == "one rank")["input"][-1]
    found = [
        r
        for r in rows
        if r["name"] in ("one rank", "haloconv")
        and r["ranks"] == ranks
        and r["input"][-1] * 1024 == width * first
    ]
    return shown(found[0]["speedup"]) if found else "not on this machine"


def scaling(report, folder):
    rows = report["rows"]
    save(draw_scaling(rows), folder / "scaling.png", (12, 5))
    yield "## A model of scale\n"
    for part, sentence in {
        "held out": "Calibrated on other runs; nothing is fitted to these.",
        "memory": "Peaks, from counts; the first row alone says how much temporaries take.",
        "published": "The published table from its first row alone, for two assumed links between cards.",
    }.items():
        own = [row for row in rows if row["part"] == part]
        if not own:
            continue
        judged = [abs(row["deviation"]) for row in own if not row["note"]]
        yield f"### {part.capitalize()}\n\n{sentence}" + (
            f" {sum(d <= LIMIT for d in judged)} of {len(judged)} within {LIMIT:.0%}; the largest error is"
            f" {max(judged):.1%}.\n"
            if judged
            else "\n"
        )
        yield table(
            ["configuration", "model", "input", "ranks", "unit", "predicted", "measured", "error", ""],
            [
                [r["name"], r["model"], of_input(r), r["ranks"], r["unit"], shown(r["predicted"])]
                + [shown(r["actual"]), shown(r["deviation"], "+.1%"), r["note"] or ""]
                for r in own
            ],
        )
    yield (
        "### 1 to 10,000 cards\n\n1024 images of 512 × 2048 a step, bfloat16, Adam, states sharded in a node;"
        " the fastest split of each number of cards, and what bounds it. All figures of the hardware are assumptions"
        " (`NODES` and the constants beside it in benchmarks/scale_out.py).\n"
    )
    yield table(
        ["node", "cards", "spatial", "data parallel", "idle", "ms", "peak GiB", "compute", "exchanges", "gradients"]
        + ["bound by"],
        [
            [r["node"], r["cards"], r["spatial"], r["data_parallel"], r["idle_cards"]]
            + [shown(r["predicted"], ".1f"), shown(r["peak_gib"], ".1f")]
            + [shown(r[f"{key}_share"], ".1%") for key in ("compute", "exchange", "reduction")]
            + [r["bound"]]
            for r in rows
            if r["part"] == "scale" and r["note"] == "fastest"
        ],
    )  # fmt: skip
    yield "\n".join(f"- {sentence}" for sentence in crossovers(rows)) + "\n"
    yield "![errors and scale](scaling.png)\n"
    yield source(report)


def crossovers(rows):
    """For each node: from how many cards on which split is fastest, and what bounds it."""
    scale = [row for row in rows if row["part"] == "scale" and row["note"] == "fastest"]
    for node in dict.fromkeys(row["node"] for row in scale):
        own = [row for row in scale if row["node"] == node]
        parts = []
        for key, form in (("spatial", "{} in space"), ("bound", "bound by {}")):
            runs = [own[0], *(b for a, b in itertools.pairwise(own) if a[key] != b[key])]
            parts.append(", ".join(f"{form.format(row[key])} from {row['cards']:,} cards on" for row in runs))
        yield f"{node}: {'; '.join(parts)}."


def timeline(report, folder):
    rows = report["rows"]
    save(draw_timeline(rows), folder / "timeline.png", (10, 5))
    yield "## One step over time\n"
    yield table(
        ["rank", *dict.fromkeys(row["lane"] for row in rows)],
        [
            [number, *(shown(row["share"], ".1%") for row in rows if row["rank"] == number)]
            for number in sorted({row["rank"] for row in rows})
        ],
    )
    yield "![timeline](timeline.png)\n"
    yield source(report)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="the benchmarks' fast modes: shows that this works"
    )
    parser.add_argument("--keep", action="store_true", help="runs nothing whose JSON is there")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs")
    args = parser.parse_args()
    results = args.out / "results" if args.fast else HERE / "results"
    for folder in (args.out, results):
        folder.mkdir(parents=True, exist_ok=True)
    reports = {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for name in COUNTED}
    for name, options in RUNS.items():
        file = results / f"{name}.json"
        if not (args.keep and file.exists()):
            run(name, ["--fast"] if args.fast else options, file)
        reports[name] = json.loads(file.read_text())
    parts = [
        "# Report\n",
        "Written by `make report`. Formulas of the columns: [benchmarks/README.md](../benchmarks/README.md).\n",
        f"Processor: {reports['speed_table']['machine']['cpu']}.\n",
    ]
    for name, part in dict(
        memory_table=memory,
        memory_table_cpu=measured_memory,
        speed_table=speed,
        scaling_model=scaling,
        timeline=timeline,
    ).items():
        parts += part(reports[name], args.out)
    (args.out / "report.md").write_text("\n".join(parts))
    print(f"report: {args.out / 'report.md'}")


if __name__ == "__main__":
    main()
