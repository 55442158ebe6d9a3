"""What all benchmarks share: the command line, the JSON, the table, the plot, progress, and interleaved timing.

    bench = Benchmark("conv", __doc__, columns={"exchange_ms": Column("exchange ms", ".2f")})
    bench.parser.add_argument("--width", type=int, default=1024)
    args = bench.parse()                         # every benchmark has --json FILE, --plot FILE, --fast
    with bench.progress(len(cases)) as advance:
        for case in cases:
            bench.add(name=case.name, ranks=2, step_ms=...)
            advance(case.name)
    bench.finish(["name", "ranks", "step_ms"], plot=draw)     # table, JSON, plot: on rank 0 alone

The JSON of every benchmark is ``{"benchmark", "date", "command", "versions", "machine", "rows"}``. Each row has every
key of `COLUMNS`, null where the benchmark has nothing to say, then the benchmark's own columns. benchmarks/README.md
has the formula of each.

Under torchrun every rank runs the script; `rank()` and `world()` are torchrun's, and printing and writing happen on
rank 0. Started as a plain Python script it is one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

GIB = 2**30

# ConvNeXt-XL on 7 × 3 × 512 × width: (width, ranks) -> milliseconds of an iteration.
PUBLISHED_SPEED = {(1024, 1): 723, (2048, 2): 937, (4096, 4): 952, (4096, 8): 647}


@dataclass(frozen=True)
class Column:
    """How a key is shown in the table: its heading and its format. Text has the format ""."""

    heading: str
    format: str = ""


# In the order in which they are written. The unit is the end of the key's name.
COLUMNS = {
    "name": Column("configuration"),
    "model": Column("model"),
    "input": Column("input"),  # the whole input's shape, a list
    "ranks": Column("ranks", "d"),
    "dtype": Column("dtype"),  # "float32", or "bfloat16 autocast"
    "checkpointing": Column("checkpointing"),  # "none", or what is recomputed
    "optimizer": Column("optimizer"),
    "measured": Column("measured"),  # how: "fake", "cpu", "cuda"
    "peak_gib": Column("peak GiB", ".2f"),
    "parameters_gib": Column("parameters", ".2f"),
    "gradients_gib": Column("gradients", ".2f"),
    "states_gib": Column("states", ".2f"),
    "activations_gib": Column("activations", ".2f"),
    "temporaries_gib": Column("temporaries", ".2f"),
    "halos_gib": Column("halos", ".3f"),
    "step_ms": Column("step ms", ".2f"),  # the median
    "step_ms_p10": Column("10 %", ".2f"),
    "step_ms_p90": Column("90 %", ".2f"),
    "ratio": Column("ratio", ".3f"),  # to `of`
    "of": Column("of"),
    "error": Column("error", ".1e"),  # the largest difference to the reference, of its largest value
    "published": Column("published", ".2f"),
}


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions():
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("haloconv", "timm", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def machine():
    """The hardware, and how much of it torch was given."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    found = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found


def interleaved(steps, rounds, warm_up=2):
    """Times several functions against each other: one call of each in turn, `rounds` times.

    What the machine does meanwhile then meets all of them alike. Where ranks work together, every rank calls this, and
    each call starts at a barrier and ends when the device has done its work.

    Args:
        steps: name -> function of no arguments.
        rounds: calls of each that count.
        warm_up: calls of each, before, that do not.

    Returns:
        name -> {"step_ms", "step_ms_p10", "step_ms_p90"}: the median and percentiles, of the slowest rank of each call.
    """
    taken = {name: [] for name in steps}
    quiet()
    try:
        for number in range(warm_up + rounds):
            for name, step in steps.items():
                _settle()
                begin = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                if dist.is_initialized() and dist.get_world_size() > 1:
                    seconds = seconds.cuda() if dist.get_backend() == "nccl" else seconds
                    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if number >= warm_up:
                    taken[name].append(1e3 * seconds.item())
    finally:
        gc.unfreeze()
    return {name: percentiles(values) for name, values in taken.items()}


def quiet():
    """Takes what has been built out of the garbage collector's sight, until `gc.unfreeze`: its rounds would go through
    every program of the benchmark, in whichever step they fall."""
    gc.collect()
    gc.freeze()


def _settle():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def percentiles(milliseconds):
    """The columns of a list of times."""
    ordered = sorted(milliseconds)
    return {
        "step_ms": statistics.median(ordered),
        "step_ms_p10": ordered[int(0.1 * (len(ordered) - 1))],
        "step_ms_p90": ordered[round(0.9 * (len(ordered) - 1))],
    }


