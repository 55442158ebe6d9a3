"""A ConvNeXt's training step, split over the ranks, against the same work without any exchange.

    torchrun --nproc-per-node 2 benchmarks/training.py [--json FILE] [--model NAME] [--rounds N]

Every round times one step (forward, loss, backward, SGD) of each of these in turn; the slowest rank counts:

    split        the whole image, split over the ranks
    independent  every rank at once, each by itself on an image as wide as its strip: the work of `split` without halos,
                 statistics or the reduction of gradients. Ranks that share a machine slow each other here too
    unsplit      the whole image on rank 0, the others idle

Strong scaling is unsplit / split. Weak scaling is the time of a strip's width alone (`strip`: rank 0, others idle) over
that of `split`. One uncounted step compares loss and gradients of `split` and `unsplit`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import statistics

import haloconv
import torch
import torch.distributed as dist
from harness import Benchmark, Column, interleaved
from torch.distributed.device_mesh import init_device_mesh

COLUMNS = {
    "exchange_ms": Column("in exchanges ms", ".1f"),
    "exchange_share": Column("share", ".1%"),
    "images_per_s": Column("images/s", ".2f"),
}


class Trainer:
    """One model with its optimizer on one kind of input."""

    def __init__(self, model, images, classes):
        self.model, self.images = model, images
        self.targets = torch.arange(len(images)) % classes
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self):
        logits = self.model(self.images)
        if hasattr(logits, "device_mesh"):
            logits = haloconv.gather(logits)
        return torch.nn.functional.cross_entropy(logits, self.targets)

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def gradients(trainer):
    loss = trainer.loss()
    loss.backward()
    found = [parameter.grad for parameter in trainer.model.parameters()]
    trainer.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def error(split, unsplit):
    """The largest difference of loss and gradients, relative to the largest of their kind."""
    (loss, grads), (expected_loss, expected) = gradients(split), gradients(unsplit)
    largest = max(float(grad.abs().max()) for grad in expected)
    difference = max(float((a - b).abs().max()) for a, b in zip(grads, expected))
    return max(float((loss - expected_loss).abs() / expected_loss.abs()), difference / largest)


def main():
    bench = Benchmark("training", __doc__, COLUMNS)
    bench.parser.add_argument("--model", default="convnext_atto", help="of timm (convnext_atto)")
    bench.parser.add_argument("--batch", type=int, default=2)
    bench.parser.add_argument("--height", type=int, default=256)
    bench.parser.add_argument("--width", type=int, default=512)
    bench.parser.add_argument("--rounds", type=int, default=15)
    args = bench.parse()
    if args.fast:
        args.height, args.width, args.rounds, args.batch = 64, 128, 2, 1
    import timm

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = timm.create_model(args.model, num_classes=10).to(memory_format=torch.channels_last)
    images = torch.randn(args.batch, 3, args.height, args.width).contiguous(memory_format=torch.channels_last)
    strip = images[..., : args.width // world].contiguous(memory_format=torch.channels_last)
    model = haloconv.parallelize(copy.deepcopy(plain), mesh)
    split = Trainer(model, haloconv.distribute(images, mesh), 10)
    unsplit, independent = Trainer(copy.deepcopy(plain), images, 10), Trainer(copy.deepcopy(plain), strip, 10)
    difference = error(split, unsplit)
    if not difference <= 1e-3:  # float32 sums in another order, through a whole network
        raise AssertionError(f"split and unsplit differ by {difference}, expected at most 1e-3")

    def alone(trainer):
        return lambda: trainer.step() if rank == 0 else None

    in_exchanges = []

    def split_step():
        haloconv.reset_comm_stats()
        split.step()
        in_exchanges.append(haloconv.comm_stats()["seconds"])

    times = interleaved(
        {
            "split": split_step,
            "independent": independent.step,
            "unsplit": alone(unsplit),
            "strip": alone(independent),
        },
        args.rounds,
    )
    median = {name: time["step_ms"] for name, time in times.items()}
    seconds = torch.tensor(statistics.median(in_exchanges), dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    notes = {
        "split": {"ratio": median["independent"] / median["split"], "of": "independent"},
        "unsplit": {"ratio": median["unsplit"] / median["split"], "of": "split: strong scaling"},
        "strip": {"ratio": median["strip"] / median["split"], "of": "split: weak scaling"},
    }
    for name, time in times.items():
        narrow = name in ("independent", "strip")
        bench.add(
            name=name,
            model=args.model,
            input=[args.batch, 3, args.height, args.width // world if narrow else args.width],
            ranks=1 if name in ("unsplit", "strip") else world,
            dtype="float32",
            checkpointing="none",
            optimizer="SGD",
            measured="cpu",
            **time,
            **notes.get(name, {}),
            images_per_s=1e3 * args.batch / median[name],
            exchange_ms=1e3 * float(seconds) if name == "split" else None,
            exchange_share=1e3 * float(seconds) / median["split"] if name == "split" else None,
            error=difference if name == "split" else None,
        )
    bench.finish(
        ["name", "ranks", "input", "step_ms", "step_ms_p10", "step_ms_p90", "ratio", "of", "exchange_share", "error"]
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
