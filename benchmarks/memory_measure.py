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
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import haloconv
import torch
import torch.distributed as dist
from harness import GIB, percentiles
from memory_cases import Case, program
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import conv_flop_count, flop_registry

PARTS = ("parameters", "gradients", "states", "activations", "temporaries")
ALLOCATIONS = Path(__file__).resolve().parent.parent / "tests" / "allocations.c"


# ---- fake ----


def _exchange(input, weight, geometry):
    """Bytes of an exchange's messages on this rank, and of the copy of the shard with its halo, where one is made."""
    stride, padding, dilation, transposed, output_padding, _, periodic, dims, sizes, ranks, worlds, _ = geometry
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
    """MemTracker, quick: torch's keeps a snapshot of every module at every operation."""
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

    class Tracker(MemTracker):
        halos = flops = 0

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

    return Tracker(), _MemRefType


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
            tracker, kinds = _tracker()
            tracked = [run.model, *run.inputs] + ([] if run.optimizer is None else [run.optimizer])
            tracker.track_external(*tracked)
            with tracker:
                run.step()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            flops, halos = tracker.flops, tracker.halos
            del run, tracked
    finally:
        dist.destroy_process_group()
        gc.collect()
    parts = {
        "parameters": peak[kinds.PARAM] + peak[kinds.BUFFER],
        "gradients": peak[kinds.GRAD],
        "states": peak[kinds.OPT],
        "activations": peak[kinds.ACT] + peak[kinds.OTH],
        "temporaries": peak[kinds.TEMP],
    }
    return {
        "peak_gib": peak["Total"] / GIB,
        **{f"{name}_gib": value / GIB for name, value in parts.items()},
        "halos_gib": halos / GIB,
        "flops": flops,
    }
