"""The NCCL transport on the stand-in for NCCL and CUDA of tests/fakes/: tests/test_fakes.py builds it and runs this."""

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, mesh_of, raises_on_every_rank, run_ranks
from test_ops_memory import heap_bytes, sanitized

pytestmark = pytest.mark.skipif(
    not os.environ.get("HALOCONV_FAKE_CUDA"), reason="needs tests/fakes: tests/test_fakes.py runs this"
)
C10D = os.environ.get("HALOCONV_TRANSPORT") == "c10d"
nccl_only = pytest.mark.skipif(C10D, reason="of the NCCL transport")


def fake():
    library = ctypes.CDLL(os.environ["HALOCONV_FAKE_CUDA"])
    for name in ("fake_calls", "fake_events", "fake_buffers", "fake_comms"):
        getattr(library, name).restype = ctypes.c_int64
    library.fake_arm.argtypes = [ctypes.c_int64, ctypes.c_int]
    return library


def exchange(group=None, width=4, kernel=3, pad=(1, 1), channels=1, size=None):
    """A halo exchange of columns that know where they are, checked."""
    group = group or dist.group.WORLD
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = world * width if size is None else size
    full = torch.arange(size, dtype=torch.float64).repeat(1, channels, 8, 1)
    part = -(-size // world)
    begin, end = min(rank * part, size), min((rank + 1) * part, size)
    got = torch.ops.haloconv.halo_exchange(
        full[..., begin:end].contiguous(),
        3,
        size,
        [kernel, 1, *pad, 1, 0],
        False,
        False,
        -1.0,
        rank,
        world,
        group.group_name,
    )
    out = size + sum(pad) - kernel + 1
    part = -(-out // world)
    first, last = min(rank * part, out), min((rank + 1) * part, out)
    if first < last:
        columns = torch.arange(first - pad[0], last - 1 - pad[0] + kernel)
        want = torch.where((columns >= 0) & (columns < size), columns.double(), -1.0)
        assert torch.equal(got[0, 0, 0], want) and torch.equal(got[0, -1, -1], want), (got[0, 0, 0], want)
    return got


# ------------------------------------------------------------------------------------------------ exchanges


def many_exchanges(count):
    import haloconv
    from haloconv import _C

    rank, world = dist.get_rank(), dist.get_world_size()
    haloconv.reset_comm_stats()
    for number in range(count):
        exchange(
            width=2 + number % 5, kernel=3 + number % 4, pad=(1 + number % 2, 1), channels=1 + number % 40
        )
    stats = haloconv.comm_stats()
    assert stats["exchanges"] == count
    if not C10D:
        assert _C.nccl_is_connected(dist.group.WORLD.group_name, 0)
        assert stats["messages"] <= count * min(2, world - 1)
        assert fake().fake_buffers() == 0
    return rank


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges(world):
    """Fails when an event, a receive or a message to the right peer is missing."""
    run_ranks(world, many_exchanges, 60)


def idle_ranks():
    group = dist.new_group(list(range(dist.get_world_size())))
    for _ in range(3):
        exchange(group, size=2)  # ranks 2 and 3 have nothing
    exchange(group)


@nccl_only
def test_ranks_without_messages_take_part():
    """Fails when a communicator is made only by the ranks that have something to send."""
    run_ranks(4, idle_ranks)


def large():
    exchange(width=40_000, kernel=30_001, pad=(15_000, 15_000))


def test_large_messages():
    """Fails when a message that does not travel in one piece does not arrive whole."""
    run_ranks(2, large)


def wide():
    exchange(width=2, kernel=7, pad=(3, 3))  # reaches over several ranks


def test_halo_over_several_ranks():
    """Fails when a rank has more than two peers."""
    run_ranks(4, wide)


def mixed_formats():
    """Even ranks hold channels_last, odd ones contiguous: an exchange, its adjoint, a convolution's gradients."""
    import haloconv
    from torch.distributed.tensor import DTensor, Shard

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    size, mine = 4 * world, slice(4 * rank, 4 * rank + 4)
    kept = torch.channels_last if rank % 2 == 0 else torch.contiguous_format
    full = torch.randn(2, 3, 5, size, dtype=torch.float64)
    x = full[..., mine].contiguous(memory_format=kept)
    place = (rank, world, dist.group.WORLD.group_name)
    window = (3, size, [3, 1, 1, 1, 1, 0], False, False)
    got = torch.ops.haloconv.halo_exchange(x, *window, 0.0, *place)
    padded = torch.nn.functional.pad(full, (1, 1))
    assert got.is_contiguous(memory_format=kept)
    assert torch.equal(got, padded[..., 4 * rank : 4 * rank + 6])

    parts = torch.randn(world, 2, 3, 5, 6, dtype=torch.float64)  # of each rank's extent
    summed = torch.zeros(2, 3, 5, size + 2, dtype=torch.float64)
    for peer in range(world):
        summed[..., 4 * peer : 4 * peer + 6] += parts[peer]
    back = torch.ops.haloconv.halo_reduce(parts[rank].contiguous(memory_format=kept), *window, *place)
    torch.testing.assert_close(
        back, summed[..., 1:-1][..., mine], rtol=1e-14, atol=1e-14
    )  # order of two sums

    layer = torch.nn.Conv2d(3, 4, 3, padding=1).double()
    whole, grad = full.clone().requires_grad_(), torch.randn(2, 4, 5, size, dtype=torch.float64)
    want = layer(whole)
    wanted = torch.autograd.grad(want, (whole, layer.weight), grad)
    mesh = mesh_of((world,))
    sharded = haloconv.parallelize(layer, mesh)
    local = x.detach().requires_grad_()
    out = sharded(DTensor.from_local(local, mesh, [Shard(3)])).to_local()
    out.backward(grad[..., mine].contiguous(memory_format=kept))
    for found, expected in [
        (out, want[..., mine]),
        (local.grad, wanted[0][..., mine]),
        (sharded.weight.grad.to_local(), wanted[1]),
    ]:
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)  # sums in another order


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_different_memory_formats(world):
    """Fails when a message without a header is read in the receiver's memory format."""
    run_ranks(world, mixed_formats)


def forgetful():
    from haloconv import _C

    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(20):
        size = 1000 * (number + 1)
        got = _C.fault_forgetful_exchange(dist.group.WORLD.group_name, rank, world, size)
        assert got == bytes([(rank - 1) % world + 1]) * size


@nccl_only
@pytest.mark.parametrize("world", [2, 3])
def test_buffers_live_as_long_as_they_are_used(world):
    """Fails when the transport relies on its caller to keep buffers."""
    run_ranks(world, forgetful)


def statistics():
    import haloconv

    haloconv.reset_comm_stats()
    exchange(width=4, channels=3)
    torch.ops.haloconv.all_reduce(
        torch.ones(5), "sum", dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    )
    return haloconv.comm_stats()


def test_statistics():
    """Fails when what travels over NCCL is not counted, or counted otherwise than over c10d."""
    for rank, stats in enumerate(run_ranks(3, statistics)):
        neighbours = 1 if rank in (0, 2) else 2
        assert stats["by_op"]["halo_exchange"]["messages"] == neighbours
        assert stats["by_op"]["halo_exchange"]["bytes"] == neighbours * 3 * 8 * 8
        assert stats["by_op"]["all_reduce"]["messages"] == 2
        assert stats["by_op"]["all_reduce"]["bytes"] == 2 * 5 * 4
        assert (stats["exchanges"], stats["all_reduces"]) == (1, 1)


def capture():
    exchange()
    library = fake()
    library.fake_begin_capture()
    for _ in range(3):
        exchange(kernel=4, pad=(2, 1))
    assert library.fake_end_capture() == 1
    exchange()


@nccl_only
def test_capture():
    """Fails when an exchange asks the device for its state, or leaves work beside the captured stream."""
    run_ranks(2, capture)


# ------------------------------------------------------------------------------------------------ errors


def faulty_steps(bad_rank, after, wanted):
    """On one rank the n-th call into CUDA or NCCL fails, for each n; the others get to know, and all go on."""
    library, rank = fake(), dist.get_rank()
    exchange()
    tries, failures, events = 0, 0, 0
    while True:
        n = 1 + tries // 2  # each twice: how often NCCL is in progress changes
        tries += 1
        if wanted == "connect":
            group = dist.new_group(list(range(dist.get_world_size())))
        else:
            group = dist.group.WORLD
        error = None
        try:
            if rank == bad_rank:
                library.fake_arm(n, after)
            try:
                exchange(group)
            finally:
                fired = rank == bad_rank and library.fake_calls() >= n
                library.fake_arm(0, 0)
            for _ in range(dist.get_world_size() - 1):
                exchange(group)  # nobody gets through all: the news is one neighbour further each time
        except RuntimeError as caught:
            error = str(caught)
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, (error, fired))
        failed = [e is not None for e, _ in errors]
        assert all(failed) or not any(failed), f"call {n} failed on some ranks: {errors}"
        assert error is None or any(w in error for w in ("injected", "NCCL", "reported", "aoti_torch")), error
        assert library.fake_buffers() == 0
        for _ in range(2):
            exchange(group)  # the group goes on
        assert not sanitized() or n < 100
        if wanted != "connect":
            assert library.fake_comms() == 1
        if n == 10:
            events = library.fake_events()
        elif n > 10:
            assert library.fake_events() <= events + 8
        failures += any(failed)
        if not errors[bad_rank][1] and n > 20:
            break
    return n, failures


