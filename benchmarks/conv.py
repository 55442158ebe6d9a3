"""One sharded convolution, forward and backward, against the bare local one and against every rival, in one run.

    torchrun --nproc-per-node 2 benchmarks/conv.py [--json FILE] [--filter TEXT] [--rounds N]
    torchrun --nproc-per-node 2 benchmarks/conv.py --sweep      # widths down to where sharding stops paying

For each case, every round times one call of each of these in turn (the slowest rank counts):

    halo      haloconv.nn's layer on a DTensor, gradients of input, weight and bias
    local     the bare local convolution of this rank's columns, zero-padded: what sharding cannot beat
    beside    local, while raw messages of the same number of bytes travel, forward and backward
    extended  halo with the general path: one buffer of shard and halos
    legacy    torch's own DTensor route of 2.10 and 2.11, where it can run at all (its input gradient is not right)
    raw       those raw messages alone: batch_isend_irecv of ready buffers, forward's and backward's

and one uncounted call compares output and gradients with the unsplit convolution. OMP_NUM_THREADS=1 unless set.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import math
from dataclasses import dataclass

import haloconv
import torch
import torch.distributed as dist
import torch.nn.functional as F
from haloconv import _C
from harness import Benchmark, Column, interleaved, ratio_plot
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

SEED = 20261130


@dataclass(frozen=True)
class Case:
    """A convolution of a published network; sizes are the unsplit input's, the last dim is split."""

    name: str
    channels: int
    out_channels: int
    sizes: tuple
    kernel: int
    stride: int = 1
    groups: int = 1
    batch: int = 1

    @property
    def padding(self):
        return self.kernel // 2

    @property
    def is_depthwise(self):
        return self.groups == self.channels > 1


def depthwise(name, channels, sizes, kernel):
    return Case(name, channels, channels, sizes, kernel, groups=channels)


CASES = [
    # ConvNeXt-XL at 256 x 512: the four stages' 7x7.
    depthwise("convnext-xl stage 1", 256, (64, 128), 7),
    depthwise("convnext-xl stage 2", 512, (32, 64), 7),
    depthwise("convnext-xl stage 3", 1024, (16, 32), 7),
    depthwise("convnext-xl stage 4", 2048, (8, 16), 7),
    depthwise("mobilenet 3x3", 192, (64, 128), 3),
    Case("resnet50 stem", 3, 64, (256, 512), 7, stride=2),
    Case("resnet50 stage 1 3x3", 64, 64, (64, 128), 3),
    Case("resnet50 stage 2 3x3/2", 128, 128, (64, 128), 3, stride=2),
    Case("resnet50 stage 3 3x3", 256, 256, (16, 32), 3, batch=2),
    Case("regnetx-3.2gf 3x3 grouped", 96, 96, (64, 128), 3, groups=2),
    Case("vae 3x3", 128, 128, (64, 128), 3),
    Case("unet3d 3x3x3", 16, 32, (16, 32, 64), 3),
]

COLUMNS = {
    "layout": Column("layout"),
    "kind": Column("kind"),
    "halo_ms": Column("halo ms", ".2f"),
    "halo_ms_p10": Column("10 %", ".2f"),
    "halo_ms_p90": Column("90 %", ".2f"),
    "local_ms": Column("local ms", ".2f"),
    "beside_ms": Column("beside ms", ".2f"),
    "extended_ms": Column("extended ms", ".2f"),
    "legacy_ms": Column("legacy ms", ".2f"),
    "raw_ms": Column("raw ms", ".2f"),
    "unsplit_ms": Column("unsplit ms", ".2f"),
    "bytes": Column("bytes", "d"),
    "halo_over_local": Column("/local", ".2f"),
    "halo_over_beside": Column("/beside", ".2f"),
    "extended_over_halo": Column("extended/", ".2f"),
    "legacy_over_halo": Column("legacy/", ".2f"),
    "speedup": Column("speed-up", ".2f"),
}
SHOWN = [
    "name", "layout", "dtype", "halo_ms", "halo_ms_p10", "halo_ms_p90", "local_ms", "beside_ms", "extended_ms",
    "legacy_ms", "raw_ms", "bytes", "halo_over_local", "halo_over_beside", "extended_over_halo",
    "legacy_over_halo", "error",
]  # fmt: skip


