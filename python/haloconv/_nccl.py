"""The Python half of the NCCL transport: how the ranks of a group agree on it, and who looks after it.

C finds no communicator for a group and calls ``haloconv::_connect``. Every rank of the group is there, for all of them
run the same exchanges, with or without a message of their own. Each leaves word in the store whether it can use NCCL,
rank 0 decides for all, and passes the id of the communicator around. ``HALOCONV_TRANSPORT`` is ``nccl`` (an error where
some rank cannot), ``c10d``, or ``auto``.

An exchange is waited for by the device, so a rank would not know of a peer's error: a thread looks for what peers
report, while something is in flight, and lets C look for NCCL's own errors and for exchanges that take too long
(csrc/nccl_comm.h). ``HALOCONV_TIMEOUT`` sets the limit, in seconds; unset it is the process group's own.
"""

import atexit
import contextlib
import json
import os
import threading
import time
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_default_timeout,
    _resolve_process_group,
)

from . import _C, _info, _transport
from ._check import on_rank

_WATCH_EVERY_S = 0.1


def _read_mode():
    mode = os.environ.get("HALOCONV_TRANSPORT") or "auto"
    if mode not in ("auto", "nccl", "c10d"):
        raise ImportError(f"HALOCONV_TRANSPORT is '{mode}', expected 'auto', 'nccl' or 'c10d'")
    return mode


def _read_timeout():
    text = os.environ.get("HALOCONV_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ImportError(f"HALOCONV_TIMEOUT is '{text}', expected a number of seconds above 0")
    return seconds


_mode = _read_mode()
_timeout = _read_timeout()
_watch = None
_connected = {}  # group name: weak reference to its channel


def _backend(group):
    """The group's backend for CUDA tensors, by name."""
    try:
        return group._get_backend(torch.device("cuda")).name()
    except RuntimeError:
        return dist.get_backend(group)


def why_never():
    """Why this process cannot use NCCL for tensors on a device, whatever the group, "" where it can."""
    if _mode == "c10d":
        return "HALOCONV_TRANSPORT is 'c10d'"
    try:
        _C.nccl_version()
    except RuntimeError as error:
        return str(error)
    return ""


def why_not(group):
    """Why this rank cannot use NCCL for tensors on a device in this group, "" where it can."""
    never = why_never()
    if never:
        return never
    if not _C.fake_device() and _backend(group) != "nccl":
        return f"the group's backend is {_backend(group)}"
    return ""


@_info.section("transport")
def _about():
    never = why_never()
    device = {"chosen": "c10d", "why not nccl": never}
    if not never:
        device = {"chosen": "nccl", "where": "all ranks of a group can and its backend is nccl; else c10d"}
        if _mode == "nccl":
            device["where"] = "always; an error where a rank cannot, or the group's backend is another"
        device["version"] = _info.dotted(_C.nccl_version(), (10000, 100, 1))
    if _timeout is not None:
        device["timeout in s"] = _timeout
    if _C.fake_device():
        device["for"] = "tests: a stand-in, to which CPU tensors are a device's"
    return {
        "CPU tensors": {"chosen": "c10d", "why not nccl": "NCCL moves tensors between CUDA devices only"},
        "CUDA tensors": device,
    }


def timeout_of(group):
    """The limit for an exchange, in seconds."""
    if _timeout is not None:
        return _timeout
    try:
        return group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):
        return _get_default_timeout(dist.get_backend(group)).total_seconds()


