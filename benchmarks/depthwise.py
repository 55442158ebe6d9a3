"""The depthwise convolution in C against ATen's, in one process of one thread.

    OMP_NUM_THREADS=1 python benchmarks/depthwise.py [--json FILE] [--threads N] [--filter WORD] [--mode on]

Each row is a shape, a dtype and a memory format. The two take turns on the same tensors. Times are medians, of
processor time with one thread (so that a busy machine disturbs little), else of the wall clock. *Ours* is what users
get: haloconv's loops in the passes where the rule (`hc_depthwise_wins`) chooses them, which the column `auto` shows
for forward, input gradient and weight gradient; with ``--mode on`` it is the loops everywhere. A ratio above 1 says
that ours is faster. The error is the largest difference to ATen in float64, over the largest value.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time

import haloconv
import torch
from haloconv import _C
from harness import Benchmark, Column, ratio_plot

assert haloconv

PASSES = ("forward", "input_gradient", "weight_gradient")
COLUMNS = {
    "layout": Column("layout"),
    "kernel": Column("kernel", "d"),
    "stride": Column("stride", "d"),
    "dilation": Column("dilation", "d"),
    "clock": Column("clock"),
    "auto": Column("auto"),
    **{f"{which}_aten_ms": Column(f"{which} ATen", ".2f") for which in PASSES},
    **{f"{which}_ms": Column("ours", ".2f") for which in PASSES},
    "ratio_forward": Column("forward ×", ".2f"),
    "ratio_backward": Column("backward ×", ".2f"),
    "aten_error": Column("ATen's", ".1e"),
}

SERIES = {"forward": lambda row: row["ratio_forward"], "backward": lambda row: row["ratio_backward"]}
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# name, sizes, kernel, stride, dilation
CASES = [
    ("convnext-b stage 1", (1, 128, 64, 128), 7, 1, 1),
    ("convnext-b stage 2", (1, 256, 32, 64), 7, 1, 1),
    ("convnext-xl stage 1", (1, 256, 64, 128), 7, 1, 1),
    ("convnext-xl stage 2", (1, 512, 32, 64), 7, 1, 1),
    ("convnext-xl stage 3", (1, 1024, 16, 32), 7, 1, 1),
    ("convnext-xl stage 4", (1, 2048, 8, 16), 7, 1, 1),
    ("small image", (4, 512, 7, 7), 7, 1, 1),
    ("few channels", (1, 8, 128, 128), 7, 1, 1),
    ("3x3", (1, 256, 32, 64), 3, 1, 1),
    ("3x3, large", (1, 64, 128, 128), 3, 1, 1),
    ("3x3, stride 2", (1, 256, 32, 64), 3, 2, 1),
    ("3x3, dilation 2", (1, 256, 32, 64), 3, 1, 2),
    ("5x5", (1, 256, 32, 64), 5, 1, 1),
    ("5x5, stride 2", (1, 256, 32, 64), 5, 2, 1),
    ("7x7, stride 2", (1, 256, 32, 64), 7, 2, 1),
    ("3x3, batch of 14x14", (8, 384, 14, 14), 3, 1, 1),
]
FAST = {"convnext-b stage 1", "convnext-b stage 2", "3x3", "3x3, stride 2"}


def calls(x, weight, grad, stride, padding, dilation):
    """{pass: call}, through haloconv's ops, whose local convolution is ATen's or haloconv's loops."""
    group = [
        [stride] * 2,
        [padding] * 4,
        [dilation] * 2,
        False,
        [0, 0],
        x.shape[1],
        [0, 0],
        [],
        [],
        [],
        [],
        "",
    ]
    ops = torch.ops.haloconv
    return {
        "forward": lambda: ops.convolution(x, weight, [], *group),
        "input_gradient": lambda: ops.convolution_backward(grad, x, weight, *group, True, False, False)[0],
        "weight_gradient": lambda: ops.convolution_backward(grad, x, weight, *group, False, True, False)[1],
    }


def timed(call, clock):
    begin = clock()
    result = call()
    return 1e3 * (clock() - begin), result


def difference(result, exact):
    return float((result.double() - exact).abs().max() / exact.abs().max())