class Rivals:
    """One case on this rank: its tensors, and a function for each of the ways to compute it."""

    def __init__(self, case, layout, dtype, mesh):
        self.case, self.mesh, self.rank, self.world = case, mesh, mesh.get_local_rank(), mesh.size()
        n = len(case.sizes)
        form = torch.contiguous_format
        if layout == "NHWC":
            form = torch.channels_last if n == 2 else torch.channels_last_3d
        generator = torch.Generator().manual_seed(SEED)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        torch.manual_seed(SEED)
        module = getattr(haloconv.nn, f"Conv{n}d")(
            case.channels, case.out_channels, case.kernel, case.stride, case.padding, groups=case.groups
        )
        x = random(case.batch, case.channels, *case.sizes)
        out_sizes = [(size - 1) // case.stride + 1 for size in case.sizes]
        grad = random(case.batch, case.out_channels, *out_sizes)
        self.x, self.grad = (t.to(dtype).contiguous(memory_format=form) for t in (x, grad))
        self.weight = module.weight.detach().to(dtype).contiguous(memory_format=form)
        self.bias = module.bias.detach().to(dtype)
        self.layer = module.to(dtype)
        for name in ("weight", "bias"):
            value = DTensor.from_local(getattr(self, name), mesh, [Replicate()], run_check=False)
            setattr(self.layer, name, torch.nn.Parameter(value))
        self.x_split = haloconv.distribute(self.x, mesh).requires_grad_()
        self.grad_split = haloconv.distribute(self.grad, mesh)
        self.x_local = self.x_split.to_local().detach().contiguous(memory_format=form).requires_grad_()
        self.weight_local = self.weight.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        self.bias_local = self.bias.detach().clone().requires_grad_()
        self.grad_local = self.local_forward().detach()
        self.messages = [self._messages(op) for op in ("convolution", "convolution_backward")]

    # ---- the ways to compute it ----

    def convolve(self, x, weight, bias):
        case = self.case
        function = getattr(F, f"conv{len(case.sizes)}d")
        return function(x, weight, bias, case.stride, case.padding, groups=case.groups)

    def halo(self):
        out = self.layer(self.x_split)
        return out, *torch.autograd.grad(
            out, (self.x_split, self.layer.weight, self.layer.bias), self.grad_split
        )

    def extended(self):
        before = _C.convolution_path("general")
        try:
            return self.halo()
        finally:
            _C.convolution_path(before)

    def local_forward(self):
        return self.convolve(self.x_local, self.weight_local, self.bias_local)

    def local_backward(self, out):
        return torch.autograd.grad(out, (self.x_local, self.weight_local, self.bias_local), self.grad_local)

    def local(self):
        return self.local_backward(self.local_forward())

    def beside(self):
        works = self._start(self.messages[0])
        out = self.local_forward()
        self._finish(works)
        works = self._start(self.messages[1])
        self.local_backward(out)
        self._finish(works)

    def raw(self):
        for messages in self.messages:
            self._finish(self._start(messages))

    def legacy(self):
        """torch's route; with gradients of weight and bias only, for it has none of the input."""
        out = self.convolve(self.x_split, self.layer.weight, self.layer.bias)
        return torch.autograd.grad(
            out, (self.x_split, self.layer.weight, self.layer.bias), self.grad_split, allow_unused=True
        )

    def unsplit(self):
        x, weight, bias = (t.detach().requires_grad_() for t in (self.x, self.weight, self.bias))
        out = self.convolve(x, weight, bias)
        return out, *torch.autograd.grad(out, (x, weight, bias), self.grad)

    # ---- messages ----

    def _messages(self, op):
        """Ready buffers as large as what haloconv sends in this operation, and to the same peers."""
        haloconv.reset_comm_stats()
        self.halo()
        size = haloconv.comm_stats()["by_op"].get(op, {"bytes": 0, "messages": 1})
        each = size["bytes"] // max(1, size["messages"])
        peers = [peer for peer in (self.rank - 1, self.rank + 1) if 0 <= peer < self.world]
        counts = torch.zeros(self.world, dtype=torch.int64)
        counts[self.rank] = each
        dist.all_reduce(counts)
        send = [(peer, torch.empty(each, dtype=torch.uint8)) for peer in peers if each]
        recv = [
            (peer, torch.empty(int(counts[peer]), dtype=torch.uint8)) for peer in peers if int(counts[peer])
        ]
        return send, recv

    def _start(self, messages):
        send, recv = messages
        group = self.mesh.get_group()
        operations = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in recv]
        operations += [dist.P2POp(dist.isend, buffer, group=group, group_peer=peer) for peer, buffer in send]
        return dist.batch_isend_irecv(operations) if operations else []

    def _finish(self, works):
        for work in works:
            work.wait()

    def bytes(self):
        return sum(buffer.numel() for send, _ in self.messages for _, buffer in send)

    # ---- right? ----

    def error(self):
        """The largest difference of output and gradients to the unsplit ones, relative to the largest value."""
        found, expected = self.halo(), self.unsplit()
        differences = []
        for ours, theirs in zip(found, expected):
            whole = ours.redistribute(placements=[Replicate()]).to_local()
            differences.append(float((whole - theirs).abs().max() / theirs.abs().max()))
        return max(differences)


