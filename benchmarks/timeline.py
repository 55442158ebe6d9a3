"""One training step on each rank over time: what computes, what waits for halos, what waits for gradients.

    torchrun --nproc-per-node 2 benchmarks/timeline.py --plot timeline.png

Of several steps under torch's profiler the one of median length is shown. A lane's spans are those of the ops that are
its own (`LANES`); time in no lane is Python, autograd and the dispatcher. A profiled step takes longer than another.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import Benchmark, Column, rank
from memory_cases import Case, program
from torch.distributed.device_mesh import init_device_mesh

COLUMNS = {
    "rank": Column("rank", "d"),
    "lane": Column("lane"),
    "spans": Column("spans"),
    "total_ms": Column("ms", ".2f"),
    "share": Column("of the step", ".1%"),
}
# Lane -> beginnings of ops' names. An op counts for the first lane that has it.
LANES = {
    "exchange: post": ("haloconv::_post",),
    "exchange: wait": ("haloconv::_wait",),
    "gradients: all-reduce": ("gloo:all_reduce", "nccl:all_reduce", "c10d::allreduce_"),
    "convolutions": ("haloconv::convolution",),
    "other ops": ("aten::", "haloconv::"),
}


def merged(spans):
    """Without what lies inside another."""
    result = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([begin, end])
    return result


def without(spans, holes):
    """What is left of merged spans outside of merged holes."""
    left = []
    for begin, end in spans:
        for hole_begin, hole_end in holes:
            if hole_end <= begin or hole_begin >= end:
                continue
            if hole_begin > begin:
                left.append([begin, hole_begin])
            begin = max(begin, hole_end)
        if begin < end:
            left.append([begin, end])
    return left


def profiled(step, count):
    """Of each of `count` steps: milliseconds, and lane -> spans in milliseconds since its beginning. All in one session
    of the profiler: several, beside gloo's threads, have crashed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            dist.barrier()
            with torch.profiler.record_function("step"):
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    events = profiler.events()
    return [_lanes(event.time_range, events) for event in events if event.name == "step"]


def _lanes(whole, events):
    found = {lane: [] for lane in LANES}
    for event in events:
        lane = next((lane for lane, names in LANES.items() if event.name.startswith(names)), None)
        inside = whole.start <= event.time_range.start and event.time_range.end <= whole.end
        if lane is not None and inside:
            found[lane].append(
                [(t - whole.start) / 1e3 for t in (event.time_range.start, event.time_range.end)]
            )
    taken = []  # a lane's time is not also another's
    for lane, spans in found.items():
        found[lane] = without(merged(spans), taken)
        if not lane.startswith("gradients"):  # they run beside everything
            taken = merged([*taken, *found[lane]])
    return (whole.end - whole.start) / 1e3, found


def draw(rows):
    def plot(figure):
        axes = figure.subplots(max(row["rank"] for row in rows) + 1, 1, sharex=True, squeeze=False)[:, 0]
        for row in rows:
            at = axes[row["rank"]]
            lane = list(LANES).index(row["lane"])
            bars = [(begin, end - begin) for begin, end in row["spans"]]
            at.broken_barh(bars, (len(LANES) - 1 - lane - 0.4, 0.8), color=f"C{lane}")
            at.set_yticks(range(len(LANES)), list(LANES)[::-1])
            at.set_title(f"rank {row['rank']}, step of {row['step_ms']:.0f} ms", fontsize=9)
        axes[-1].set_xlabel("ms")

    return plot


def main():
    bench = Benchmark("timeline", __doc__, COLUMNS)
    add = bench.parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--model", default="convnext_atto")
    add("--input", default="4x3x64x512", metavar="NxCxHxW")
    args = bench.parse()
    shape = (1, 3, 32, 128) if args.fast else tuple(map(int, args.input.split("x")))
    if args.device == "cuda":
        torch.cuda.set_device(rank() % torch.cuda.device_count())
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(args.device, (world,))
    case = Case(model=args.model, input=shape, way="haloconv", ranks=world, optimizer="sgd")
    run = program(case, mesh, rank())
    for _ in range(2):
        run.step()
    steps = profiled(run.step, 1 if args.fast else 5)
    everyone = [None] * world
    dist.all_gather_object(everyone, steps)
    order = sorted(range(len(steps)), key=lambda number: max(of[number][0] for of in everyone))
    middle = order[len(order) // 2]
    for number, of_rank in enumerate(everyone):
        length, found = of_rank[middle]
        for lane, spans in found.items():
            total = sum(end - begin for begin, end in spans)
            spans = [[round(t, 3) for t in span] for span in spans]
            bench.add(
                **case.as_row(), measured=args.device, rank=number, lane=lane, spans=spans, total_ms=total,
                share=total / length, step_ms=length,
            )  # fmt: skip
    bench.finish(["rank", "lane", "total_ms", "share", "step_ms"], plot=draw(bench.rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
