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

import gc
import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import overhead
import torch
import torch.distributed as dist
from harness import GIB, Benchmark, Column, quiet, rank, world
from memory_cases import Case, program
from scale_out import NODES, published, scale_out
from scaling_count import WRAPPED, Counter, count
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
    "idle_cards": Column("idle cards", "d"),
    "bound": Column("bound by"),
    "note": Column("note"),
}
BASE = Case(optimizer="sgd")


def _case(model, width, ranks=1, batch=4, height=64):
    way = "haloconv" if ranks > 1 else "one card"
    return replace(BASE, model=model, input=(batch, 3, height, width), ranks=ranks, way=way)


# What rates come from: on one rank each op, plain and with haloconv's layers; on two what being split costs. Atto's
# MLPs are 1×1 convolutions, tiny's matrix products.
CALIBRATION = [_case("convnext_atto", 128), _case("convnext_atto", 320), _case("resnet10t", 256)]
CALIBRATION += [_case("convnext_tiny/2", 128)]
CALIBRATION += [_case("convnext_atto", 256, ranks=2), _case("convnext_atto", 384, ranks=2)]
CALIBRATION += [_case("resnet10t", 256, ranks=2), _case("convnext_tiny/2", 256, ranks=2)]
CALIBRATION += [replace(_case("convnext_atto", 128), checkpointing="block")]
# Fixed before anything was calibrated.
HELD_OUT = [
    _case("convnext_atto", 224),
    _case("convnext_atto", 512, ranks=2),
    _case("convnext_tiny/4", 256),
    _case("convnext_tiny/4", 512, ranks=2),
    _case("resnet18", 256),
    _case("resnet18", 512, ranks=2),
    replace(_case("convnext_atto", 224), checkpointing="block"),
]
LIMIT = 0.15
OTHER = "::"  # the rate of ops that no calibration has: that of all whose time memory bounds


# ---- calibration ----


class Rate:
    """seconds = calls · a + flops · b + bytes · c, none of the three negative: a call costs something, arithmetic has a
    speed and so has memory. Thin channels are slow because of their bytes, small images because of their calls."""

    def __init__(self, points):
        """points: (calls, flops, bytes, seconds). An error counts by the time in which it is made."""
        table = torch.tensor(points, dtype=torch.float64)
        x, y = table[:, :3], table[:, 3].clamp_min(1e-9)
        scale = x.amax(0).clamp_min(1e-30)
        a, b = x / scale / y.sqrt()[:, None], y.sqrt()
        best, self.factors = math.inf, [0.0, 0.0, 0.0]
        used = [i for i in (2, 1, 0) if x[:, i].max() > 0]  # one point alone is in proportion to its bytes
        for terms in range(1, min(len(used), len(points)) + 1):
            for kept in itertools.combinations(used, terms):
                found = torch.linalg.lstsq(a[:, kept], b[:, None], driver="gelsd").solution[:, 0]
                residual = float(((a[:, kept] @ found - b) ** 2).sum())
                if (found >= 0).all() and residual < best - 1e-9 * float(y.sum()):
                    best, self.factors = residual, [0.0, 0.0, 0.0]
                    for index, value in zip(kept, found.tolist()):
                        self.factors[index] = value / float(scale[index])

    def __call__(self, calls, flops, moved):
        return sum(factor * x for factor, x in zip(self.factors, (calls, flops, moved)))


class Host:
    """seconds = ops · a + ops on DTensors · b, of what is left of steps when the ops' own times are taken away. Either
    may be negative: what timing an op takes is in the op's time."""

    def __init__(self, points):
        """points: (ops, ops on DTensors, seconds)."""
        table = torch.tensor(points, dtype=torch.float64)
        self.factors = torch.linalg.lstsq(table[:, :2], table[:, 2:], driver="gelsd").solution[:, 0].tolist()

    def __call__(self, ops, wrapped):
        return self.factors[0] * ops + self.factors[1] * wrapped


def clocks(clock):
    """(seconds of a step, of an op): an op runs on one thread."""
    if clock == "wall":
        return time.perf_counter, time.perf_counter
    return time.process_time, time.thread_time


