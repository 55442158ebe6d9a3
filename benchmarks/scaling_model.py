"""Time and memory of a training step from counted work and a small calibration, up to 10,000 cards.

    torchrun --nproc-per-node 2 benchmarks/scaling_model.py     # calibrates here, predicts runs, measures them
    python benchmarks/scaling_model.py                          # what needs no measurement here

1. *Held-out runs.* Rates of each class of ops are calibrated on `CALIBRATION`, exchanges and all-reduces on messages
   of two sizes; `HELD_OUT` (other widths, ranks, networks) is predicted and measured. Both lists stand in this file;
   nothing is fitted to a held-out run.
2. *Memory*, calibrated on one row of results/memory_table_cpu.json, against the others.
3. *The published table*, calibrated on its first row alone.
4. *1 to 10,000 cards*: data parallelism × spatial 1/2/4/8, for classes of nodes whose figures are assumptions.

Times are of the processor by default (`--clock wall` on a machine with nothing else to do): on shared machines a wall
clock measures the others. benchmarks/README.md has the formulas.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import overhead
import torch
import torch.distributed as dist
from harness import GIB, Benchmark, Column, rank, world
from memory_cases import Case, program
from scale_out import NODES, published, scale_out
from scaling_count import Counter, count
from torch.distributed.device_mesh import DeviceMesh

COLUMNS = {
    "part": Column("part"),  # "held out", "calibration", "memory", "published", "scale"
    "predicted": Column("predicted", ".2f"),
    "actual": Column("measured", ".2f"),
    "deviation": Column("error", "+.1%"),
    "unit": Column("unit"),
    "wall_ms": Column("wall ms", ".1f"),
    "compute_share": Column("compute", ".1%"),
    "exchange_share": Column("exchange", ".1%"),
    "reduction_share": Column("gradients", ".1%"),
    "boundary": Column("boundary", ".1%"),
    "node": Column("node"),
    "cards": Column("cards", "d"),
    "spatial": Column("spatial", "d"),
    "data_parallel": Column("data parallel", "d"),
    "bound": Column("bound by"),
    "note": Column("note"),
}
BASE = Case(optimizer="sgd")


def _case(model, width, ranks=1, batch=4, height=64):
    way = "haloconv" if ranks > 1 else "one card"
    return replace(BASE, model=model, input=(batch, 3, height, width), ranks=ranks, way=way)


# What rates come from: each on one rank, plain and with haloconv's layers.
CALIBRATION = [_case("convnext_atto", 128), _case("convnext_atto", 320), _case("resnet10t", 256)]
# Fixed before anything was calibrated.
HELD_OUT = [
    _case("convnext_atto", 224),
    _case("convnext_atto", 512, ranks=2),
    _case("convnext_tiny/4", 256),
    _case("convnext_tiny/4", 512, ranks=2),
    _case("resnet18", 256),
    _case("resnet18", 512, ranks=2),
]
LIMIT = 0.15


# ---- calibration ----


class Line:
    """seconds = per_call · calls + amount · per_amount, neither negative."""

    def __init__(self, points):
        """points: (calls, amount, seconds)."""
        x = torch.tensor([[calls, amount] for calls, amount, _ in points], dtype=torch.float64)
        y = torch.tensor([seconds for _, _, seconds in points], dtype=torch.float64)
        scale = x.amax(0).clamp_min(1e-30)
        weight = 1 / y.clamp_min(1e-9)  # relative errors count
        a, b = (x / scale) * weight[:, None], y * weight
        both = torch.linalg.lstsq(a, b[:, None], driver="gelsd").solution[:, 0] if len(points) > 1 else None
        if both is None or (both < 0).any():
            alone = [float(a[:, i] @ b / (a[:, i] @ a[:, i]).clamp_min(1e-30)) for i in (0, 1)]
            residuals = [float(((a[:, i] * alone[i] - b) ** 2).sum()) for i in (0, 1)]
            keep = 1 if x[:, 1].max() > 0 and residuals[1] <= residuals[0] else 0
            both = torch.zeros(2, dtype=torch.float64)
            both[keep] = alone[keep]
        self.per_call, self.per_amount = (both / scale).tolist()

    def __call__(self, calls, amount):
        return self.per_call * calls + self.per_amount * amount


def clocks(clock):
    """(seconds of a step, of an op): an op runs on one thread."""
    if clock == "wall":
        return time.perf_counter, time.perf_counter
    return time.process_time, time.thread_time


def calibrate(rounds, clock, bench):
    """Lines by way and class, host seconds per call by way, of exchanges and of all-reduces."""
    mesh = own_mesh()
    step_clock, op_clock = clocks(clock)
    runs = {}
    for case in CALIBRATION:
        for way in ("one card", "haloconv"):
            runs[way, case] = program(replace(case, way=way), mesh, rank())
            runs[way, case].step()
    steps, seconds, works = defaultdict(list), defaultdict(lambda: defaultdict(list)), {}
    for _ in range(rounds):
        for key, run in runs.items():
            begin = step_clock()
            run.step()
            steps[key].append(step_clock() - begin)
            counter = Counter(op_clock)
            with counter:
                run.step()
            works[key] = counter.work
            for name, value in counter.seconds.items():
                seconds[key][name].append(value)
    lines, host = {}, {}
    for way in ("one card", "haloconv"):
        points, rest = defaultdict(list), []
        for key in (key for key in runs if key[0] == way):
            work = works[key]
            own = {name: quartile(values) for name, values in seconds[key].items()}
            for name, value in own.items():
                points[name].append((work.calls[name], work.amounts[name], value))
            rest.append(max(0.0, quartile(steps[key]) - sum(own.values())) / sum(work.calls.values()))
        lines[way] = {name: Line(values) for name, values in points.items()}
        host[way] = statistics.median(rest)
    for (way, case), values in steps.items():
        bench.add(
            part="calibration", **{**replace(case, way=way).as_row(), "name": f"{way}, calibration"},
            measured="cpu", actual=1e3 * quartile(values), unit=f"ms ({clock})",
        )  # fmt: skip
    return {"lines": lines, "host": host, **messages(rounds, step_clock)}


def messages(rounds, clock):
    """Lines of an exchange and of an all-reduce over both ranks, from two sizes of each; host seconds of one call."""
    mesh = DeviceMesh("cpu", torch.arange(world()))
    calls = {}
    for columns, channels in ((3, 8), (3, 1024)):
        steps, size = overhead.swap(mesh, channels, columns, "NCHW")
        calls["exchange", size] = steps["exchange"]
    for size in (2**14, 2**22):
        buffer = torch.zeros(size // 4)
        calls["all_reduce", size] = lambda buffer=buffer: dist.all_reduce(buffer)
    taken = defaultdict(list)
    for _ in range(2 + 3 * rounds):
        for key, call in calls.items():
            dist.barrier()
            begin = clock()
            for _ in range(4):
                call()
            taken[key].append((clock() - begin) / 4)
    result = {}
    for kind in ("exchange", "all_reduce"):
        result[kind] = Line([(1, size, quartile(taken[kind, size][2:])) for k, size in calls if k == kind])
    return result


def quartile(values):
    """The lower one: what others on the machine add, only adds."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def own_mesh():
    return [DeviceMesh("cpu", torch.arange(index, index + 1)) for index in range(world())][rank()]