EFFECTS = [pytest.param(0, id="without effect"), pytest.param(1, id="after its effect")]


@nccl_only
@pytest.mark.parametrize("after", EFFECTS)
@pytest.mark.parametrize("world, bad_rank", [(2, 0), pytest.param(3, 1, marks=pytest.mark.long), (3, 2)])
def test_every_call_may_fail(world, bad_rank, after):
    """Fails when a failed call leaves a rank waiting, or unaware, or memory in use, or the group unable to go on."""
    found = run_ranks(world, faulty_steps, bad_rank, after, "exchange", timeout=250)
    assert len(set(found)) == 1
    n, failures = found[0]
    assert n > 14 and failures >= 20, found


@nccl_only
@pytest.mark.parametrize(
    "after", [EFFECTS[0], pytest.param(1, id="after its effect", marks=pytest.mark.long)]
)
def test_every_call_of_the_first_exchange_may_fail(after):
    """Fails when an error while the communicator is made leaves other ranks waiting for it."""
    n, failures = run_ranks(2, faulty_steps, 0, after, "connect", timeout=250)[0]
    assert n > 14 and failures >= 24, (n, failures)


def wrong_argument():
    world, rank = dist.get_world_size(), dist.get_rank()
    exchange()
    x = torch.ones(1, 1, 4, 3 if rank == 1 else 4)
    args = (3, 4 * world, [3, 1, 1, 1, 1, 0], False, False, 0.0, rank, world, dist.group.WORLD.group_name)
    torch.ops.haloconv.halo_exchange(x, *args)


