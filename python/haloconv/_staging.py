"""Messages between devices by way of host memory, for a backend that cannot take them from the device itself.

That is gloo, and so how several ranks share one card. A buffer on the device has a twin in pinned host memory, with the
transport's header at its front, and from there on it travels like any message between CPUs. The host waits for the copy
of what is sent; what is received goes to the device in the order of the caller's stream, and torch's allocator keeps
the pinned memory until it has.
"""

import torch

from . import _C

HEADER_BYTES, CHUNK_BYTES = 32, 1 << 20  # HC_HEADER_BYTES and HC_CHUNK_BYTES in csrc/transport.h


def is_on_device(buffer):
    """Whether the host must not touch it."""
    return buffer.device.type != "cpu" or _C.fake_device()


def is_needed(buffers, group):
    """Whether these buffers are on a device that the group's backend cannot send from."""
    if not buffers or not is_on_device(buffers[0]):
        return False
    return group._get_backend(buffers[0].device).name() == "gloo"


def _pinned(size, like):
    return torch.empty(size, dtype=torch.uint8, pin_memory=like.device.type == "cuda")


def _copy(target, source):
    target.copy_(source, non_blocking=True)


def _wait_for(device):
    """Until the copies that the current stream was given are through."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
            event.synchronize()


def to_host(buffers):
    """The twins of buffers that are sent, filled."""
    twins = [_pinned(HEADER_BYTES + buffer.numel(), buffer) for buffer in buffers]
    for twin, buffer in zip(twins, buffers):
        _copy(twin[HEADER_BYTES:], buffer)
    if buffers:
        _wait_for(buffers[0].device)
    return twins


def rooms(buffers):
    """The twins of buffers that are received into: each has room for whole chunks (csrc/transport.h)."""
    twins = []
    for buffer in buffers:
        size = HEADER_BYTES + buffer.numel()
        twins.append(_pinned(-(-size // CHUNK_BYTES) * CHUNK_BYTES, buffer)[:size])
    return twins


def to_device(twins, buffers):
    """Brings what was received home."""
    for twin, buffer in zip(twins, buffers):
        _copy(buffer, twin[HEADER_BYTES:])