def measure(cases, rounds, clock):
    """Runs all, which take turns, so that a machine whose speed drifts is as fast for what calibrates as for what is
    predicted.

    Returns:
        case -> (processor seconds, wall seconds) of each step, and case -> points of each counted step, of
        calibrations on one rank. Of what ranks do together, the slowest counts.
    """
    alone, both = own_mesh(), DeviceMesh("cpu", torch.arange(world()))
    step_clock, op_clock = clocks(clock)
    runs = {case: program(case, alone if case.ranks == 1 else both, rank()) for case in cases}
    for run in runs.values():
        run.step()
    steps, points = defaultdict(list), defaultdict(list)
    quiet()
    for _ in range(rounds):
        for case, run in runs.items():
            dist.barrier()
            begin, wall = step_clock(), time.perf_counter()
            run.step()
            found = torch.tensor([step_clock() - begin, time.perf_counter() - wall], dtype=torch.float64)
            if case.ranks > 1:
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            steps[case].append(found.tolist())
            if cases[case]:
                dist.barrier()
                counter = Counter(op_clock)
                with counter:
                    run.step()
                points[case].append(counter.points)
    gc.unfreeze()
    return steps, points


def calibrate(works, steps, points, links):
    """Rates by way and class, host seconds by way, of recomputing and of being split, from what `measure` gives.

    Args:
        works: see `counted`, of the calibration's cases.
        steps, points: see `measure`.
        links: see `messages`.
    """
    calibration = {"rates": {}, "host": {}, **links}
    for way in ("one card", "haloconv"):
        by_class, rest = defaultdict(list), []
        for case in (case for case in points if case.way == way):
            ops = typical(points[case])
            for name, *point in ops:
                by_class[name].append((1, *point))
            beside = low([step[0] for step in steps[case]]) - sum(op[-1] for op in ops)
            rest.append((len(ops), dtensor_calls(works[case][0]), beside))
        by_class[OTHER] = [point for name, values in by_class.items() if "::" in name for point in values]
        calibration["rates"][way] = {name: Rate(values) for name, values in by_class.items()}
        calibration["host"][way] = Host(rest)

    def left(case):
        strip, whole = works[case]
        return low([step[0] for step in steps[case]]) - sum(predict(strip, whole, calibration, case).values())

    calibration |= {"recomputing": {}, "split": free}
    for way in calibration["rates"]:
        costs = [
            (recomputed(case, works[case][0]), 0.0, 0.0, max(0.0, left(case)))
            for case in works
            if case.way == way and case.ranks == 1 and case.checkpointing != "none"
        ]
        if costs:
            calibration["recomputing"][way] = Rate(costs)
    split = []
    for case in (case for case in works if case.ranks > 1):
        split.append((*split_calls(*works[case], case.ranks), max(0.0, left(case))))
    calibration["split"] = Rate(split)
    return calibration


def free(*counts):
    return 0.0


def recomputed(case, work):
    """Ops that are there because of recomputation."""
    plain, _ = counted(replace(case, checkpointing="none"))
    return sum(work.calls.values()) - sum(plain.calls.values())


def split_calls(strip, whole, ranks):
    """Exchanges of columns, exchanges of norms' statistics, ops on DTensors."""
    exchanges, _, _ = whole.exchanges(ranks)
    return exchanges - 2 * whole.norms, 2 * whole.norms, dtensor_calls(strip)


def dtensor_calls(work):
    return work.calls.get(WRAPPED, 0.0)


def typical(rounds):
    """One step's ops from several, which have the same in the same order: each its median share of the whole, and the
    whole a low one of theirs."""
    whole = low([sum(op[3] for op in ops) for ops in rounds])
    shares = []
    for same in zip(*rounds, strict=True):
        (what,) = {op[:3] for op in same}
        shares.append(
            (what, statistics.median(op[3] / sum(o[3] for o in ops) for op, ops in zip(same, rounds)))
        )
    total = sum(share for _, share in shares)
    return [(*what, whole * share / total) for what, share in shares]


def messages(rounds, clock):
    """Rates of an exchange's bytes and of all-reduces over both ranks, from two sizes of each."""
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
        result[kind] = Rate([(1, 0.0, size, low(taken[kind, size][2:])) for k, size in calls if k == kind])
    return result


