"""Trains a ConvNet on images that are split over several processes, and again unsplit: the same loss.

    torchrun --nproc-per-node 2 examples/train_convnext.py

A ConvNeXt of timm learns to find and name handwritten digits in wide panoramas (see panoramas.py). Every
rank holds one strip of the width of every activation; many digits straddle the seam between two strips. The
whole use of the library is in `Split`: three calls, and timm's code is unchanged. After that run rank 0
trains the same network with the same seed unsplit, in a fresh process, and a table sets the two side by
side. The exit status is 0 only if the promises in report.py were kept.

One device is one rank: on the CPU, one process with `--threads` threads (1). So the unsplit run, one
device, has one thread too, and 2 ranks on 2 cores should take a little more than half its time. `--device
cuda` takes one GPU a rank.

    --no-halo         the ablation: each rank convolves its own strip as if that were the image. Digits
                      elsewhere are found as before, those on the seam are not.
    --steps 40        a short run checks the losses alone: accuracy has promises only at the default number
                      of steps.
    --dtype float64   the losses then agree to 1e-9 and better.

Memory is the peak above the level before the network was built, and so covers weights, gradients, optimizer
states, activations and message buffers, and not Python and torch themselves. On the CPU it is the process's
resident set, whose high-water mark is reset at that point; that is also why the unsplit run gets a process
of its own. On CUDA it is what torch's allocator gave out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import haloconv
import torch
import torch.distributed as dist
from finder import STRIDE, Score, build_model, build_optimizer, cell_logits, cell_loss
from panoramas import Panoramas, seam_columns
from report import CURVE_STEPS, Display, Result, closing_table, loss_difference, verdict
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_STEPS = 200
PROBE_EVERY = 40
PROBE_PANORAMAS = 64


@dataclass(frozen=True)
class Config:
    """The command line, and the number of ranks: an unsplit run needs it to know where the seams are."""

    ranks: int
    steps: int = DEFAULT_STEPS
    batch: int = 16
    width: int = 512
    height: int = 32
    model: str = "convnext_atto"
    dtype: str = "float32"
    device: str = "cpu"
    lr: float = 6e-3
    warmup: int = 30
    seed: int = 0
    threads: int = 1
    panoramas: int = 2016
    no_halo: bool = False
    json: Path | None = None

    def data(self, split: str, seam_share: float) -> Panoramas:
        return Panoramas(
            split,
            height=self.height,
            width=self.width,
            seams=seam_columns(self.width, self.ranks),
            seam_share=seam_share,
            seed=self.seed,
        )

    def network(self, device: torch.device) -> torch.nn.Module:
        return build_model(self.model, seed=self.seed, dtype=getattr(torch, self.dtype), device=device)

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine; the same curve for the first steps of a shorter run."""
        rest = max(0, step - self.warmup) / max(1, max(self.steps, DEFAULT_STEPS) - self.warmup)
        return self.lr * min(1.0, (step + 1) / self.warmup) * (0.5 + 0.5 * math.cos(math.pi * rest))


class Unsplit:
    """One device, plain torch."""

    title = "unsplit"

    def __init__(self, config: Config, device: torch.device):
        self.model = config.network(device)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return cell_logits(self.model(images))

    def after_backward(self) -> None:
        pass


class Split:
    """Each rank a strip of the width: all that a program needs of haloconv."""

    title = "split"

    def __init__(self, config: Config, device: torch.device, mesh: DeviceMesh):
        self.mesh = mesh
        self.model = haloconv.parallelize(config.network(device), mesh)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        strips = haloconv.distribute(images, self.mesh)
        return cell_logits(haloconv.gather(self.model(strips)))

    def after_backward(self) -> None:
        """Nothing is left to do: every gradient has been summed over the ranks during backward."""


