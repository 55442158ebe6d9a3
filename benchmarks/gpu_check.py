"""What only a card can say, as JSON: benchmarks/gpu_check.sh runs this on the wheel.

Each check is a process group of its own (1 rank over NCCL, or several over gloo that share the card), so that one that
crashes or hangs costs its own time only. Correctness first, then times. A check that failed has an "error" and the exit
status is 1; one for which time, a card or a package was missing is "skipped".

With --device cpu the same checks run on gloo ranks, small; the kernels are then those of the library that
HALOCONV_CUDA_LIBRARY names.
"""

import argparse
import copy
import ctypes
import faulthandler
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import haloconv
import torch
import torch.distributed as dist
import torch.nn.functional as F
from haloconv import _C, _info
from torch.distributed.device_mesh import init_device_mesh

CHECKS = {}  # name: (function, ranks, seconds, needs)


class SkippedError(Exception):
    """Why a check can't be run here."""


def check(*, ranks=1, seconds=60, needs=()):
    def register(function):
        for n in ranks if isinstance(ranks, tuple) else (ranks,):
            name = function.__name__ + (f"_{n}" if isinstance(ranks, tuple) else "")
            CHECKS[name] = (function, n, seconds, needs)
        return function

    return register


# ---- what the checks are made of ----


class Setting:
    """Device, mesh, size of a check."""

    def __init__(self, device):
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def start(self):
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.cuda and self.ranks == 1 else "gloo")
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def times(self, **functions):
        """Median milliseconds of each, in turn: what slows the machine for a while slows all of them."""
        samples = {name: [] for name in functions}
        for round_number in range(23 if self.cuda else 5):
            for name, function in functions.items():
                self.synchronize()
                started = time.perf_counter()
                function()
                self.synchronize()
                if round_number >= 3 or not self.cuda:
                    samples[name].append(1000 * (time.perf_counter() - started))
        return {f"{name}_ms": statistics.median(values) for name, values in samples.items()}


def close(got, want, tolerance, what):
    """The largest difference over the largest value."""
    error = ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30)).item()
    if not error <= tolerance:
        raise AssertionError(f"{what} differs by {error:.2e}, expected at most {tolerance:.0e}")
    return error


def split_and_whole(setting, model, x, forward=None):
    """Output, input gradient and parameter gradients of a model, split over the mesh and unsplit."""
    forward = forward or (lambda m, value: m(value))
    whole_x, split_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole = forward(model, whole_x)
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7)).to(whole)
    whole.backward(grad)
    split = haloconv.parallelize(copy.deepcopy(model), setting.mesh)
    split.zero_grad()
    out = haloconv.gather(forward(split, haloconv.distribute(split_x, setting.mesh)))
    out.backward(grad)
    pairs = [("output", out, whole), ("input gradient", split_x.grad, whole_x.grad)]
    for (name, ours), theirs in zip(split.named_parameters(), model.parameters()):
        pairs.append((f"gradient of {name}", ours.grad.full_tensor(), theirs.grad))
    return pairs