def test_one_rank_is_refused():
    """Fails when ranks wait for one that never sent."""
    messages = raises_on_every_rank(3, wrong_argument, kinds=("RuntimeError",), usable=False)
    assert all("expected 4" in message for message in messages), messages
    assert sum("rank 1 reported" in message for message in messages) >= 1, messages


def fault_in_a_report():
    """All ranks are refused, and on rank 0 the n-th call to libtorch fails, for each n; some are of its report."""
    from haloconv import _C

    world, rank = dist.get_world_size(), dist.get_rank()
    args = (3, 4 * world, [3, 1, 1, 1, 1, 0], False, False, 0.0, rank, world, dist.group.WORLD.group_name)
    faults = 0
    for n in range(1, 25):
        if rank == 0:
            _C.fault_arm(n)
        try:
            torch.ops.haloconv.halo_exchange(torch.ones(1, 1, 4, 3), *args)
        except RuntimeError as error:
            faults += "fault" in str(error)
        else:
            raise AssertionError("a shard of another size was taken")
        finally:
            _C.fault_arm(0)
        dist.barrier()
        exchange()  # the group goes on
    return faults


def test_a_report_that_fails_is_tried_again():
    """Fails when a rank whose report failed stays in an epoch that the others have left."""
    faults = run_ranks(2, fault_in_a_report)
    assert 3 < faults[0] < 20 and faults[1] == 0  # others were those of the report


def other_size():
    world, rank = dist.get_world_size(), dist.get_rank()
    exchange()
    x = torch.ones(1, 1, 4 + rank, 4)
    args = (3, 4 * world, [3, 1, 1, 1, 1, 0], False, False, 0.0, rank, world, dist.group.WORLD.group_name)
    torch.ops.haloconv.halo_exchange(x, *args)


@nccl_only
def test_nccls_own_errors():
    """Fails when nobody looks for the errors that NCCL finds while it runs."""
    messages = raises_on_every_rank(2, other_size, kinds=("RuntimeError",), usable=False)
    assert any("(halo_exchange) of rank" in m and "sent message" in m and "bytes" in m for m in messages), (
        messages
    )


def late(seconds, connect):
    """Rank 1 stays away for longer than the limit."""
    from haloconv import _nccl

    _nccl._timeout = 2.0
    group = dist.new_group(list(range(dist.get_world_size())))
    if not connect:
        exchange(group)
    if dist.get_rank() == 1:
        time.sleep(seconds)
    started = time.monotonic()
    try:
        exchange(group)
    except RuntimeError as error:
        text = str(error)
    else:
        text = ""
    took = time.monotonic() - started
    _nccl._timeout = None
    return text, took


@nccl_only
@pytest.mark.parametrize("connect", [False, True], ids=["exchange", "connect"])
def test_timeout(connect):
    """Fails when a rank waits for longer than it was told to for a peer, or does not say for what."""
    first, second = run_ranks(2, late, 4.0, connect)
    text, took = first
    if connect:
        assert "did not come to set up NCCL within 2 s" in text, text
    else:
        for part in (
            "exchange 2 (halo_exchange) of rank 0 with ranks [1]",
            "64 bytes",
            "after 2 s",
            "P2P_DISABLE=1",
        ):
            assert part in text, text
        assert "of group" in text and "last error" in text, text
    assert 1.5 < took < 20, took
    assert second[0] != "" or connect  # the late one learns of it