def legacy_route_is_open():
    """Puts torch's older convolution rules back in charge; returns whether this torch has them."""
    with contextlib.suppress(AttributeError):
        functions = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
        for op in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            functions.pop(op, None)
        return True
    return False


def runs(function):
    """Whether every rank can call it."""
    try:
        function()
        works = 1
    except Exception:  # whatever it is that torch's route stumbles over
        works = 0
    result = torch.tensor(works)
    dist.all_reduce(result, op=dist.ReduceOp.MIN)
    return bool(result)


def can_try_legacy(case, world):
    """Where torch's route neither hangs nor refuses: it knows one window and even shards."""
    return len(case.sizes) == 2 and case.stride == 1 and case.kernel % 2 == 1 and case.sizes[-1] % world == 0


# What a result may differ by from the unsplit one: sums in another order, in the dtype's precision.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def measure(bench, case, layout, dtype, mesh, rounds, legacy):
    rivals = Rivals(case, layout, dtype, mesh)
    error = rivals.error()
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(
            f"{case.name} {layout} {dtype}: error is {error}, expected <= {TOLERANCE[dtype]}"
        )
    steps = {name: getattr(rivals, name) for name in ("halo", "beside", "local", "extended", "raw")}
    if legacy and can_try_legacy(case, mesh.size()) and runs(rivals.legacy):
        steps["legacy"] = rivals.legacy
    times = interleaved(steps, rounds)
    medians = {name: time["step_ms"] for name, time in times.items()}
    halo = medians["halo"]
    return bench.add(
        name=case.name,
        ranks=mesh.size(),
        input=[case.batch, case.channels, *case.sizes],
        dtype=str(dtype).removeprefix("torch."),
        layout=layout,
        kind="depthwise" if case.is_depthwise else "dense",
        **{f"{name}_ms": value for name, value in medians.items()},
        halo_ms_p10=times["halo"]["step_ms_p10"],
        halo_ms_p90=times["halo"]["step_ms_p90"],
        bytes=rivals.bytes(),
        halo_over_local=halo / medians["local"],
        halo_over_beside=halo / medians["beside"],
        extended_over_halo=medians["extended"] / halo,
        legacy_over_halo=medians["legacy"] / halo if "legacy" in medians else None,
        error=error,
    )


