"""Whole training iterations (forward, loss, backward, step): images that grow with the number of ranks.

    torchrun --nproc-per-node 2 benchmarks/speed_table.py                  # a small net over gloo
    torchrun --nproc-per-node 8 benchmarks/speed_table.py --device cuda    # ConvNeXt-XL, 1024/1 2048/2 4096/4 4096/8
    ... --sizes 512/1 1024/2 --model convnext_tiny --batch 4 --height 256

Each WIDTH/RANKS is timed with haloconv on the first RANKS ranks (one rank: the plain network), beside, in the same run,
all of them taking turns:

    each block recomputed   gradient checkpointing
    pipeline                torch.distributed.pipelining, 1F1B, one image a micro-batch, on as many ranks
    separate strips         every rank by itself on an image as wide as its shard: the same work, no exchange. Ranks
                            that share a machine slow each other here too
    torch's legacy route    torch's older convolution rule, where it runs (else the note says why not), after the
                            others, with haloconv's rules off; its error is shown and not asserted

Losses and gradients of what haloconv runs are compared with the unsplit network's, on the narrowest image. Sizes with
more ranks than there are, are left out. benchmarks/README.md defines the columns.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import gc
import statistics
import time
import warnings
from dataclasses import replace

import haloconv
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from conv import legacy_route_is_open
from haloconv._rules import _registry
from harness import PUBLISHED_SPEED, Benchmark, Column, interleaved
from memory_cases import Case, program
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

COLUMNS = {
    "way": Column("way"),
    "speedup": Column("speedup", ".2f"),
    "efficiency": Column("efficiency", ".1%"),
    "images_per_s": Column("images/s", ".2f"),
    "mpixel_per_s": Column("Mpixel/s", ".2f"),
    "exchange_ms": Column("exchanges ms", ".1f"),
    "exchange_share": Column("share", ".1%"),
    "reduction_ms": Column("gradients ms", ".1f"),
    "reduction_share": Column("share", ".1%"),
    "messages": Column("messages", "d"),
    "sent_mib": Column("sent MiB", ".2f"),
    "bubble": Column("bubble", ".1%"),
    "idle": Column("idle", ".1%"),
    "balance": Column("balance", ".2f"),
    "note": Column("note"),
}
SHOWN = [
    "name",
    "input",
    "ranks",
    "step_ms",
    "step_ms_p10",
    "step_ms_p90",
    "speedup",
    "efficiency",
    "ratio",
    "of",
]
SHOWN += [
    "images_per_s",
    "exchange_ms",
    "exchange_share",
    "reduction_ms",
    "reduction_share",
    "messages",
    "sent_mib",
]
SHOWN += ["bubble", "idle", "balance", "error", "published", "note"]  # fmt: skip

DEFAULTS = {  # of a device
    "cuda": dict(model="convnext_xlarge", batch=7, height=512, sizes=["1024/1", "2048/2", "4096/4", "4096/8"]),
    "cpu": dict(model="convnext_atto", batch=4, height=64, sizes=["128/1", "256/2", "512/4", "512/8"]),
}  # fmt: skip
LEGACY_COLUMNS = (
    128  # of a rank: a 7-wide window needs 3 columns of its shard, and ConvNeXts divide the width by 32
)
TOLERANCE = {"float32": 1e-3, "bfloat16 autocast": 5e-2}  # sums in another order, through a whole network


class Timed:
    """A program whose steps note how long they communicated."""

    def __init__(self, run, device):
        self.run, self.device, self.seconds, self.counts = run, device, [], {}
        self.chunks = []

    def __call__(self):
        haloconv.reset_comm_stats()
        self.chunks.clear()
        self.run.step()
        found = haloconv.comm_stats()
        reduction = found["by_op"].get("gradients", {}).get("seconds", 0.0)
        sent = found["bytes"] - found["by_op"].get("gradients", {}).get("bytes", 0)
        self.counts = {"messages": found["messages"], "sent_mib": sent / 2**20}
        self.seconds.append((found["seconds"] - reduction, reduction, self.busy()))

    def busy(self):
        return 0.0


class Contiguous(torch.autograd.Function):
    """What a process group can send, of activations and of their gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.contiguous()

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