def images(setting, *shape, dtype=torch.float64, channels_last=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x = x.to(setting.device)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


# ---- correctness ----


class Block(ctypes.Structure):
    """hc_block of csrc/block.h."""

    _fields_ = [("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("ndim", ctypes.c_int64)] + [
        (name, ctypes.c_int64 * 6) for name in ("sizes", "target_strides", "source_strides")
    ]

    @classmethod
    def of(cls, target, source):
        sixes = [(ctypes.c_int64 * 6)(*v) for v in (target.shape, target.stride(), source.stride())]
        return cls(target.data_ptr(), source.data_ptr(), target.dim(), *sixes)


def kernels(setting):
    """The kernels' library, as (blocks_copy, blocks_add) over pairs of tensors."""
    about = _C.cuda_library()
    if about["path"] is None:
        raise SkippedError(f"the CUDA kernels are not loaded: {about['reason']}")
    if about["for_tests"] == setting.cuda:
        raise SkippedError("the library that is loaded is not for this device")
    if setting.cuda and _C.cuda_device(0) is not None:
        raise AssertionError(f"the kernels do not run on the card: {_C.cuda_device(0)}")
    library = ctypes.CDLL(about["path"])

    def call(function, pairs, last):
        blocks = (Block * len(pairs))(*[Block.of(*pair) for pair in pairs])
        stream = torch.cuda.current_stream().cuda_stream if setting.cuda else 0
        count, last = ctypes.c_int64(len(pairs)), last
        error = function(blocks, count, last, ctypes.c_void_p(stream))
        if error != 0:
            library.hc_cuda_error_text.restype = ctypes.c_char_p
            raise AssertionError(f"kernel: {library.hc_cuda_error_text(error).decode()}")

    def copy_blocks(pairs):
        call(library.hc_cuda_blocks_copy, pairs, ctypes.c_int64(pairs[0][0].element_size()))

    def add_blocks(pairs):
        elements = [None, torch.float64, torch.float32, torch.float16, torch.bfloat16]
        call(library.hc_cuda_blocks_add, pairs, ctypes.c_int(elements.index(pairs[0][0].dtype)))

    return copy_blocks, add_blocks


@check(seconds=60)
def kernels_are_exact(setting):
    """Copies and sums of random boxes in both memory formats, bit for bit as torch has them."""
    copy_blocks, add_blocks = kernels(setting)
    generator, compared = torch.Generator().manual_seed(0), 0

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    types = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    for dtype in types:
        for _ in range(40 if setting.cuda else 6):
            pairs, wanted = [], []
            for _ in range(number(1, 20)):
                shape = [number(1, 3), number(1, 40), number(1, 17), number(8, 30)]
                width = number(1, shape[3])
                sides = []
                for _ in range(2):
                    tensor = torch.randint(0, 100, shape, generator=generator).to(setting.device, dtype)
                    if number(0, 1):
                        tensor = tensor.contiguous(memory_format=torch.channels_last)
                    begin = number(0, shape[3] - width)
                    sides.append((tensor, begin))
                (target, at), (source, begin) = sides
                adds = dtype.is_floating_point
                whole = target.clone()
                part = source[..., begin : begin + width]
                whole[..., at : at + width] = target[..., at : at + width] + part if adds else part
                pairs.append((target, target[..., at : at + width], part))
                wanted.append(whole)
            run = add_blocks if dtype.is_floating_point else copy_blocks
            run([pair[1:] for pair in pairs])
            for (target, _, _), whole in zip(pairs, wanted):
                if not torch.equal(target, whole):
                    raise AssertionError(f"{dtype}: a box is wrong")
                compared += 1
            parts = [(torch.zeros_like(part), part) for _, part, _ in pairs]
            copy_blocks(parts)
            for got, part in parts:
                if not torch.equal(got, part):
                    raise AssertionError(f"{dtype}: a copy is wrong")
    return {"boxes": 2 * compared}


WINDOWS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=7, padding=3, groups=8),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=5, padding=4, dilation=2),
    dict(kernel_size=4, stride=3),
    dict(kernel_size=2, stride=2),
    dict(kernel_size=1),
]


@check(ranks=(1, 2, 4), seconds=90)
def convolutions(setting):
    """Forward and all gradients of the split convolution in float64 against the unsplit one."""
    worst = 0.0
    for channels_last in (False, True):
        for width in (48, 53):
            for window in WINDOWS:
                torch.manual_seed(0)
                model = torch.nn.Conv2d(8, 8, **window).to(setting.device, torch.float64)
                x = images(setting, 2, 8, 20, width, channels_last=channels_last)
                for what, got, want in split_and_whole(setting, model, x):
                    # float64 and sums of at most some ten thousand terms
                    worst = max(worst, close(got, want, 1e-11, f"{window}, width {width}: {what}"))
    return {"convolutions": 4 * len(WINDOWS), "largest_error": worst}


def small_net(setting, dtype):
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 16, 4, stride=4),
        torch.nn.Conv2d(16, 16, 7, padding=3, groups=16, bias=False),
    ]
    layers += [torch.nn.BatchNorm2d(16), torch.nn.GELU(), torch.nn.Conv2d(16, 8, 3, stride=2, padding=1)]
    return torch.nn.Sequential(*layers).to(setting.device, dtype)


@check(ranks=2, seconds=120)
def compiled(setting):
    """A small network under torch.compile(fullgraph=True)."""
    backend = "inductor" if setting.cuda else "aot_eager"

    def forward(model, value):
        return torch.compile(model, fullgraph=True, backend=backend)(value)

    pairs = split_and_whole(
        setting, small_net(setting, torch.float64), images(setting, 2, 3, 32, 128), forward
    )
    return {
        "backend": backend,
        "largest_error": max(close(got, want, 1e-9, what) for what, got, want in pairs),
    }


@check(ranks=(1, 2), seconds=60)
def autocast(setting):
    """A small network under bfloat16 autocast: split against unsplit, both beside float32's distance."""

    def forward(model, value):
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            return model(value)

    pairs = split_and_whole(
        setting,
        small_net(setting, torch.float32),
        images(setting, 2, 3, 32, 128, dtype=torch.float32),
        forward,
    )
    # bfloat16 has 8 bits; sums are rounded at other places where strips are convolved apart
    return {"largest_error": max(close(got.float(), want.float(), 6e-2, what) for what, got, want in pairs)}