def one_is_impatient():
    """Rank 1 stays away; rank 2 gives up first, and rank 0 has to follow."""
    from haloconv import _nccl

    rank = dist.get_rank()
    _nccl._timeout = 2.0 if rank == 2 else 60.0
    group = dist.new_group([0, 1, 2])
    exchange(group, width=2, kernel=7, pad=(3, 3))
    if rank == 1:
        time.sleep(6)
    started = time.monotonic()
    try:
        exchange(group, width=2, kernel=7, pad=(3, 3))
    except RuntimeError as error:
        text = str(error)
    else:
        text = ""
    _nccl._timeout = None
    return text, time.monotonic() - started


@nccl_only
def test_a_timeout_reaches_all_ranks():
    """Fails when an exchange that a rank has given up counts as one that it has had."""
    for text, took in run_ranks(3, one_is_impatient):
        assert "exchange 2" in text and "after 2 s" in text, text
        assert took < 20, took


def unable(mode):
    from haloconv import _nccl

    _nccl._mode = mode
    before = _nccl.why_not
    if dist.get_rank() == 1:
        _nccl.why_not = lambda group: "its library is missing"
    group = dist.new_group(list(range(dist.get_world_size())))
    try:
        exchange(group)
        exchange(group)
    except RuntimeError as error:
        return str(error)
    finally:
        _nccl._mode, _nccl.why_not = "nccl", before
    return ""


@nccl_only
def test_ranks_agree():
    """Fails when one rank uses NCCL and another does not."""
    assert run_ranks(3, unable, "auto") == ["", "", ""]
    for text in run_ranks(3, unable, "nccl"):
        assert "HALOCONV_TRANSPORT is 'nccl' and rank 1 cannot: its library is missing" in text


# ------------------------------------------------------------------------------------------------ leaks, the end


def leak(count):
    library = fake()

    def settled():
        dist.barrier()
        time.sleep(0.3)  # the watch has been there
        gc.collect()
        return heap_bytes()

    for _ in range(200):
        exchange()
    before = settled()
    for number in range(count):
        exchange()
        if number % 200 == 0:
            dist.barrier()
    return settled() - before, library.fake_events(), library.fake_buffers()


def test_no_leak():
    """Fails when an exchange leaves memory, events or references behind."""
    for left, events, buffers in run_ranks(2, leak, 3000, timeout=200):
        assert left < 100_000 or sanitized(), left  # a reference of each exchange alone would be more
        assert buffers == 0 and (C10D or 0 < events < 3000), (events, buffers)


SCRIPT = """
    import ctypes, os, sys
    import torch, torch.distributed as dist
    import haloconv
    from haloconv import _C, _nccl
    sys.path.insert(0, {tests!r})
    from test_transport_nccl import exchange, fake

    rank = int(sys.argv[1])
    library = fake()
    for round in range(2):  # the second time a group of the same name
        dist.init_process_group("gloo", init_method="file://{store}" + str(round), rank=rank, world_size=2)
        exchange()
        assert library.fake_comms() == 1
        exchange()
        if round == 0:
            kept = dist.group.WORLD if {keep} else None
            dist.destroy_process_group()
            for _ in range(100):
                if library.fake_comms() == 0:
                    break
                import time; time.sleep(0.05)
            assert library.fake_comms() == 0, "the communicator has outlived its group"
    if {fail}:
        try:
            exchange(channels=1 + rank)
            exchange()
        except RuntimeError as error:
            print("error:", error)
    import atexit
    atexit.unregister(_nccl._end_all)
    _nccl._end_all()
    assert library.fake_comms() == 0 and library.fake_events() == 0 and library.fake_buffers() == 0
    print("ended in order")
"""


@nccl_only
@pytest.mark.parametrize(
    "fail, keep",
    [
        pytest.param(False, False, id="well", marks=pytest.mark.long),
        pytest.param(False, True, id="well, the group kept", marks=pytest.mark.long),
        pytest.param(True, False, id="after an error", marks=pytest.mark.long),
        pytest.param(True, True, id="after an error, the group kept"),
    ],
)
def test_the_end(tmp_path, fail, keep):
    """Fails when a communicator outlives its process group, or the process cannot end, also after an error."""
    here = os.path.dirname(os.path.abspath(__file__))
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT.format(tests=here, store=tmp_path / "store", fail=fail, keep=keep))
    )
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "ended in order" in text, text
        assert not fail or "error:" in text, text


def dies():
    exchange()
    if dist.get_rank() == 1:
        os._exit(3)
    exchange()


@nccl_only
def test_a_dead_peer(monkeypatch):
    """Fails when a rank waits for one that has died for longer than the limit."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, dies, timeout=60)
    assert "exit code 3" in str(caught.value)