def geometric_mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def summary(rows):
    """The figures that the README quotes: name -> geometric mean over the cases."""
    found = {}
    for kind in ("dense", "depthwise"):
        own = [row for row in rows if row["kind"] == kind]
        if own:
            found[f"{kind}: halo / local beside raw messages"] = geometric_mean(
                row["halo_over_beside"] for row in own
            )
            found[f"{kind}: halo / bare local"] = geometric_mean(row["halo_over_local"] for row in own)
            legacy = [row["legacy_over_halo"] for row in own if row["legacy_over_halo"]]
            if legacy:
                found[f"{kind}: legacy / halo"] = geometric_mean(legacy)
            found[f"{kind}: extended / halo"] = geometric_mean(row["extended_over_halo"] for row in own)
    return found


def sweep(bench, mesh, rounds, widths):
    """Narrower and narrower images: unsplit on one rank against split over all."""
    bases = [
        depthwise("depthwise 7x7, 128 channels", 128, (64, 0), 7),
        Case("dense 3x3, 64 channels", 64, 64, (64, 0), 3),
    ]
    with bench.progress(len(bases) * len(widths)) as advance:
        for base in bases:
            for width in widths:
                case = Case(**{**base.__dict__, "sizes": (64, width)})
                rivals = Rivals(case, "NHWC", torch.float32, mesh)
                times = interleaved({"halo": rivals.halo, "unsplit": rivals.unsplit}, rounds)
                halo, unsplit = (times[name]["step_ms"] for name in ("halo", "unsplit"))
                bench.add(
                    name=case.name, ranks=mesh.size(), input=[1, case.channels, 64, width], layout="NHWC",
                    dtype="float32", halo_ms=halo, unsplit_ms=unsplit, speedup=unsplit / halo, bytes=rivals.bytes(),
                    error=rivals.error(),
                )  # fmt: skip
                advance(f"{case.name}, width {width}")


# What the plot shows, over the bare local convolution's time.
SERIES = {
    "halo": lambda row: row["halo_over_local"],
    "beside": lambda row: row["beside_ms"] / row["local_ms"],
    "extended": lambda row: row["extended_ms"] / row["local_ms"],
}


def main():
    bench = Benchmark("conv", __doc__, COLUMNS)
    bench.parser.add_argument("--rounds", type=int, default=30, help="timed calls of each (30)")
    bench.parser.add_argument("--filter", default="", metavar="TEXT", help="cases whose name has TEXT")
    bench.parser.add_argument("--layouts", default="NCHW,NHWC")
    bench.parser.add_argument("--dtypes", default="float32,bfloat16")
    bench.parser.add_argument("--no-legacy", action="store_true", help="without torch's own route")
    bench.parser.add_argument("--sweep", action="store_true", help="widths instead of cases")
    args = bench.parse()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    legacy = not args.no_legacy and legacy_route_is_open()
    rounds = 2 if args.fast else args.rounds
    if args.sweep:
        sweep(bench, mesh, rounds, [32, 512] if args.fast else [16, 32, 64, 96, 128, 192, 256, 512, 1024])
        bench.finish(["name", "input", "halo_ms", "unsplit_ms", "speedup", "bytes", "error"])
        dist.destroy_process_group()
        return
    cases = [case for case in CASES if args.filter in case.name]
    layouts, dtypes = args.layouts.split(","), args.dtypes.split(",")
    if args.fast:
        cases, layouts = [CASES[3], CASES[8], CASES[11]], ["NHWC"]
    with bench.progress(len(cases) * len(layouts) * len(dtypes)) as advance:
        for case in cases:
            for layout in layouts:
                for dtype in dtypes:
                    measure(bench, case, layout, getattr(torch, dtype), mesh, rounds, legacy)
                    advance(f"{case.name} {layout} {dtype}")
    bench.finish(SHOWN, plot=ratio_plot(bench.rows, SERIES, "time over the bare local convolution's"))
    for name, value in summary(bench.rows).items():
        bench.console.print(f"{name}: {value:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