def tensors(case, dtype, form):
    """x, weight, the output's gradient, and the exact result of each pass."""
    _, sizes, kernel, stride, dilation = case
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator).to(dtype).contiguous(memory_format=FORMATS[form])
    weight = torch.randn((sizes[1], 1, kernel, kernel), generator=generator).to(dtype)
    window = ([stride] * 2, [dilation * (kernel // 2)] * 2, [dilation] * 2, False, [0, 0], sizes[1])
    exact = {"forward": torch.ops.aten.convolution(x.double(), weight.double(), None, *window)}
    grad = torch.randn(exact["forward"].shape, generator=generator).to(dtype)
    grad = grad.contiguous(memory_format=FORMATS[form])
    exact["input_gradient"], exact["weight_gradient"], _ = torch.ops.aten.convolution_backward(
        grad.double(), x.double(), weight.double(), None, *window, [True, True, False]
    )
    return x, weight, grad, exact


def measure(bench, case, dtype, form, args):
    name, sizes, kernel, stride, dilation = case
    x, weight, grad, exact = tensors(case, dtype, form)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    row = {"errors": [], "aten_errors": [], "auto": ""}
    for which, call in calls(x, weight, grad, stride, dilation * (kernel // 2), dilation).items():
        taken = {"off": [], args.mode: []}
        begin = time.perf_counter()
        for turn in range(args.turns + 1):
            for mode, times in taken.items():
                _C.depthwise(mode)
                took, result = timed(call, clock)
                if turn > 0:
                    times.append(took)
                else:  # a warm-up
                    row["aten_errors" if mode == "off" else "errors"].append(difference(result, exact[which]))
            if turn >= 3 and time.perf_counter() - begin > args.seconds:
                break
        row[f"{which}_aten_ms"], row[f"{which}_ms"] = (statistics.median(times) for times in taken.values())
        before = _C.depthwise_counts()[which]
        _C.depthwise("auto")
        call()
        row["auto"] += "+" if _C.depthwise_counts()[which] > before else "-"
    worst, aten_worst = max(row.pop("errors")), max(row.pop("aten_errors"))
    # Ours accumulates in float32 at least, as ATen does: its error may be what rounding to the dtype allows.
    limit = max(2 * aten_worst, {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype])
    if not worst <= limit:
        raise AssertionError(f"{name} {form} {dtype}: error is {worst}, expected <= {limit}")
    back = PASSES[1:]
    bench.add(
        name=name,
        input=list(sizes),
        ranks=1,
        dtype=str(dtype).removeprefix("torch."),
        layout=form,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        clock="processor" if args.threads == 1 else "wall",
        error=worst,
        aten_error=aten_worst,
        ratio_forward=row["forward_aten_ms"] / row["forward_ms"],
        ratio_backward=sum(row[f"{p}_aten_ms"] for p in back) / sum(row[f"{p}_ms"] for p in back),
        **row,
    )


def main():
    bench = Benchmark("depthwise", __doc__, COLUMNS)
    bench.parser.add_argument("--threads", type=int, default=1)
    bench.parser.add_argument("--mode", choices=("auto", "on"), default="auto")
    bench.parser.add_argument("--turns", type=int, default=40, help="at most, for each pass (40)")
    bench.parser.add_argument("--seconds", type=float, default=1.5, help="about, for each pass (1.5)")
    bench.parser.add_argument("--filter", default="", metavar="WORD", help="rows whose name has WORD")
    bench.parser.add_argument("--dtypes", default=",".join(DTYPES))
    args = bench.parse()
    torch.set_num_threads(args.threads)
    if args.fast:
        args.turns, args.seconds = 2, 0.1
    before = _C.depthwise()
    cases = [
        (case, dtype, form)
        for dtype in args.dtypes.split(",")
        for case in CASES
        for form in FORMATS
        if args.filter in case[0] and (not args.fast or (case[0] in FAST and dtype != "float64"))
    ]
    with bench.progress(len(cases)) as advance:
        for case, dtype, form in cases:
            measure(bench, case, DTYPES[dtype], form, args)
            advance(f"{case[0]} {dtype} {form}")
    _C.depthwise(before)
    times = [name for which in PASSES for name in (f"{which}_aten_ms", f"{which}_ms")]
    bench.finish(
        ["name", "dtype", "layout", *times, "ratio_forward", "ratio_backward", "auto", "error", "aten_error"],
        plot=ratio_plot(bench.rows, SERIES, "ATen's time over ours"),
    )


if __name__ == "__main__":
    main()