class NoHalo:
    """The ablation: plain torch on the own strip, gradients added by hand. Only the answers are put
    together."""

    title = "no halo"

    def __init__(self, config: Config, device: torch.device, mesh: DeviceMesh):
        if config.width % (STRIDE * mesh.size()):
            raise SystemExit(f"--no-halo needs a --width that is a multiple of {STRIDE} times the ranks")
        self.mesh = mesh
        self.model = config.network(device)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        strip = images.chunk(self.mesh.size(), dim=3)[self.mesh.get_local_rank()]
        answers = haloconv.distribute_local(self.model(strip.contiguous()), self.mesh)
        return cell_logits(haloconv.gather(answers))

    def after_backward(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class PeakMemory:
    """The most memory in use above the level at construction, in bytes, while this process holds one run."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.level = torch.cuda.memory_allocated(device)
            return
        # Sets the kernel's high-water mark to what is resident now (proc(5)). Where that is not allowed, an
        # earlier peak may hide the run's own: the figure can then only be too large.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.level = pages * os.sysconf("SC_PAGE_SIZE")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.level
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.level)


def evaluate(config: Config, method, data: Panoramas, device: torch.device, panoramas: int) -> Score:
    """The score over the first `panoramas` held-out panoramas, in batches of the training's size."""
    score = Score()
    with torch.inference_mode():
        for index in range(-(-panoramas // config.batch)):
            batch = data.batch(index, config.batch)
            images = batch.images.to(device=device, dtype=getattr(torch, config.dtype))
            score.add(method.logits(images), batch)
    return score


def count_traffic(result: Result) -> None:
    """Adds what has been communicated since the last reset; the gradients' part is counted apart from the
    halos'."""
    sent = haloconv.comm_stats()
    gradients = sent["by_op"].get("gradients", {"bytes": 0, "all_reduces": 0, "seconds": 0.0})
    result.exchange_seconds += sent["seconds"] - gradients["seconds"]
    result.messages += sent["messages"]
    result.message_bytes += sent["bytes"] - gradients["bytes"]
    result.all_reduces += gradients["all_reduces"]
    result.gradient_bytes += gradients["bytes"]


def train(config: Config, make_method, device: torch.device, *, ranks: int, shown: bool) -> Result:
    """One run: every rank calls it with the same config. `make_method` builds the network in its way."""
    dtype = getattr(torch, config.dtype)
    training, held_out = config.data("train", seam_share=0.5), config.data("held_out", seam_share=1.0)
    memory = PeakMemory(device)
    method = make_method()
    result = Result(method.title, ranks)
    optimizer = build_optimizer(method.model, config.lr)
    started = time.perf_counter()
    with Display(result, config.steps, shown=shown, line_every=20) as display:
        for step in range(config.steps):
            haloconv.reset_comm_stats()
            begun = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            batch = training.batch(step, config.batch)
            images = batch.images.to(device=device, dtype=dtype)
            loss = cell_loss(method.logits(images), batch.cells.to(device))
            optimizer.zero_grad()
            loss.backward()
            method.after_backward()
            optimizer.step()
            result.losses.append(loss.item())
            result.train_seconds += time.perf_counter() - begun
            count_traffic(result)
            result.images += config.batch
            if (step + 1) % PROBE_EVERY == 0:
                result.score = evaluate(config, method, held_out, device, PROBE_PANORAMAS)
            display.step(memory.bytes())
        result.peak_bytes = [memory.bytes()]
        result.score = evaluate(config, method, held_out, device, config.panoramas)
    result.total_seconds = time.perf_counter() - started
    return result


def train_unsplit(config: Config) -> Result:
    """The reference run; in a process that has done nothing before."""
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    return train(config, lambda: Unsplit(config, device), device, ranks=1, shown=True)


def train_on_ranks(config: Config) -> Result:
    """The split run, or its ablation, on all ranks; returns the result with every rank's memory."""
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (config.ranks,))
    kind = NoHalo if config.no_halo else Split
    result = train(
        config, lambda: kind(config, device, mesh), device, ranks=config.ranks, shown=dist.get_rank() == 0
    )
    peaks = [None] * config.ranks
    dist.all_gather_object(peaks, result.peak_bytes[0])
    result.title = f"{result.title}, {config.ranks} ranks"
    result.peak_bytes = peaks
    return result


def parse(arguments: list[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name, help_text in (
        ("steps", "training steps; fewer than the default checks the losses alone"),
        ("batch", "panoramas in a step"),
        ("width", "pixels, split over the ranks"),
        ("height", "pixels"),
        ("seed", "of weights and data"),
        ("threads", "threads of one device, on the CPU"),
        ("warmup", "steps in which the learning rate rises"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name), help=help_text)
    parser.add_argument("--panoramas", type=int, help="held-out panoramas, each with a digit on every seam")
    parser.add_argument("--lr", type=float, default=Config.lr, help="highest learning rate")
    parser.add_argument("--model", default=Config.model, help="any ConvNeXt of timm")
    parser.add_argument("--dtype", choices=("float32", "float64"), default=Config.dtype)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=Config.device)
    parser.add_argument(
        "--no-halo", action="store_true", help="each rank convolves its strip as if it were the image"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and figures there")
    options = vars(parser.parse_args(arguments))
    for name in ("width", "height"):
        if options[name] < STRIDE or options[name] % STRIDE:
            parser.error(
                f"--{name} must be a multiple of {STRIDE}, the network's stride, not {options[name]}"
            )
    if options["steps"] < 1 or options["batch"] < 1:
        parser.error("--steps and --batch must be at least 1")
    if options["panoramas"] is None:
        options["panoramas"] = Config.panoramas if options["steps"] >= DEFAULT_STEPS else PROBE_PANORAMAS
    return Config(ranks=int(os.environ["WORLD_SIZE"]), **options)


def main() -> int:
    # Started without torchrun: one rank, which needs no address known to others.
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }.items():
        os.environ.setdefault(name, str(value))
    config = parse()
    console = Console(soft_wrap=True)
    rank = int(os.environ["RANK"])
    if rank == 0:
        console.print(
            f"{config.model}, {config.batch} panoramas of {config.height} x {config.width} a step, "
            f"{config.dtype}, {config.ranks} ranks on {config.device}"
            + (f", {config.threads} thread(s) each" if config.device == "cpu" else "")
        )
    split = train_on_ranks(config)
    # The other ranks are done and end here: nobody waits, and rank 0 goes on as one device.
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return 0
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        unsplit = fresh.submit(train_unsplit, config).result()

    console.print()
    console.print(closing_table(split, unsplit))
    targets = config.steps >= DEFAULT_STEPS
    checks = verdict(split, unsplit, dtype=config.dtype, no_halo=config.no_halo, targets=targets)
    for kept, text in checks:
        console.print(f"[green]✓[/green] {text}" if kept else f"[red]✗[/red] {text}")
    if not targets:
        console.print(f"accuracy is not checked after {config.steps} steps, but after {DEFAULT_STEPS}")
    if config.json:
        report = {
            "config": {
                name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()
            },
            "runs": [split.as_json(), unsplit.as_json()],
            "loss_difference": {
                f"first_{CURVE_STEPS}": loss_difference(split, unsplit, CURVE_STEPS),
                "all": loss_difference(split, unsplit),
            },
            "checks": [{"kept": kept, "text": text} for kept, text in checks],
        }
        config.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(kept for kept, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