@check(seconds=60, needs=("cuda",))
def graph_capture(setting):
    """A forward of the sharded convolution is captured and replayed on other data."""
    model = torch.nn.Conv2d(8, 8, 3, padding=1).to(setting.device)
    split = haloconv.parallelize(copy.deepcopy(model), setting.mesh)
    x = images(setting, 2, 8, 32, 64, dtype=torch.float32)
    still = haloconv.distribute(x.clone(), setting.mesh)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                split(still)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = split(still)
        still.to_local().copy_(2 * x + 1)
        graph.replay()
        # one library, one algorithm or another: float32 over 72 terms, TF32 allowed
        return {"error": close(out.to_local(), model(2 * x + 1), 2e-3, "replay")}


# ---- times ----


@check(seconds=60)
def kernel_times(setting):
    """Both halos of ConvNeXt's first stage packed: our one kernel, and torch's two copies."""
    copy_blocks, add_blocks = kernels(setting)
    result = {}
    size = (7, 256, 128, 256) if setting.cuda else (1, 16, 16, 32)
    for layout in ("contiguous", "channels_last"):
        x = images(setting, *size, dtype=torch.float32, channels_last=layout == "channels_last").bfloat16()
        edges = [x[..., :3], x[..., -3:]]
        buffers = [torch.empty_like(edge) for edge in edges]
        whole = torch.empty_like(x)
        pairs = list(zip(buffers, edges))
        times = setting.times(
            ours=lambda p=pairs: copy_blocks(p),
            torch=lambda p=pairs: [target.copy_(source) for target, source in p],
            ours_added=lambda p=pairs: add_blocks([(source, target) for target, source in p]),
            ours_whole=lambda w=whole, x=x: copy_blocks([(w, x)]),
            torch_whole=lambda w=whole, x=x: w.copy_(x),
        )
        times["whole_GB_per_s"] = 2 * x.nbytes / times["ours_whole_ms"] / 1e6
        times["pack_over_torch"] = times["ours_ms"] / times["torch_ms"]
        result[layout] = times
    return result