class TimedPipeline(Timed):
    """Notes how long its stage computes, too."""

    def __init__(self, run, device):
        super().__init__(run, device)
        forward = run.model.forward
        run.model.forward = lambda x: Contiguous.apply(forward(Contiguous.apply(x)))
        stage = run.schedule._stage
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, function):
        def call(*args, **kwargs):
            begin = self._now()
            result = function(*args, **kwargs)
            self.chunks.append((begin, self._now()))
            return result

        return call

    def _now(self):
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def busy(self):
        if self.device != "cuda":
            return sum(end - begin for begin, end in self.chunks)
        torch.cuda.synchronize()
        return sum(1e-3 * begin.elapsed_time(end) for begin, end in self.chunks)


@contextlib.contextmanager
def torchs_rules():
    """haloconv's rules out of the way, those for backward too, which `disable_rules` leaves."""
    on = _registry.rules_enabled()
    haloconv.disable_rules()
    _registry._remove(_registry._backward)
    try:
        yield
    finally:
        _registry._install(_registry._backward)
        if on:
            haloconv.enable_rules()


class MeanPool(nn.Module):
    """A global average pool in an op that torch's DTensor has a rule for. It makes a gradient that is whole on every
    rank, which the older convolution rule takes for a shard."""

    def forward(self, x):
        if x.requires_grad:
            placements = x.placements
            x.register_hook(lambda grad: grad.redistribute(placements=placements))
        return x.mean((-2, -1), keepdim=True)


class Legacy:
    """torch's DTensor without haloconv: replicated parameters, an image sharded over its width, F.conv2d."""

    def __init__(self, case, mesh, rank):
        self.plain = program(replace(case, way="one card"), mesh, rank)
        for parent in list(self.plain.model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.AdaptiveAvgPool2d):  # of a classifier: global
                    setattr(parent, name, MeanPool())
        self.model = distribute_module(self.plain.model, mesh)
        self.images = haloconv.distribute(self.plain.images, mesh)
        self.plain.optimizer = None if case.optimizer == "none" else _sgd(self.model)

    def step(self):
        """Inside `torchs_rules`."""
        self.model.zero_grad(set_to_none=True)
        out = self.model(self.images).redistribute(placements=[Replicate()]).to_local()
        loss = F.cross_entropy(out, self.plain.labels)
        loss.backward()
        if self.plain.optimizer is not None:
            self.plain.optimizer.step()
        return loss.detach()


def _sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def whole(tensor):
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.detach().redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def outcome(run):
    """Loss and gradients of a step that changes no parameter."""
    optimizer, run.optimizer = getattr(run, "optimizer", None), None
    loss = run.step()
    grads = {n: whole(p.grad) for n, p in run.model.named_parameters() if p.grad is not None}
    run.model.zero_grad(set_to_none=True)
    run.optimizer = optimizer
    return loss, grads


def error(found, expected):
    """The largest difference of loss and gradients, relative to the largest of their kind; a gradient that is not there
    differs by all that it should be."""
    (loss, grads), (expected_loss, wanted) = found, expected
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    worst = max(
        float((grads[name] - grad).abs().max() if name in grads else grad.abs().max())
        for name, grad in wanted.items()
    )
    return max(float((loss - expected_loss).abs() / expected_loss.abs()), worst / largest)


def legacy_error(legacy, expected):
    optimizer, legacy.plain.optimizer = legacy.plain.optimizer, None
    try:
        loss = legacy.step()
        grads = {n: whole(p.grad) for n, p in legacy.model.named_parameters() if p.grad is not None}
        return error((loss, grads), expected)
    finally:
        legacy.plain.optimizer = optimizer


def sizes(texts):
    return [tuple(map(int, text.split("/"))) for text in texts]


