"""Three ways to measure a case of memory_cases.py, with the same columns.

* `fake`: tensors without memory (FakeTensorMode), a process group without peers, torch's MemTracker. Any network on any
  number of ranks, in seconds, on any machine. It sees every tensor, also those that haloconv's own ops return, and adds
  the messages and the extended buffer that the C core allocates inside a convolution; it does not see what ATen's
  kernels allocate inside (a convolution's workspace), or fragmentation.
* `cpu`: real ranks, one process each, over gloo. Every block of 64 KiB or more that the C library's allocator hands out
  (tests/allocations.c, with LD_PRELOAD).
* `cuda`: real ranks over NCCL: torch's allocator, ``max_memory_allocated`` (peak) and ``max_memory_reserved``.

A step runs once before it is measured, so that optimizer states exist, and FSDP2's lazy part is over.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import haloconv
import torch
import torch.distributed as dist
from harness import GIB, interleaved
from memory_cases import Case, kept_bytes, program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import conv_flop_count, flop_registry

ALLOCATIONS = Path(__file__).resolve().parent.parent / "tests" / "allocations.c"


# ---- fake ----


def _exchange(input, weight, geometry):
    """Bytes of an exchange's messages on this rank, and of the copy of the shard with its halo, where one is made."""
    stride, padding, dilation, transposed, output_padding, _, periodic, dims, sizes, ranks, worlds, _ = (
        geometry
    )
    messages = extended = 0
    for dim, size, rank, world in zip(dims, sizes, ranks, worlds):
        at = dim - 2
        plan = haloconv.plan(
            size,
            world,
            weight.shape[dim],
            stride[at],
            tuple(padding[2 * at : 2 * at + 2]),
            dilation[at],
            transposed=transposed,
            output_padding=output_padding[at],
            periodic=bool(periodic[at]),
        ).ranks[rank]
        column = input.nbytes // max(1, input.shape[dim])
        messages += sum(end - begin for _, begin, end in [*plan.sends, *plan.recvs]) * column
        (own, own_end), (begin, end) = plan.owned_in, plan.needed
        left, right = own - (begin - plan.pad_left), end + plan.pad_right - own_end
        reach = dilation[at] * (weight.shape[dim] - 1)
        is_fast = 0 <= left <= reach and 0 <= left - right < stride[at]  # csrc/convolution_fast.h
        if not is_fast and (plan.sends or plan.recvs or left or right):
            extended += (end - begin) * column
    return messages, extended


def _tracker():
    """MemTracker without its bookkeeping for modules, which costs most of its time and wants one call of each; with
    what the C core allocates inside a convolution, and with the work that is done."""
    from torch.distributed._tools.mem_tracker import (
        MemTracker,
        _MemRefType,
    )  # of its kinds only totals are used

    class Tracker(MemTracker):
        halos = flops = 0

        def _pre_fw_hook(self, *args):
            pass

        _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook

        def _update_peak_stats(self, peak_state):
            for device, now in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < now["Total"]:
                    self._peak_mem[device] = now["Total"]
                    self._peak_mem_snap[device] = dict(now)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            scratch = None
            backward = func is torch.ops.haloconv.convolution_backward.default
            if backward or func is torch.ops.haloconv.convolution.default:
                input, weight = args[1:3] if backward else args[:2]
                messages, extended = _exchange(input, weight, args[3 : 3 + 12])
                self.halos = max(self.halos, messages)
                if messages + extended > 0:
                    scratch = input.new_empty(messages + extended, dtype=torch.uint8)
                    self._track(_MemRefType.TEMP, scratch)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            del scratch
            if result is not NotImplemented:
                self.flops += _flops(func, args, kwargs or {}, result)
            return result

    return Tracker()