def low(values):
    """The lowest but an eighth: what others on the machine add, only adds."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 8]


def own_mesh():
    return [DeviceMesh("cpu", torch.arange(index, index + 1)) for index in range(world())][rank()]


# ---- prediction ----


def predict(work, whole, calibration, case):
    """Seconds of a step by part. `work`: of a rank's strip; `whole`: of the unsplit image, whose windows are split."""
    rates, host, ranks = calibration["rates"][case.way], calibration["host"][case.way], case.ranks
    share = whole.boundary(ranks)
    wrapped = dtensor_calls(work)
    parts = {
        "compute": host(sum(work.calls.values()) - wrapped, wrapped),
        "exchange": 0.0,
        "reduction": 0.0,
    }
    for name, calls in work.calls.items():
        if name == WRAPPED:
            continue
        seconds = rates.get(name, rates[OTHER])(calls, work.flops_of[name], work.bytes_of[name])
        widened = 1 + share if name.startswith(("dense", "depthwise", "grouped")) else 1.0
        parts["compute"] += seconds * widened
    if case.checkpointing != "none":
        again = calibration["recomputing"].get(case.way, free)
        parts["compute"] += again(recomputed(case, work), 0.0, 0.0)
    if ranks > 1:
        _, _, sent = whole.exchanges(ranks)
        bandwidth = calibration["exchange"].factors[2]
        parts["exchange"] = calibration["split"](*split_calls(work, whole, ranks)) + bandwidth * sent
        parts["reduction"] = calibration["all_reduce"](whole.buckets(), 0.0, whole.parameter_bytes)
    return parts


def counted(case):
    """(Work of a rank's strip, Work of the unsplit image)."""
    batch, channels, height, width = case.input
    strip = count(replace(case, input=(batch, channels, height, width // case.ranks)))
    return strip, count(replace(case, way="one card"))


def runs(bench, known, wanted, rounds, clock):
    """Measures, calibrates with `known`, and adds predicted beside measured for `known` and `wanted`."""
    works = {
        case: counted(case) if rank() == 0 else None for case in {**known, **wanted}
    }  # the first rank predicts
    dist.init_process_group("gloo")
    links = messages(rounds, clocks(clock)[0])
    steps, points = measure({**known, **wanted}, rounds, clock)
    dist.destroy_process_group()
    if rank() != 0:
        return
    calibration = calibrate({case: works[case] for case in known}, steps, points, links)
    for case, (strip, whole) in works.items():
        parts = predict(strip, whole, calibration, case)
        total = sum(parts.values())
        actual, wall = (low(column) for column in zip(*steps[case]))
        bench.add(
            part="calibration" if case in known else "held out", **case.as_row(), measured="cpu", step_ms=1e3 * actual,
            predicted=1e3 * total, actual=1e3 * actual, deviation=total / actual - 1, unit=f"ms ({clock})",
            wall_ms=1e3 * wall, boundary=whole.boundary(case.ranks),
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
    add("--rounds", type=int, default=16)
    args = bench.parse()
    rounds = 1 if args.fast else args.rounds
    results = Path(__file__).resolve().parent / "results"
    wanted = HELD_OUT[1:2] if args.fast else HELD_OUT
    known = {}  # case -> whether its ops are timed, too
    for case in CALIBRATION:
        if args.fast and case not in (CALIBRATION[0], CALIBRATION[4]):
            continue
        ways = ("one card", "haloconv") if case.ranks == 1 else ("haloconv",)
        timed = case.ranks == 1 and case.checkpointing == "none"
        known |= {replace(case, way=way): timed for way in ways}
    model = "convnext_tiny" if args.fast else "convnext_xlarge"
    if world() == 2:
        runs(bench, known, dict.fromkeys(wanted, False), rounds, args.clock)
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
            [
                "node",
                "cards",
                "spatial",
                "data_parallel",
                "idle_cards",
                "predicted",
                "unit",
                "peak_gib",
                "bound",
            ],
            own,
            title="fastest",
        )


if __name__ == "__main__":
    main()
