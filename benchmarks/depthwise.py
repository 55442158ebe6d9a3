"""The depthwise convolution in C against ATen's, in one process.

    OMP_NUM_THREADS=1 python benchmarks/depthwise.py [--quick] [--threads N] [--json FILE] [--only WORD]

Each row is a shape, a dtype and a memory format. ATen and haloconv's loops take turns on the same tensors; the
times are medians in milliseconds over all turns, of processor time with one thread (so that a busy machine disturbs
little). A ratio above 1 says that haloconv's loops are faster. `auto` is what the rule that chooses between the two
says for the three passes (forward, input gradient, weight gradient): `+` ours, `-` ATen's. The error is the largest
difference from ATen in float64, over the largest value, beside ATen's own.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

import haloconv
import torch
from haloconv import _C

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
QUICK = {"convnext-b stage 1", "convnext-b stage 2", "3x3", "3x3, stride 2"}


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


def error(result, exact):
    return float((result.double() - exact).abs().max() / exact.abs().max())


def measure(case, dtype, form, turns, seconds, clock):
    name, sizes, kernel, stride, dilation = case
    padding = dilation * (kernel // 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator).to(dtype).contiguous(memory_format=FORMATS[form])
    weight = torch.randn((sizes[1], 1, kernel, kernel), generator=generator).to(dtype)
    window = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], sizes[1])
    exact = {"forward": torch.ops.aten.convolution(x.double(), weight.double(), None, *window)}
    grad = torch.randn(exact["forward"].shape, generator=generator).to(dtype)
    grad = grad.contiguous(memory_format=FORMATS[form])
    exact["input_gradient"], exact["weight_gradient"], _ = torch.ops.aten.convolution_backward(
        grad.double(), x.double(), weight.double(), None, *window, [True, True, False]
    )
    row = {"name": f"{name} {dtype} {form}".replace("torch.", ""), "sizes": sizes, "kernel": kernel}
    row |= {
        "stride": stride,
        "dilation": dilation,
        "dtype": str(dtype).removeprefix("torch."),
        "format": form,
    }
    for which, call in calls(x, weight, grad, stride, padding, dilation).items():
        times, errors = {"off": [], "on": []}, {}
        begin = time.perf_counter()
        for turn in range(turns + 1):
            for mode in times:
                _C.depthwise(mode)
                took, result = timed(call, clock)
                if turn == 0:  # a warm-up
                    errors[mode] = error(result, exact[which])
                else:
                    times[mode].append(took)
            if turn >= 3 and time.perf_counter() - begin > seconds:
                break
        before = _C.depthwise_counts()[which]
        _C.depthwise("auto")
        call()
        row[which] = {
            "aten_ms": statistics.median(times["off"]),
            "ours_ms": statistics.median(times["on"]),
            "aten_least_ms": min(times["off"]),
            "ours_least_ms": min(times["on"]),
            "turns": len(times["on"]),
            "error": errors["on"],
            "aten_error": errors["off"],
            "auto": _C.depthwise_counts()[which] > before,
        }
    passes = [row["input_gradient"], row["weight_gradient"]]
    row["ratio_forward"] = row["forward"]["aten_ms"] / row["forward"]["ours_ms"]
    row["ratio_backward"] = sum(p["aten_ms"] for p in passes) / sum(p["ours_ms"] for p in passes)
    return row


def machine():
    model = platform.processor()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def show(row):
    forward, of_input, of_weight = (row[p] for p in ("forward", "input_gradient", "weight_gradient"))
    worst = max(p["error"] for p in (forward, of_input, of_weight))
    aten_worst = max(p["aten_error"] for p in (forward, of_input, of_weight))
    cells = [f"{row['name']:<38}"]
    for p in (forward, of_input, of_weight):
        cells.append(f"{p['aten_ms']:7.2f} {p['ours_ms']:6.2f} {p['aten_ms'] / p['ours_ms']:6.2f}")
    auto = "".join("+" if p["auto"] else "-" for p in (forward, of_input, of_weight))
    print(
        " | ".join(cells),
        f"| {row['ratio_backward']:6.2f} | {auto} | {worst:.0e} {aten_worst:.0e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes, few turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="the clock on the wall, with one thread too")
    parser.add_argument("--turns", type=int, default=40, help="at most, for each pass")
    parser.add_argument("--seconds", type=float, default=1.5, help="about, for each pass")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--json", help="where to write the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wall = options.wall or options.threads > 1
    clock = time.perf_counter if wall else time.thread_time
    if options.quick:
        options.turns, options.seconds = min(options.turns, 5), min(options.seconds, 0.5)
    versions = {
        "haloconv": haloconv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    result = {"benchmark": "depthwise", "versions": versions, "machine": machine(), "rows": []}
    result["clock"] = "wall" if wall else "processor"
    print(json.dumps({"versions": versions, "machine": result["machine"]}))
    head = f"{'':<38} | {'forward: ATen, ours, ratio':<22} | {'input gradient':<22} | {'weight gradient':<22}"
    print(f"{head} | backward | auto | error, ATen's")
    mode = _C.depthwise()
    for dtype_name, dtype in DTYPES.items():
        for case in CASES:
            for form in FORMATS:
                row_name = f"{case[0]} {dtype_name} {form}"
                left_out = options.quick and (case[0] not in QUICK or dtype_name == "float64")
                if left_out or options.only not in row_name:
                    continue
                row = measure(case, dtype, form, options.turns, options.seconds, clock)
                result["rows"].append(row)
                show(row)
    _C.depthwise(mode)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