class _Meeting:
    """The ranks of a group, leaving word for one another in the store."""

    def __init__(self, channel):
        self.channel, self.epoch = channel, channel.epoch
        self.group, self.store = channel.group, _get_default_store()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.limit = timeout_of(self.group)
        self.deadline = time.monotonic() + self.limit
        failed = _transport.failed_key(channel, self.epoch)
        self.failed, self.prefix = failed, f"{failed.removesuffix('failed')}connect/{channel.connects}"
        channel.connects += 1

    def say(self, key, value):
        self.store.set(f"{self.prefix}/{key}", value)

    def hear(self, key, whom):
        pause = 0.0005
        while not self.store.check([f"{self.prefix}/{key}"]):
            if self.store.check([self.failed]):
                raise RuntimeError(self.store.get(self.failed).decode().partition(" ")[2])
            if time.monotonic() > self.deadline:
                raise RuntimeError(
                    f"{whom} of group '{self.group.group_name}' did not come to set up NCCL within {self.limit:g} s"
                    f"{on_rank()}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self.store.get(f"{self.prefix}/{key}").decode()

    def decide(self):
        """On rank 0: "nccl <id>", "c10d", or "error <sentence>"."""
        said = [json.loads(self.hear(rank, f"rank {rank}")) for rank in range(self.world)]
        unable = next((rank for rank in range(self.world) if said[rank]["why_not"]), None)
        if unable is None:
            return "nccl " + _C.nccl_new_id().hex()
        if any(word["mode"] == "nccl" for word in said):
            return f"error HALOCONV_TRANSPORT is 'nccl' and rank {unable} cannot: {said[unable]['why_not']}"
        return "c10d"


def _connect(group_name, device):
    channel = _transport._channel(group_name)
    if channel.uses_c10d:
        return 0
    if not _C.fake_device() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"group '{group_name}' has no communicator yet and none can be made while a CUDA graph is captured: run "
            f"once before the capture{on_rank()}"
        )
    meeting = _Meeting(channel)
    meeting.say(meeting.rank, json.dumps({"mode": _mode, "why_not": why_not(meeting.group)}))
    if meeting.rank == 0:
        meeting.say("decision", meeting.decide())
    kind, _, rest = meeting.hear("decision", "rank 0").partition(" ")
    if kind == "error":
        raise RuntimeError(rest)
    if kind == "c10d":
        channel.uses_c10d = True
        return 0
    _look_after(channel)
    _C.nccl_connect(
        group_name, meeting.epoch, device, meeting.rank, meeting.world, bytes.fromhex(rest), meeting.limit
    )
    return 1


def connect_mesh(mesh):
    """Makes the communicators of a CUDA mesh ahead of their first use. Collective."""
    if mesh.device_type == "cuda" or _C.fake_device():
        device = 0 if _C.fake_device() else torch.cuda.current_device()
        for mesh_dim in range(mesh.ndim):
            name = mesh.get_group(mesh_dim).group_name
            if mesh.size(mesh_dim) > 1 and not _C.nccl_is_connected(name, device):
                with _transport.reporting(lambda name=name: [name]):
                    _connect(name, device)


# ---- the watch ----


class _Watch(threading.Thread):
    def __init__(self):
        super().__init__(name="haloconv watch", daemon=True)
        self.ended = threading.Event()
        self.store = _get_default_store()
        with contextlib.suppress(RuntimeError):  # also what a store has no clone for
            self.store = self.store.clone()  # a connection of its own: the other may be waiting

    def run(self):
        while not self.ended.wait(_WATCH_EVERY_S):
            try:
                self.look()
            except Exception as error:
                if not self.ended.is_set() and dist.is_initialized():
                    warnings.warn(f"haloconv cannot look for what other ranks report: {error}", stacklevel=1)
                    self.ended.wait(1)

    def look(self):
        for name in filter(None, _C.nccl_watch().split(",")):
            channel = _connected.get(name, lambda: None)()
            if channel is None:
                continue
            epoch = channel.epoch
            key = _transport.failed_key(channel, epoch)
            if self.store.check([key]):
                posted, _, reason = self.store.get(key).decode().partition(" ")
                _C.nccl_warn(name, epoch, int(posted), reason)
                _C.nccl_watch()  # aborts it
        for name, reference in list(_connected.items()):
            channel = reference()
            if channel is None or not _is_alive(name, channel.group):
                _end(name, reference)


def _is_alive(name, group):
    try:
        return _resolve_process_group(name) is group
    except RuntimeError:
        return False


def _look_after(channel):
    global _watch
    group = channel.group
    if _connected.get(group.group_name, lambda: None)() is not channel:
        _connected[group.group_name] = reference = weakref.ref(channel)
        weakref.finalize(group, _end, group.group_name, reference).atexit = False
    if _watch is None or not _watch.is_alive():
        _watch = _Watch()
        _watch.start()


def _end(name, reference):
    """The process group is gone, and not replaced by another of its name."""
    if _connected.get(name) is reference:
        del _connected[name]
        _C.nccl_destroy(name)


@atexit.register
def _end_all():
    if _watch is not None:
        _watch.ended.set()
        _watch.join(5)
    if _connected:
        _connected.clear()
        _C.nccl_destroy()


_transport._library.impl(
    "_connect", lambda group, device: _connect(_transport._text(group), device), "CompositeExplicitAutograd"
)