def ratio_plot(rows, series, label):
    """For `Benchmark.finish`: each row a place along the axis, with the points of every series, and a line at 1.

    Args:
        rows: with ``name``, ``layout`` and ``dtype``.
        series: name -> function of a row, its ratio.
        label: of the ratios.
    """

    def plot(figure):
        axes = figure.subplots()
        names = [f"{row['name']}\n{row['layout']} {row['dtype']}" for row in rows]
        for name, ratio in series.items():
            axes.plot(names, [ratio(row) for row in rows], "o", label=name)
        axes.axhline(1, color="grey", linewidth=1)
        axes.tick_params(axis="x", rotation=90, labelsize=6)
        axes.set_ylabel(label)
        axes.legend()

    return plot


class Benchmark:
    """One run of one benchmark."""

    def __init__(self, name, description, columns=None):
        """
        Args:
            name: of the benchmark, as in the JSON.
            description: the script's docstring.
            columns: key -> Column of this benchmark's own columns.
        """
        self.name = name
        self.columns = {**COLUMNS, **(columns or {})}
        self.rows = []
        self.console = Console(quiet=rank() != 0)
        if not self.console.is_terminal:  # into a file: no column is cut
            self.console = Console(quiet=rank() != 0, width=250)
        self.parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="writes the rows")
        self.parser.add_argument("--plot", type=Path, metavar="FILE", help="draws them (PNG, SVG or PDF)")
        self.parser.add_argument("--fast", action="store_true", help="small, in seconds: checks, few figures")
        self._command = ""
        self.args = None

    def parse(self, argv=None):
        """Reads the command line; `argv` is for tests."""
        argv = sys.argv[1:] if argv is None else argv
        launcher = f"torchrun --nproc-per-node {world()}" if world() > 1 else "python"
        self._command = " ".join([launcher, f"benchmarks/{Path(sys.argv[0]).name}", *map(str, argv)])
        self.args = self.parser.parse_args(argv)
        return self.args

    def add(self, **values):
        """Adds a row and returns it. Every key has to be a column; what is left out is null."""
        unknown = sorted(set(values) - set(self.columns))
        if unknown:
            raise KeyError(f"row has {unknown}, expected columns of {self.name}: {sorted(self.columns)}")
        self.rows.append({key: values.get(key) for key in self.columns})
        return self.rows[-1]

    @contextlib.contextmanager
    def progress(self, total):
        """Yields a function that counts one step and shows a text beside the bar."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        with bar:
            task = bar.add_task(self.name, total=total)
            yield lambda text="": bar.update(task, advance=1, description=f"{self.name}: {text}")

    def table(self, keys, rows=None, title=None):
        """Prints rows (all, if None); columns in which all are empty are left out."""
        rows = self.rows if rows is None else rows
        keys = [key for key in keys if any(row[key] is not None for row in rows)]
        table = Table(title=title)
        for key in keys:
            right = self.columns[key].format != ""
            table.add_column(self.columns[key].heading, justify="right" if right else "left")
        for row in rows:
            table.add_row(*(self._shown(key, row[key]) for key in keys))
        self.console.print(table)

    def _shown(self, key, value):
        if value is None:
            return "–"
        if key == "input":
            return "×".join(map(str, value))
        return format(value, self.columns[key].format) if not isinstance(value, str) else value

    def report(self):
        """What --json writes."""
        return {
            "benchmark": self.name,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "command": self._command,
            "versions": versions(),
            "machine": machine(),
            "rows": self.rows,
        }

    def save(self):
        """Writes --json, if asked for. `finish` does; call it for each row of a benchmark that takes long."""
        if rank() == 0 and self.args.json is not None:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.report(), indent=1) + "\n")

    def finish(self, keys=(), title=None, plot=None):
        """The table of `keys`, then the files that were asked for.

        Args:
            keys: the table's columns; none, no table.
            plot: draws self.rows into the matplotlib Figure that it is given. None: --plot is refused.
        """
        if keys:
            self.table(keys, title=title)
        self.save()
        if rank() == 0 and self.args.plot is not None:
            if plot is None:
                self.parser.error(f"{self.name} has no plot")
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib.figure import Figure

            figure = Figure(figsize=(10, 6), layout="constrained")
            plot(figure)
            self.args.plot.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.args.plot, dpi=120)
