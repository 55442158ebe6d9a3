"""Runs a function on every rank of a gloo process group, in worker processes that live as long as the test
session.

`run_ranks(world, fn, *args)` calls the module-level function `fn(*args)` on ranks 0..world-1 at once and
returns the list of what they returned. The workers of a world size are forked once, from a server that has
imported torch, and reused; each has one thread and talks over loopback only. What goes wrong in a case is
always a failure that names the case, never a stuck run:

- a rank that raises: `RankFailure` with every rank's traceback; the pool is thrown away, since messages may
  be on their way;
- a rank that dies: the same, with its exit code;
- a rank that has not returned when the time is over (or `GRACE_S` after another rank raised): `RankFailure`
  with the Python stack of every rank that is still running, then the pool is killed.

`raises_on_every_rank` is for errors that are wanted: all ranks must raise, and afterwards the same processes
must still be able to communicate.

On the workers, `mesh_of` caches device meshes and `check_same` is the one oracle: a function of full tensors
against the same function of sharded ones.
"""

import atexit
import contextlib
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(os.path.dirname(HERE), "python")
GRACE_S = float(os.environ.get("HALOCONV_GRACE_S", "15"))  # how long the other ranks get after one has raised
TIMEOUT_FACTOR = float(
    os.environ.get("HALOCONV_TIMEOUT_FACTOR", "1")
)  # of every case's limit: more for sanitizers
GROUP_TIMEOUT_S = 120.0  # gloo's own limit, longer than a case's, so that ours reports first
START_TIMEOUT_S = 120.0
PRELOAD = [  # what the first DTensor operation would import in every worker, and what the test modules import
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "haloconv",
    "pytest",
    "hypothesis",
    "reference",
    "harness",
]
RTOL = ATOL = 1e-9  # float64: rounding of sums of a few thousand products stays far below


class RankFailure(AssertionError):
    """One or more ranks did not do what was asked. `errors` maps rank to (type names, message, traceback)."""

    def __init__(self, text, errors):
        super().__init__(text)
        self.errors = errors


# ------------------------------------------------------------------------------------------------ the
# worker's side


def _worker_main(rank, world, conn, workdir, group_timeout_s, faults_path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["GLOO_SOCKET_FAMILY"] = "AF_INET"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    _die_with_parent()
    log = open(faults_path, "w")  # noqa: SIM115  open as long as the process lives
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    with contextlib.suppress(ImportError):  # the tests of the harness itself don't need it
        import haloconv  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{workdir}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=group_timeout_s),
    )
    conn.send_bytes(pickle.dumps(("ready", None)))
    while True:
        try:
            blob = conn.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if blob == b"stop":
            os._exit(0)  # no destroy_process_group: a peer may be gone already
        try:
            fn, args = pickle.loads(blob)
            value = fn(*args)
            reply = pickle.dumps(("ok", value))
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = pickle.dumps(("error", (kinds, str(error), traceback.format_exc())))
        _clean_up()
        try:
            conn.send_bytes(reply)
        except OSError:
            os._exit(0)