def _flops(func, args, kwargs, result):
    if func is torch.ops.haloconv.convolution.default:
        return conv_flop_count(args[0].shape, args[1].shape, result.shape, transposed=args[6])
    if func is torch.ops.haloconv.convolution_backward.default:
        once = conv_flop_count(args[1].shape, args[2].shape, args[0].shape, transposed=args[6])
        return once * (bool(args[15]) + bool(args[16]))
    if func is torch.ops.aten.convolution_backward.default:  # torch's formula leaves out groups
        once = conv_flop_count(args[1].shape, args[2].shape, args[0].shape, transposed=args[7])
        return once * (args[10][0] + args[10][1])
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def fake(case):
    """The columns of a case, from fake tensors on one rank. Of a pipeline the largest stage counts."""
    if case.rank is None and case.way == "pipeline":
        stages = [fake(replace(case, rank=rank)) for rank in range(case.ranks)]
        largest = max(stages, key=lambda stage: stage["peak_gib"])
        return {**largest, "flops": max(stage["flops"] for stage in stages)}
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", message="Expected a tensor or a traceable wrapper-subclass")
    rank = min(1, case.ranks - 1) if case.rank is None else case.rank
    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (case.ranks,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            run = program(case, mesh, rank)
            run.step()
            if case.way != "pipeline":
                run.model.zero_grad(set_to_none=True)
            tracker = _tracker()
            tracker.track_external(
                run.model, *run.inputs, *([] if run.optimizer is None else [run.optimizer])
            )
            device, alive = torch.device("cpu"), {}
            with tracker:
                run.step(lambda moment: alive.update({moment: _total(tracker, "current", device)}))
            peak = _total(tracker, "peak", device)
            kept = kept_bytes(run)
            halos, flops = tracker.halos, tracker.flops
            del run
    finally:
        dist.destroy_process_group()
        gc.collect()
    return {**_columns(peak, kept, alive), "halos_gib": halos / GIB, "flops": flops}


def _total(tracker, which, device):
    return tracker.get_tracker_snapshot(which)[device]["Total"]


def _columns(peak, kept, alive):
    """The columns of a step, all from bytes: its peak, what is kept, and what was alive at moments of it (or {})."""
    activations = alive["forward"] - alive["before"] if alive else None
    temporaries = None
    if alive:
        held = kept["parameters"] + kept["states"]
        temporaries = peak - held - max(activations, kept["gradients"])
    parts = {**kept, "activations": activations, "temporaries": temporaries}
    return {
        "peak_gib": peak / GIB,
        **{f"{name}_gib": None if value is None else value / GIB for name, value in parts.items()},
    }


# ---- real ranks ----


def measured(cases, device, rounds=0):
    """The columns of cases that have one number of ranks, from real processes; of each column the largest over ranks.

    Each case has fresh processes. With `rounds` > 0 another set of processes holds all of them, and their steps take
    turns: step_ms and its percentiles.
    """
    rows = [_largest(_launch([case], device, 0)) for case in cases]
    if rounds > 0:
        times = _launch(cases, device, rounds)
        for number, row in enumerate(rows):
            row |= max((of_rank[number] for of_rank in times), key=lambda columns: columns["step_ms"])
    return rows


def _largest(by_rank):
    columns = {}
    for (of_rank,) in by_rank:
        for key, value in of_rank.items():
            columns[key] = value if columns.get(key) is None else max(columns[key], value)
    return columns


def _launch(cases, device, rounds):
    """Runs `worker` on every rank; what each printed."""
    ranks = cases[0].ranks
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as directory:
        if device == "cpu" and rounds == 0:
            library = f"{directory}/allocations.so"
            command = ["gcc", "-O2", "-shared", "-fPIC", "-o", library, ALLOCATIONS, "-ldl"]
            subprocess.run(command, check=True)
            environment["LD_PRELOAD"] = library
        task = json.dumps([[asdict(case) for case in cases], device, rounds, f"{directory}/store"])
        command = [sys.executable, __file__]
        processes = [
            subprocess.Popen([*command, str(rank), task], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=1800)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        raise RuntimeError(f"{cases[0].name}: rank(s) {failed} of {ranks} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _nbytes(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


class _Allocator:
    """What is alive above a mark, and the most that was, in bytes."""

    def __init__(self, device):
        self.is_cuda = device == "cuda"
        if not self.is_cuda:
            self.library = ctypes.CDLL(os.environ["LD_PRELOAD"])
            for name in ("allocations_peak", "allocations_alive"):
                getattr(self.library, name).restype = ctypes.c_long
        self.below = 0
        self.mark()

    def mark(self):
        """The peak starts over."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.below += self.library.allocations_alive() if hasattr(self, "marked") else 0
            self.library.allocations_mark()
            self.marked = True

    def alive(self):
        return (
            torch.cuda.memory_allocated() if self.is_cuda else self.below + self.library.allocations_alive()
        )

    def peak(self):
        return (
            torch.cuda.max_memory_allocated()
            if self.is_cuda
            else self.below + self.library.allocations_peak()
        )


def worker(rank, cases, device, rounds, store):
    """One rank: the columns of each case."""
    world = cases[0].ranks
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    if rounds > 0:
        runs = [program(case, mesh, rank) for case in cases]
        taken = interleaved({number: run.step for number, run in enumerate(runs)}, rounds)
        return [taken[number] for number in range(len(cases))]
    allocator = _Allocator(device)
    run = program(cases[0], mesh, rank)
    run.step()
    run.model.zero_grad(set_to_none=True)
    haloconv.reset_comm_stats()
    allocator.mark()
    alive = {}
    loss = run.step(lambda moment: alive.update({moment: allocator.alive()}))
    kept = kept_bytes(run)
    peak = allocator.peak()
    if device == "cpu" and alive:  # MKL and oneDNN keep buffers from one call to the next, of no tensor
        peak += kept["parameters"] + kept["states"] + sum(map(_nbytes, run.inputs)) - alive["before"]
    columns = _columns(peak, kept, alive)
    columns["loss"] = float(loss)
    if device == "cuda":
        columns["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return [columns]


if __name__ == "__main__":
    _cases, *_rest = json.loads(sys.argv[2])
    print(json.dumps(worker(int(sys.argv[1]), [Case(**case) for case in _cases], *_rest)))
    sys.stdout.flush()
    os._exit(0)  # no destroy_process_group: a peer may be gone already