# ---- prediction ----


def predict(work, whole, calibration, way, ranks):
    """Seconds of a step by part. `work`: of a rank's strip; `whole`: of the unsplit image, whose windows are split."""
    lines, host = calibration["lines"][way], calibration["host"][way]
    share = whole.boundary(ranks)
    known = [line.per_amount for name, line in lines.items() if "::" in name and line.per_amount > 0]
    parts = {"compute": host * sum(work.calls.values()), "exchange": 0.0, "reduction": 0.0}
    for name, calls in work.calls.items():
        amount = work.amounts[name]
        seconds = lines[name](calls, amount) if name in lines else amount * statistics.median(known)
        widened = 1 + share if name.startswith(("dense", "depthwise", "grouped")) else 1.0
        parts["compute"] += seconds * widened
    if ranks > 1:
        exchanges, _, sent = whole.exchanges(ranks)
        parts["exchange"] = calibration["exchange"](exchanges, sent)
        parts["reduction"] = calibration["all_reduce"](whole.buckets(), whole.parameter_bytes)
    return parts


def counted(case):
    """(Work of a rank's strip, Work of the unsplit image)."""
    batch, channels, height, width = case.input
    strip = count(replace(case, input=(batch, channels, height, width // case.ranks)))
    return strip, count(replace(case, way="one card"))


def held_out(bench, works, calibration, rounds, clock):
    """Measures the held-out runs, which take turns, and adds predicted beside measured."""
    step_clock, _ = clocks(clock)
    alone, both = own_mesh(), DeviceMesh("cpu", torch.arange(world()))
    runs = [program(case, both if case.ranks > 1 else alone, rank()) for case in works]
    taken = [[] for _ in runs]
    for number in range(1 + rounds):
        for run, values in zip(runs, taken):
            dist.barrier()
            begin, wall = step_clock(), time.perf_counter()
            run.step()
            found = torch.tensor([step_clock() - begin, time.perf_counter() - wall], dtype=torch.float64)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            if number >= 1:
                values.append(found.tolist())
    for (case, found), values in zip(works.items(), taken):
        if found is None:
            continue
        strip, whole = found
        parts = predict(strip, whole, calibration, case.way, case.ranks)
        total = sum(parts.values())
        actual, wall = (quartile(column) for column in zip(*values))
        bench.add(
            part="held out", **case.as_row(), measured="cpu", predicted=1e3 * total, actual=1e3 * actual,
            deviation=total / actual - 1, unit=f"ms ({clock})", wall_ms=1e3 * wall, boundary=whole.boundary(case.ranks),
            **{f"{name}_share": value / total for name, value in parts.items()},
        )  # fmt: skip


# ---- memory ----


def memory(bench, path, limit=None):
    """Peaks of measured rows from counts; what temporaries take, of activations, comes from the first row alone."""
    rows = [row for row in json.loads(path.read_text())["rows"] if row["checkpointing"] == "none"][:limit]
    temporaries = None
    for row in rows:
        sharded = row["optimizer"].endswith(", sharded")
        case = Case(model=row["model"], input=tuple(row["input"]), optimizer=row["optimizer"].split(",")[0])
        work = count(case, narrow=64)
        ranks, kept = row["ranks"], row["ranks"] if sharded else 1
        held = (work.parameter_bytes + work.state_bytes) / kept
        activations = work.activation_bytes / ranks
        if temporaries is None:
            temporaries = (row["peak_gib"] * GIB - held - activations) / activations
            note = "calibrates temporaries"
        else:
            note = None
        predicted = (held + activations * (1 + temporaries)) / GIB
        bench.add(
            part="memory", **{**case.as_row(), "name": row["name"], "optimizer": row["optimizer"]} | {"ranks": ranks},
            measured=row["measured"], predicted=predicted, actual=row["peak_gib"], unit="GiB", note=note,
            deviation=predicted / row["peak_gib"] - 1,
        )  # fmt: skip


def draw(rows):
    def plot(figure):
        left, right = figure.subplots(1, 2)
        own = [row for row in rows if row["part"] in ("held out", "memory", "published")]
        names = [
            f"{row['model'].split(',')[0]} {row['input'][-1]}/{row['ranks']}, {row['part']}" for row in own
        ]
        left.barh(names, [100 * row["deviation"] for row in own])
        left.axvline(0, color="grey", linewidth=1)
        left.set_xlabel("predicted / measured − 1, %")
        left.tick_params(axis="y", labelsize=6)
        for spatial in (1, 2, 4, 8):
            own = [
                r for r in rows if r["part"] == "scale" and r["spatial"] == spatial and r["node"] == "H100"
            ]
            right.loglog(
                [r["cards"] for r in own], [r["predicted"] for r in own], "o-", label=f"spatial {spatial}"
            )
        right.set_xlabel("cards (H100)")
        right.set_ylabel("ms per step, 1024 images of 512×2048")
        right.legend()

    return plot


def main():
    bench = Benchmark("scaling_model", __doc__, COLUMNS)
    add = bench.parser.add_argument
    add("--clock", choices=["processor", "wall"], default="processor")
    add("--rounds", type=int, default=8)
    args = bench.parse()
    rounds = 1 if args.fast else args.rounds
    results = Path(__file__).resolve().parent / "results"
    wanted = HELD_OUT[1:2] if args.fast else HELD_OUT
    works = {}  # rank 0's, which predicts; the others only run
    if world() == 2:
        works = {case: counted(case) if rank() == 0 else None for case in wanted}
    model = "convnext_tiny" if args.fast else "convnext_xlarge"
    if world() == 2:
        dist.init_process_group("gloo")
        held_out(bench, works, calibrate(rounds, args.clock, bench), rounds, args.clock)
        dist.destroy_process_group()
    bench.save()
    if rank() == 0:
        memory(bench, results / "memory_table_cpu.json", 2 if args.fast else None)
        published(bench, model)
        scale_out(bench, model, list(NODES)[:1] if args.fast else NODES)
    show(bench)
    bench.finish(plot=draw(bench.rows))


def show(bench):
    keys = [
        "name",
        "model",
        "input",
        "ranks",
        "optimizer",
        "predicted",
        "actual",
        "unit",
        "deviation",
        "wall_ms",
    ]
    keys += ["compute_share", "exchange_share", "reduction_share", "boundary", "note"]
    for part in ("calibration", "held out", "memory", "published"):
        own = [row for row in bench.rows if row["part"] == part]
        if own:
            bench.table(keys, own, title=part)
            errors = [
                abs(row["deviation"]) for row in own if row["deviation"] is not None and not row["note"]
            ]
            if errors:
                within = sum(error <= LIMIT for error in errors)
                bench.console.print(
                    f"{within} of {len(errors)} within {LIMIT:.0%}; the largest {max(errors):.1%}"
                )
    own = [row for row in bench.rows if row["part"] == "scale" and row["note"] == "fastest"]
    if own:
        bench.table(
            ["node", "cards", "spatial", "data_parallel", "predicted", "unit", "peak_gib", "bound"],
            own,
            title="fastest",
        )


if __name__ == "__main__":
    main()