@check(seconds=90)
def halo_over_local(setting):
    """Forward and backward of one convolution with its halo, the exchange being a copy on the device (a periodic dim
    of one rank), over the bare local convolution."""
    result = {}
    size = (2, 128, 128, 256) if setting.cuda else (1, 8, 16, 32)
    for name, kernel, groups in (("dense", 3, 1), ("depthwise", 7, size[1])):
        model = torch.nn.Conv2d(
            size[1], size[1], kernel, padding=kernel // 2, groups=groups, padding_mode="circular"
        )
        model = model.to(setting.device, memory_format=torch.channels_last)
        x = images(setting, *size, dtype=torch.float32, channels_last=True).requires_grad_()
        split = haloconv.parallelize(copy.deepcopy(model), setting.mesh)
        shard = haloconv.distribute(x.detach(), setting.mesh).requires_grad_()
        grad = torch.randn_like(x)
        split_grad = haloconv.distribute(grad, setting.mesh)

        def local(x=x, model=model, grad=grad, kernel=kernel, groups=groups):
            F.conv2d(x, model.weight, model.bias, padding=kernel // 2, groups=groups).backward(grad)

        def halo(split=split, shard=shard, split_grad=split_grad):
            split(shard).backward(split_grad)

        want, got = model(x.detach()), haloconv.gather(split(shard.detach()))
        error = close(got, want, 2e-3, name)  # TF32 may differ between algorithms
        times = setting.times(local=local, halo=halo)
        result[name] = times | {"halo_over_local": times["halo_ms"] / times["local_ms"], "error": error}
    return result


@check(seconds=60, needs=("cuda",))
def launches(setting):
    """How many kernels a sharded convolution starts, forward and backward, and how many the bare one."""
    from torch.profiler import ProfilerActivity, profile

    result = {}
    model = torch.nn.Conv2d(64, 64, 7, padding=3, groups=64, padding_mode="circular").to(setting.device)
    split = haloconv.parallelize(copy.deepcopy(model), setting.mesh)
    x = images(setting, 2, 64, 64, 128, dtype=torch.float32)
    shard = haloconv.distribute(x, setting.mesh).requires_grad_()
    whole = x.clone().requires_grad_()
    bare = torch.nn.Conv2d(64, 64, 7, padding=3, groups=64).to(setting.device)
    for name, run in (("sharded", lambda: split(shard).sum()), ("bare", lambda: bare(whole).sum())):
        run().backward()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            run().backward()
            torch.cuda.synchronize()
        kernels_run = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
        result[name] = len(kernels_run)
    return result


# ---- the published tables, as far as one card goes ----


def convnext(setting, width, checkpointing):
    if importlib.util.find_spec("timm") is None:
        raise SkippedError("timm is not installed")
    import timm

    torch.manual_seed(0)
    name = "convnext_xlarge" if setting.cuda else "convnext_atto"
    model = timm.create_model(name, num_classes=10).to(setting.device)
    model.set_grad_checkpointing(checkpointing)
    size = (7, 3, 512, width) if setting.cuda else (1, 3, 32, width)
    x = images(setting, *size, dtype=torch.float32)
    target = torch.zeros(size[0], dtype=torch.long, device=setting.device)
    return model, x, target


def iterate(setting, model, x, target, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    times = []
    for _ in range(steps):
        setting.synchronize()
        started = time.perf_counter()
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(haloconv.gather(out).float() if setting.ranks > 1 else out.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        setting.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return {
        "loss": loss.item(),
        "iteration_ms": statistics.median(times[1:]) if steps > 1 else times[0],
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if setting.cuda else None,
    }


def table_row(setting, width, checkpointing, steps):
    model, x, target = convnext(setting, width, checkpointing)
    if setting.ranks > 1:
        model = haloconv.parallelize(model, setting.mesh)
        x = haloconv.distribute(x, setting.mesh)
    if setting.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = iterate(setting, model, x, target, steps)
    return result | {"width": width, "checkpointing": checkpointing, "ranks": setting.ranks}


@check(ranks=(1, 4), seconds=120)
def memory_row(setting):
    """ConvNeXt-XL on (7, 3, 512, 2048), bfloat16 autocast, Adam; 4 ranks share the card: each says its own peak."""
    return table_row(setting, 2048 if setting.cuda else 128, False, 2)


@check(ranks=(1, 4), seconds=120)
def memory_row_checkpointed(setting):
    """The same with activation checkpointing."""
    return table_row(setting, 2048 if setting.cuda else 128, True, 2)


@check(seconds=60)
def speed_row(setting):
    """ConvNeXt-XL on (7, 3, 512, 1024) on one card: milliseconds an iteration."""
    return table_row(setting, 1024 if setting.cuda else 64, False, 8 if setting.cuda else 2)


# ---- running them ----


def work(name, device, out):
    """In a process of the check's group: rank 0 writes what came of it."""
    setting = Setting(device)
    try:
        setting.start()
        result = {"ok": True} | CHECKS[name][0](setting)
    except SkippedError as reason:
        result = {"skipped": str(reason)}
    except Exception as error:
        result = {"ok": False, "error": f"rank {setting.rank}: {type(error).__name__}: {error}"[:2000]}
    if setting.rank == 0 or not result.get("ok", True):
        scratch = Path(f"{out}.{setting.rank}")
        scratch.write_text(json.dumps(result), encoding="utf-8")
        scratch.replace(out)
    if result.get("ok", True):
        dist.destroy_process_group()
        return 0
    os._exit(1)  # without waiting for ranks that may wait for this one


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_check(name, device, limit):
    """Runs the check's processes; what rank 0 wrote, or why there is nothing. None of them outlives it."""
    _, ranks, _, needs = CHECKS[name]
    if "cuda" in needs and device != "cuda":
        return {"skipped": "needs a card"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+", encoding="utf-8") as log:
        out = Path(folder) / "result.json"
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, __file__, "--device", device, "--worker", name, "--out", str(out)]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,  # a pipe would be open as long as any of them
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        failed = late = False
        while not (failed or late) and any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            late = time.monotonic() - started > limit
            time.sleep(0.05)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        tail = log.read()[-1500:]
        result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        codes = [process.returncode for process in processes]
        if result is None or (result.get("ok", True) and any(codes)):  # rank 0 alone was through
            ends = f"its ranks ended with {', '.join(map(str, codes))}"
            error = f"it took longer than {limit:.0f} s" if late else ends
            result = {"ok": False, "error": error, "log": tail}
    return result | {"seconds": round(time.monotonic() - started, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--minutes", type=float, default=8, help="for all of it (default: 8)")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="these checks alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        faulthandler.enable()
        return work(options.worker, options.device, options.out)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no card; --device cpu runs the same checks on the CPU")
    report = {"device": options.device, "info": _info.collect(), "checks": {}}
    end = time.monotonic() + 60 * options.minutes
    for name in options.only or CHECKS:
        left = end - time.monotonic()
        if left < 10:
            result = {"skipped": f"the {options.minutes:g} minutes were over"}
        else:
            limit = CHECKS[name][2] * (1 if options.device == "cuda" else 4)  # CPUs may be busy
            result = run_check(name, options.device, min(left, limit))
        report["checks"][name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)
        Path(options.out).write_text(json.dumps(report, indent=1), encoding="utf-8")
    failed = [name for name, result in report["checks"].items() if not result.get("ok", True)]
    print(f"{len(report['checks']) - len(failed)} passed or skipped, {len(failed)} failed", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