def _die_with_parent():
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _clean_up():
    """Nothing of one case may show in the next: rules off, default dtype and grad mode back."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    haloconv = sys.modules.get("haloconv")
    if haloconv is not None and hasattr(haloconv, "disable_rules"):
        haloconv.disable_rules()


def _barrier():
    import torch
    import torch.distributed as dist

    one = torch.ones(3)
    dist.all_reduce(one)
    assert one.tolist() == [float(dist.get_world_size())] * 3
    if dist.get_world_size() > 1:  # point to point too, both ways round the ring
        rank, world = dist.get_rank(), dist.get_world_size()
        got = torch.empty(2)
        ops = [
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.tolist() == [float((rank - 1) % world)] * 2
    return True


# ------------------------------------------------------------------------------------------------ the pool


class Pool:
    """`world` worker processes with one gloo group."""

    _numbers = itertools.count()

    def __init__(self, world, group_timeout_s=GROUP_TIMEOUT_S):
        self.world = world
        self.workdir = tempfile.mkdtemp(prefix=f"haloconv_tests_{world}_")
        self.processes, self.conns = [], []
        context = _server()
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main,
                args=(rank, world, theirs, self.workdir, group_timeout_s, self._faults(rank)),
                daemon=True,
                name=f"rank {rank} of {world}",
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.conns.append(ours)
        replies, running = self._collect(START_TIMEOUT_S)
        if running or any(kind != "ready" for kind, _ in replies.values()):
            text = self._describe("starting the workers", replies, running)
            self.kill()
            raise RankFailure(text, {})

    def _faults(self, rank):
        return os.path.join(self.workdir, f"stack_{rank}")

    def run(self, fn, args, timeout):
        """Returns ({rank: (kind, value)}, ranks still running)."""
        blob = pickle.dumps((fn, args))
        for conn in self.conns:
            with contextlib.suppress(OSError):  # the process has died; _collect says so
                conn.send_bytes(blob)
        return self._collect(timeout)

    def _collect(self, timeout):
        replies, end = {}, time.monotonic() + timeout
        waiting = dict(enumerate(self.conns))
        while waiting:
            left = end - time.monotonic()
            if left <= 0:
                break
            sentinels = {self.processes[rank].sentinel: rank for rank in waiting}
            ready = multiprocessing.connection.wait([*waiting.values(), *sentinels], left)
            for rank in [
                rank
                for rank, conn in waiting.items()
                if conn in ready or self.processes[rank].sentinel in ready
            ]:
                try:
                    if not waiting[rank].poll():
                        raise EOFError
                    replies[rank] = pickle.loads(waiting[rank].recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    replies[rank] = ("died", (["ProcessDied"], f"exit code {code}", self._stack(rank)))
                del waiting[rank]
                if replies[rank][0] != "ok":
                    end = min(end, time.monotonic() + GRACE_S)
        return replies, sorted(waiting)

    def _stack(self, rank):
        try:
            with open(self._faults(rank)) as file:
                return file.read()
        except OSError:
            return ""

    def _describe(self, title, replies, running):
        for rank in running:
            if self.processes[rank].pid and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if running:
            time.sleep(0.5)
        parts = [title]
        for rank in range(self.world):
            if rank in running:
                parts.append(f"--- rank {rank} of {self.world}: HANGS; its stack:\n{self._stack(rank)}")
            elif rank in replies and replies[rank][0] in ("error", "died"):
                kind, (kinds, message, trace) = replies[rank]
                parts.append(f"--- rank {rank} of {self.world}: {kind}: {kinds[0]}: {message}\n{trace}")
            else:
                parts.append(f"--- rank {rank} of {self.world}: returned")
        return "\n".join(parts)

    def kill(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)
        for conn in self.conns:
            conn.close()
        shutil.rmtree(self.workdir, ignore_errors=True)

    def stop(self):
        for conn in self.conns:
            with contextlib.suppress(OSError):
                conn.send_bytes(b"stop")
        for process in self.processes:
            process.join(2)
        self.kill()


_pools = {}
_context = None


def _server():
    """The fork server's context; the server has imported torch once, so a worker costs a fork."""
    global _context
    if _context is None:
        paths = [HERE, SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        if "haloconv" in sys.modules:  # an installed package, not the source tree's
            paths[1] = os.path.dirname(os.path.dirname(sys.modules["haloconv"].__file__))
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault(
            "TORCHINDUCTOR_COMPILE_THREADS", "1"
        )  # no pool of compiler processes per worker
        cache = tempfile.mkdtemp(prefix="haloconv_tests_cache_")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
        os.environ["HALOCONV_TEST_CACHE"] = cache
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
        atexit.register(shutdown)
    return _context


def pool(world):
    if world not in _pools:
        _pools[world] = Pool(world)
    return _pools[world]


def discard(world):
    """Ends the workers of this world size; the next case starts new ones."""
    if world in _pools:
        _pools.pop(world).kill()


def shutdown():
    for world in list(_pools):
        _pools.pop(world).stop()


def _name(fn, args):
    return f"{fn.__module__}.{fn.__qualname__}{args!r}"[:2000]


def run_ranks(world, fn, *args, timeout=60):
    """Runs fn(*args) on each of `world` ranks; returns their results in rank order; anything else raises
    RankFailure."""
    start = time.monotonic()
    replies, running = pool(world).run(fn, args, timeout * TIMEOUT_FACTOR)
    if not running and all(kind == "ok" for kind, _ in replies.values()):
        return [replies[rank][1] for rank in range(world)]
    took = time.monotonic() - start
    text = _pools[world]._describe(
        f"{_name(fn, args)} on {world} ranks failed after {took:.1f} s", replies, running
    )
    discard(world)
    raise RankFailure(text, {rank: value for rank, (kind, value) in replies.items() if kind != "ok"})


def run_apart(fn, *calls, timeout=60):
    """Runs fn(*args) for the arguments of each call, each in a process of its own that is a group of one, at the same
    time; returns the results in their order."""
    pools = [Pool(1) for _ in calls]
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            done = list(threads.map(lambda p, args: p.run(fn, args, timeout * TIMEOUT_FACTOR), pools, calls))
        for own, args, (replies, running) in zip(pools, calls, done):
            if running or replies[0][0] != "ok":
                errors = {rank: value for rank, (kind, value) in replies.items() if kind != "ok"}
                raise RankFailure(own._describe(f"{_name(fn, args)} failed", replies, running), errors)
        return [replies[0][1] for replies, _ in done]
    finally:
        for own in pools:
            own.stop()


def raises_on_every_rank(
    world, fn, *args, kinds=("ValueError", "TypeError"), match=None, timeout=30, usable=True
):
    """Every rank must raise one of `kinds` with a message that `match` (one pattern, or several that must
    all) finds.

    Returns the messages. usable: afterwards the same processes must be able to communicate, which shows that
    the error came before anything was sent.
    """
    replies, running = pool(world).run(fn, args, timeout * TIMEOUT_FACTOR)
    try:
        bad = running or [rank for rank, (kind, _) in replies.items() if kind != "error"]
        title = f"{_name(fn, args)}: expected {kinds} on all of {world} ranks"
        if bad:
            raise RankFailure(_pools[world]._describe(title, replies, running), {})
        messages = [replies[rank][1][1] for rank in range(world)]
        for rank, (_, (names, message, trace)) in sorted(replies.items()):
            assert set(kinds) & set(names), f"{title}, rank {rank} raised {names[0]}: {message}\n{trace}"
            for pattern in [match] if isinstance(match, str) else match or ():
                pattern = pattern.replace("{rank}", str(rank))
                assert re.search(pattern, message), f"{title}, rank {rank}: {pattern!r} is not in {message!r}"
        if usable:
            run_ranks(world, _barrier, timeout=20)
        else:
            discard(world)
    except BaseException:
        discard(world)
        raise
    return messages


# ------------------------------------------------------------------------------------------------ helpers on
# the workers

_meshes = {}


@contextlib.contextmanager
def switched(name, value):
    """A block in which a switch of haloconv._C's, a function that returns what was set before, is at `value`."""
    from haloconv import _C

    switch = getattr(_C, name)
    before = switch(value)
    try:
        yield
    finally:
        switch(before)


def mesh_of(ranks, names=None):
    """The device mesh of this nested list of global ranks (or, for a tuple, of this shape); made once per
    process.

    Every rank of the world has to call it, also those that aren't in the mesh."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    key = (repr(ranks), names)
    if key not in _meshes:
        if isinstance(ranks, tuple):
            count = 1
            for extent in ranks:
                count *= extent
            layout = torch.arange(count).reshape(ranks)
        else:
            layout = torch.tensor(ranks)
        _meshes[key] = DeviceMesh("cpu", layout, mesh_dim_names=names)
    return _meshes[key]


def local_part(full, mesh, placements):
    """What this rank holds of `full`: written from torch.chunk, mesh dim by mesh dim."""
    part = full
    for mesh_dim, placement in enumerate(placements):
        if placement.is_shard():
            chunks = list(part.chunk(mesh.size(mesh_dim), placement.dim)) if part.size(placement.dim) else []
            coordinate = mesh.get_coordinate()[mesh_dim]
            if coordinate < len(chunks):
                part = chunks[coordinate]
            else:
                part = part.narrow(placement.dim, part.size(placement.dim), 0)
        else:
            assert placement.is_replicate(), placement
    return part


def shard(full, mesh, placements):
    """A DTensor made by torch alone, of this rank's part of a full tensor; memory format kept."""
    from torch.distributed.tensor import DTensor

    part = keep_format(local_part(full.detach(), mesh, placements), full)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def keep_format(part, full):
    import torch

    if full.dim() == 4 and full.is_contiguous(memory_format=torch.channels_last) and not full.is_contiguous():
        return part.clone(memory_format=torch.channels_last)
    if (
        full.dim() == 5
        and full.is_contiguous(memory_format=torch.channels_last_3d)
        and not full.is_contiguous()
    ):
        return part.clone(memory_format=torch.channels_last_3d)
    return part.clone(memory_format=torch.contiguous_format)


def assert_shards(got, full, placements, what, rtol=RTOL, atol=ATOL):
    """`got` is a DTensor with these placements and each rank holds exactly its part of `full`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(got, DTensor), f"{what}: expected a DTensor, got {type(got).__name__}"
    assert tuple(got.placements) == tuple(placements), (
        f"{what}: placements {got.placements}, expected {tuple(placements)}"
    )
    assert tuple(got.shape) == tuple(full.shape), (
        f"{what}: global shape {tuple(got.shape)}, expected {tuple(full.shape)}"
    )
    local = got.to_local()
    assert_close(local, local_part(full, got.device_mesh, placements), what, rtol, atol)


def assert_replicated(got, full, what, rtol=RTOL, atol=ATOL):
    """`got` is a Replicate DTensor and each rank holds all of `full`."""
    assert all(p.is_replicate() for p in got.placements), (
        f"{what}: placements {got.placements}, expected Replicate"
    )
    assert_close(got.to_local(), full, what, rtol, atol)


def assert_close(got, want, what, rtol=RTOL, atol=ATOL):
    import torch

    assert tuple(got.shape) == tuple(want.shape), (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    if not torch.allclose(got, want, rtol=rtol, atol=atol):
        difference = (got - want).abs()
        where = torch.nonzero(~torch.isclose(got, want, rtol=rtol, atol=atol))[:4].tolist()
        raise AssertionError(
            f"{what}: differs by up to {difference.max().item():.3g} in {difference.gt(atol).sum().item()} of "
            f"{difference.numel()} values, first at {where}"
        )


def full(tensor):
    """The plain full tensor of a DTensor (whatever its placements) or of a plain tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_same(
    mesh,
    placements,
    module,
    x,
    sharded_call,
    *,
    out_placements=None,
    grad=None,
    check_input_grad=True,
    params=None,
):
    """The oracle. `module(x)` unsplit against `sharded_call(x as a DTensor)`, in values, gradients and
    placements.

    module: the unsplit module (or function), its parameters plain and equal on all ranks. params: {name:
    (plain, sharded)} of parameters whose gradients are compared; for a sharded one any placement that reduces
    to the right value is right. Returns the sharded output and the sharded input.
    """
    import torch

    out_placements = placements if out_placements is None else out_placements
    x = x.detach().requires_grad_(check_input_grad)
    want = module(x)
    xs = shard(x, mesh, placements).requires_grad_(check_input_grad)
    got = sharded_call(xs)
    assert_shards(got, want, out_placements, "output")
    if grad is None:
        grad = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(7))
    want.backward(grad)
    got.backward(shard(grad, mesh, out_placements))
    if check_input_grad:
        assert xs.grad is not None, "input gradient: None"
        assert_shards(xs.grad, x.grad, placements, "input gradient")
    for name, (plain, sharded) in (params or {}).items():
        if plain.grad is None:
            assert sharded.grad is None, f"gradient of {name}: expected None"
            continue
        assert sharded.grad is not None, f"gradient of {name}: None"
        assert_close(full(sharded.grad), plain.grad, f"gradient of {name}")
    return got, xs
