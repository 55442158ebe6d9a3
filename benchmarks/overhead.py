"""What haloconv adds: to a message, and to the host time of a layer.

    torchrun --nproc-per-node 2 benchmarks/overhead.py [--json FILE] [--rounds N]

*Exchange*: the ranks swap columns of a tensor, packed from it and unpacked into another, against batch_isend_irecv of
ready buffers of as many bytes (`raw`), and against the same with a copy before it and one behind it (`copied`), less
than which no exchange of columns can do; the calls take turns. *Host time*: a layer on a mesh of one rank, on an image
so small that nothing but the calls takes time, against torch's, by itself and through autograd.grad. One rank measures
it, the other waits; a figure is of `CALLS` calls in a row, as they come in a network.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time

import haloconv
import torch
import torch.distributed as dist
from harness import Benchmark, Column, interleaved
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

CALLS = 20
COLUMNS = {
    "bytes": Column("bytes", "d"),
    "exchange_ms": Column("exchange ms", ".3f"),
    "raw_ms": Column("raw ms", ".3f"),
    "copied_ms": Column("copied ms", ".3f"),
    "added_us": Column("added µs", ".1f"),
    "plain_us": Column("torch µs", ".1f"),
}


def swap(mesh, channels, columns, layout):
    """Functions: the exchange, and raw messages of its bytes. Each rank reads the other's shard."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(1, channels, 64, columns, generator=generator)
    theirs = torch.randn(1, channels, 64, columns, generator=torch.Generator().manual_seed(1 - rank))
    if layout == "NHWC":
        mine = mine.contiguous(memory_format=torch.channels_last)
    extents = [columns, 2 * columns, 0, columns]
    send, recv = torch.empty(mine.nbytes, dtype=torch.uint8), torch.empty(mine.nbytes, dtype=torch.uint8)

    def exchange():
        with torch._C._AutoDispatchBelowAutograd():  # as layers and rules call it
            return torch.ops.haloconv.exchange.default(
                mine, 3, 2 * columns, extents, False, 0.0, rank, 2, group.group_name
            )

    def raw():
        operations = [
            dist.P2POp(function, buffer, group=group, group_peer=1 - rank)
            for function, buffer in ((dist.irecv, recv), (dist.isend, send))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    flat = mine.permute(0, 2, 3, 1).reshape(-1).view(torch.uint8)
    out = torch.empty_like(flat)

    def copied():
        send.copy_(flat)
        raw()
        out.copy_(recv)

    if not torch.equal(exchange(), theirs):
        raise AssertionError(f"rank {rank} received other columns than the other rank has")
    return {"exchange": exchange, "raw": raw, "copied": copied}, mine.nbytes


def exchanges(bench, mesh, rounds):
    for channels, columns in ((32, 3), (512, 3), (4096, 3)):  # 24 kB, 384 kB, 3 MB
        for layout in ("NCHW", "NHWC"):
            steps, size = swap(mesh, channels, columns, layout)
            times = interleaved(steps, rounds)
            medians = {name: times[name]["step_ms"] for name in steps}
            bench.add(
                name=f"exchange {layout}",
                ranks=2,
                bytes=size,
                exchange_ms=medians["exchange"],
                raw_ms=medians["raw"],
                copied_ms=medians["copied"],
                ratio=medians["exchange"] / medians["raw"],
                of="raw",
            )


def host_time(bench, mesh, rounds):
    """On a mesh of one rank; what rank 0 measures."""
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(4, 4, 3, padding=1)
    layer = haloconv.nn.Conv2d(4, 4, 3, padding=1)
    layer.load_state_dict(plain.state_dict())
    for name, parameter in list(layer.named_parameters()):
        value = DTensor.from_local(parameter.detach(), mesh, [Replicate()])
        setattr(layer, name, torch.nn.Parameter(value))
    x, grad = torch.randn(1, 4, 8, 8, requires_grad=True), torch.randn(1, 4, 8, 8)
    x_split, grad_split = (
        haloconv.distribute(x.detach(), mesh).requires_grad_(),
        haloconv.distribute(grad, mesh),
    )

    def both(module, x, grad):
        return torch.autograd.grad(module(x), (x, module.weight, module.bias), grad)

    for found, expected in zip(both(layer, x_split, grad_split), both(plain, x, grad)):
        torch.testing.assert_close(found.full_tensor(), expected)
    calls = {
        "forward": (lambda: plain(x), lambda: layer(x_split)),
        "forward + backward": (lambda: both(plain, x, grad), lambda: both(layer, x_split, grad_split)),
    }
    for name, functions in calls.items():
        medians = torch.zeros(2)
        if dist.get_rank() == 0:
            taken = ([], [])
            for _ in range(rounds):
                for times, function in zip(taken, functions):
                    begin = time.perf_counter()
                    for _ in range(CALLS):
                        function()
                    times.append(1e6 * (time.perf_counter() - begin) / CALLS)
            medians = torch.tensor([statistics.median(times) for times in taken])
        dist.broadcast(medians, 0)
        torchs, ours = medians.tolist()
        bench.add(
            name=f"layer, {name}", ranks=1, plain_us=torchs, added_us=ours - torchs, ratio=ours / torchs
        )


def main():
    bench = Benchmark("overhead", __doc__, COLUMNS)
    bench.parser.add_argument("--rounds", type=int, default=100)
    args = bench.parse()
    rounds = 3 if args.fast else args.rounds
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"--nproc-per-node is {dist.get_world_size()}, expected 2")
    exchanges(bench, init_device_mesh("cpu", (2,)), rounds)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))["own"]
    host_time(bench, alone, rounds)
    bench.finish(["name", "bytes", "exchange_ms", "raw_ms", "copied_ms", "plain_us", "added_us", "ratio"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