def cases_of(width, ranks, base):
    """name -> (case, ranks that take part)."""
    one = replace(base, input=(*base.input[:3], width))
    if ranks == 1:
        return {"one rank": one, "one rank, each block recomputed": replace(one, checkpointing="block")}
    split = replace(one, way="haloconv", ranks=ranks)
    return {
        "haloconv": split,
        "haloconv, each block recomputed": replace(split, checkpointing="block"),
        "pipeline": replace(one, way="pipeline", ranks=ranks),
        "separate strips": replace(one, input=(*base.input[:3], width // ranks)),
    }


def of_all(values, device, op=dist.ReduceOp.MAX):
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def measure(bench, args, device, base):
    """Everything is built first; then one call of each in turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = [(width, ranks) for width, ranks in sizes(args.sizes) if ranks <= world]
    meshes = {ranks: DeviceMesh(args.device, torch.arange(ranks)) for ranks in sorted({r for _, r in wanted})}
    alone = [DeviceMesh(args.device, torch.arange(index, index + 1)) for index in range(world)][rank]
    narrow = replace(base, input=(*base.input[:3], wanted[0][0]))
    expected = outcome(program(narrow, alone, rank))
    legacy_open = not args.no_legacy and base.dtype == "float32" and legacy_route_is_open()
    steps, entries = {}, []
    with bench.progress(len(wanted)) as advance:
        for width, ranks in wanted:
            member = rank < ranks
            for name, case in cases_of(width, ranks, base).items():
                if name == "pipeline" and args.no_pipeline:
                    continue
                found, timed = float("nan"), None
                mesh = alone if case.way == "one card" else meshes.get(ranks)
                if member:
                    timed = (TimedPipeline if case.way == "pipeline" else Timed)(
                        program(case, mesh, rank), args.device
                    )
                    if name not in ("pipeline", "separate strips"):
                        at = replace(case, input=narrow.input)
                        found = error(outcome(program(at, mesh, rank)), expected)
                (found,) = of_all([found if found == found else -1.0], device)
                if found > TOLERANCE[base.dtype]:
                    raise AssertionError(
                        f"{name} on {ranks} ranks: error is {found}, expected <= {TOLERANCE[base.dtype]}"
                    )
                entries.append(((width, ranks, name), case, timed, found if found >= 0 else None, None))
            if legacy_open and ranks == world > 1:
                entries.append(
                    add_legacy(cases_of(width, ranks, base)["haloconv"], narrow, meshes[ranks], alone)
                )
            gc.collect()
            advance(f"{width}/{ranks}")
        for key, _, timed, _, _ in entries:
            if timed is not False:
                steps[key] = timed or (lambda: None)
        # Switching rules empties DTensor's caches, so torch's route does not take turns with haloconv.
        legacy = {key: steps.pop(key) for key in list(steps) if key[2].startswith("torch's")}
        times = interleaved(steps, args.rounds)
        if legacy:
            with torchs_rules():
                times |= interleaved(legacy, args.rounds)
    for key, case, timed, found, note in entries:
        if timed is False:
            add_row(bench, args, key, case, None, {}, found, note, device)
        else:
            add_row(bench, args, key, case, timed, times[key], found, note, device)


def add_legacy(case, narrow, mesh, alone):
    """An entry whose program is False where torch's route cannot run it; then the note says what it stumbled over."""
    rank, key = dist.get_rank(), (case.input[-1], case.ranks, "torch's legacy route")
    at = replace(case, input=(*case.input[:3], max(narrow.input[-1], LEGACY_COLUMNS * case.ranks)))
    expected = outcome(program(replace(at, way="one card", ranks=1), alone, rank))
    found = legacy = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        why = ""
        try:
            with torchs_rules():
                found = legacy_error(Legacy(at, mesh, rank), expected)
                legacy = Legacy(case, mesh, rank)
                legacy.step()
        except Exception as failure:  # whatever it is that torch's route stumbles over
            why = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        reasons = [None] * mesh.size()
        dist.all_gather_object(reasons, why)
    why = next((reason for reason in reasons if reason), None)
    if why is not None:
        return key, case, False, None, f"cannot run: {why}"
    note = None if found <= TOLERANCE["float32"] else "wrong gradients"
    return key, case, Timed(legacy, mesh.device_type), found, note


def add_row(bench, args, key, case, timed, times, found, note, device):
    width, ranks, name = key
    batch, _, height, _ = case.input
    median = times.get("step_ms")
    exchange = reduction = busy = 0.0
    counts = [0.0, 0.0]
    if timed:
        last = timed.seconds[-args.rounds :]
        exchange, reduction, busy = (1e3 * statistics.median(values) for values in zip(*last))
        counts = [timed.counts["messages"], timed.counts["sent_mib"]]
    if name == "pipeline":
        (total,) = of_all([busy], device, dist.ReduceOp.SUM)
        (longest,) = of_all([busy], device)
    exchange, reduction, messages, sent = of_all([exchange, reduction, *counts], device)
    row = dict(
        name=name, way=case.way, model=case.model, input=[batch, 3, height, width], ranks=ranks, dtype=case.dtype,
        checkpointing=case.checkpointing, optimizer=case.optimizer, measured=args.device, error=found, note=note,
        **times,
    )  # fmt: skip
    if median is not None:
        row |= {"images_per_s": 1e3 * batch / median, "mpixel_per_s": batch * height * width / median / 1e3}
    if case.way == "haloconv" and median is not None and not name.startswith("torch"):
        row |= {"exchange_ms": exchange, "exchange_share": exchange / median, "reduction_ms": reduction}
        row |= {"reduction_share": reduction / median, "messages": int(messages), "sent_mib": sent}
    if name == "pipeline":
        row |= {"bubble": (ranks - 1) / (batch + ranks - 1), "idle": 1 - total / ranks / median}
        row |= {"balance": total / ranks / longest}
    if name in ("haloconv", "one rank") and case.model == "convnext_xlarge" and (batch, height) == (7, 512):
        row["published"] = PUBLISHED_SPEED.get((width, ranks))
    bench.add(**row)


def relate(rows):
    """Speedup by the table's definition, and the ratio to the plain row of the same size."""
    first = next((row for row in rows if row["name"] == "one rank"), None)
    plain = {(row["input"][-1], row["ranks"]): row for row in rows if row["name"] in ("one rank", "haloconv")}
    for row in rows:
        if row["step_ms"] is None:
            continue
        if first is not None and row["name"] != "separate strips":
            work = row["input"][-1] / first["input"][-1]
            row["speedup"] = first["step_ms"] * work / row["step_ms"]
            row["efficiency"] = row["speedup"] / row["ranks"]
        beside = plain[row["input"][-1], row["ranks"]]
        if beside is not row:
            row |= {"ratio": row["step_ms"] / beside["step_ms"], "of": beside["name"]}


def draw(rows):
    def plot(figure):
        axes = figure.subplots()
        for name in dict.fromkeys(row["name"] for row in rows if row["speedup"] is not None):
            own = [row for row in rows if row["name"] == name and row["speedup"] is not None]
            axes.plot([row["ranks"] for row in own], [row["speedup"] for row in own], "o-", label=name)
        most = max(row["ranks"] for row in rows)
        axes.plot([1, most], [1, most], color="grey", linewidth=1, label="as many times as ranks")
        axes.set_xlabel("ranks")
        axes.set_ylabel("speedup: t(one rank) · width / width(one rank) / t")
        axes.legend()

    return plot


def main():
    bench = Benchmark("speed_table", __doc__, COLUMNS)
    add = bench.parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--model", help="of timm (cpu: convnext_atto, cuda: convnext_xlarge)")
    add("--batch", type=int)
    add("--height", type=int)
    add("--sizes", nargs="+", metavar="WIDTH/RANKS", help="the first is what speedups are relative to")
    add("--dtype", choices=list(TOLERANCE), default="float32")
    add("--optimizer", choices=["none", "sgd", "momentum", "adam"], default="sgd")
    add("--rounds", type=int, default=10)
    add("--no-legacy", action="store_true")
    add("--no-pipeline", action="store_true")
    args = bench.parse()
    for key, value in DEFAULTS[args.device].items():
        setattr(args, key, getattr(args, key) or value)
    if args.fast:
        args.batch, args.height, args.rounds = 2, 32, 1
        args.sizes = ["128/1", "256/2"]
    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        rank=rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    base = Case(
        model=args.model, input=(args.batch, 3, args.height, 0), dtype=args.dtype, optimizer=args.optimizer
    )
    measure(bench, args, device, base)
    relate(bench.rows)
    bench.finish(SHOWN, title=f"{args.model}, {args.dtype}, {args.optimizer}", plot=draw(bench.rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
