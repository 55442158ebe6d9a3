"""The two paths of the sharded convolution: they give the same, send the same, and the fast one is really taken.

Which path a rank takes is switched by `_C.convolution_path` here; HALOCONV_CONV_PATH does it for a whole run of the
suite.
"""

import gc
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from convcase import ROUTES, check, grid, group_extent, window, world_of
from harness import assert_close, run_ranks, switched
from test_ops_memory import faults, heap_bytes, sanitized

pytestmark = pytest.mark.core

PATHS = ("fast", "general", "auto")


def path(name):
    return switched("convolution_path", name)


def counted(call):
    """(result, what the calls of `call` added to the counts of paths, what they sent)."""
    import haloconv
    from haloconv import _C

    before = _C.path_counts()
    haloconv.reset_comm_stats()
    result = call()
    stats = haloconv.comm_stats()["by_op"]
    sent = {op: {k: v for k, v in numbers.items() if k != "seconds"} for op, numbers in stats.items()}
    return result, {k: v - before[k] for k, v in _C.path_counts().items()}, sent


# ------------------------------------------------------------------------------------------------ equality


def check_paths(case, mixed=False):
    """The case on each path, and (mixed) with other paths on other ranks. Returns {path: counts}."""
    found, messages = {}, []
    rank = dist.get_rank()
    for name in (*PATHS, "mixed") if mixed else PATHS:
        with path(PATHS[rank % 2] if name == "mixed" else name):
            done, counts, sent = counted(lambda: check(case))
        if done is None:
            return None
        found[name] = counts
        messages.append(sent)
    assert all(sent == messages[0] for sent in messages), f"what is sent depends on the path: {messages}"
    return found


def fast_ranks(case):
    """{rank of the sharded dim: (forward, strips, backward, strips)} that a case with one sharded dim takes when it
    takes the fast path wherever it can; a second account of the rule, from the public plan."""
    import haloconv

    (dim,) = case.shards
    w = window(case, dim - 2)
    world = group_extent(case, 0)
    reach = w.dilation * (w.kernel - 1)
    plan = haloconv.plan(w.size, world, w.kernel, w.stride, w.pad, w.dilation)
    # per rank: the outputs whose windows reach over its inputs, also those that the padding cuts off, and their owners
    touching = [[] for _ in range(world)]
    readers = [set() for _ in range(world)]
    for o in range(-reach, plan.out_size + reach):
        start = o * w.stride - w.pad[0]
        for owner, rank in enumerate(plan.ranks):
            if start < rank.owned_in[1] and start + reach >= rank.owned_in[0]:
                touching[owner].append(o)
                readers[owner].update(
                    r for r, other in enumerate(plan.ranks) if other.owned_out[0] <= o < other.owned_out[1]
                )
    moves_back = any(readers[r] - {r} for r in range(world))
    moves_forth = any(rank.sends for rank in plan.ranks)
    expected = {}
    for r, rank in enumerate(plan.ranks):
        (a, b), (o0, o1) = rank.owned_in, rank.owned_out
        if a == b or o0 == o1:
            expected[r] = (False,) * 4
            continue
        left, right = (
            a - (o0 * w.stride - w.pad[0]),
            (o1 - 1) * w.stride - w.pad[0] + reach + 1 - b,
        )
        fits = 0 <= left <= reach and 0 <= left - right < w.stride
        forward = fits and (moves_forth or left != 0 or right != 0)
        backward = fits and (moves_back or touching[r] != list(range(o0, o1)) or right < 0)
        strips = (a > 0 and left > 0) or (b < w.size and right > 0)
        expected[r] = (forward, forward and strips, backward, backward and bool(readers[r] - {r}))
    return expected


def took(counts):
    return tuple(
        counts[key] > 0 for key in ("forward_fast", "forward_strips", "backward_fast", "backward_strips")
    )


WINDOWS = [  # kernel, stride, padding, dilation
    (3, 1, 1, 1),
    (5, 1, 2, 1),
    (7, 1, 3, 1),
    (3, 1, 2, 2),
    (5, 1, 6, 3),
    (3, 2, 1, 1),
    (7, 2, 3, 1),
    (4, 2, 1, 1),
    (5, 3, 2, 1),
    (1, 2, 0, 1),
    (2, 1, 0, 1),
    (2, 2, 0, 1),
    (4, 1, 2, 1),
    (3, 1, 0, 1),
    (6, 1, 2, 1),
]


def grid_cases():
    cases = []
    for index, (k, s, p, d) in enumerate(WINDOWS):
        for world, size in ((2, 16), (2, 21), (3, 24), (3, 36), (4, 32), (4, 25), (2, 40)):
            kind = (index + size) % 4
            more = [
                dict(),
                dict(channels=(4, 4), groups=4, channels_last=True, batch=2),
                dict(channels=(4, 6), groups=2, bias=False),
                dict(batch=3, channels_last=True),
            ][kind]
            if kind == 0 or (k, s) == (7, 1):
                cases.append(grid((size,), k, p, s, d, (world,), **more))
            else:
                cases.append(grid((max(5, d * (k - 1)), size), k, p, s, d, (world,), **more))
            cases[-1] = replace(cases[-1], route=ROUTES[(index + size) % 3], seed=len(cases))
    for k, s, p, d in WINDOWS[:8:3]:
        cases.append(grid((14, 4), k, p, s, d, (2,), (2,), route="layer"))
        cases.append(grid((3, 16, 3), k, (k // 2, p, k // 2), (1, s, 1), (1, d, 1), (2,), (3,)))
    return cases


@pytest.mark.many
@pytest.mark.parametrize("case", grid_cases(), ids=str)
def test_paths_agree_and_the_fast_one_is_taken(case):
    """Fails when the fast path's values are wrong, when it is not taken where it is right, or when what is sent
    depends on it. Each path is compared with the unsplit convolution at 1e-9."""
    expected = fast_ranks(case)
    for rank, found in enumerate(run_ranks(world_of(case), check_paths, case, True)):
        assert took(found["fast"]) == expected[rank], (
            f"rank {rank}: {found['fast']}, expected {expected[rank]}"
        )
        assert not any(took(found["general"]))
        assert all(a <= b for a, b in zip(took(found["auto"]), expected[rank]))


def random_case(seed):
    """A random window on shards that are wide enough, mostly, for the fast path."""
    rng = random.Random(seed)
    mesh = rng.choice([(2,), (3,), (4,), (2, 2), (2, 2)])
    k = rng.choice([1, 2, 3, 3, 4, 5, 7])
    s, d = rng.choice([(1, 1), (1, 1), (1, 2), (2, 1), (2, 1), (3, 1), (2, 3)])
    reach = d * (k - 1)
    p = rng.choice([reach // 2, reach // 2, 0, rng.randint(0, reach)])
    sizes = [mesh[i] * s * rng.randint(1, 6) + reach + rng.choice([0, 0, 1, 2]) for i in range(len(mesh))]
    if len(mesh) == 1:
        sizes = [reach + 2, *sizes] if rng.random() < 0.7 else sizes
    groups, per_in, per_out = rng.choice([(1, 2, 3), (4, 1, 1), (2, 2, 1), (3, 1, 2)])
    return grid(
        tuple(sizes),
        k,
        p,
        s,
        d,
        mesh,
        batch=rng.choice([1, 2]),
        channels=(groups * per_in, groups * per_out),
        groups=groups,
        bias=rng.random() < 0.5,
        channels_last=len(sizes) > 1 and rng.random() < 0.4,
        route=rng.choice(ROUTES),
        seed=seed,
    )


@pytest.mark.many
@pytest.mark.parametrize("case", [random_case(seed) for seed in range(80)], ids=str)
def test_random_windows(case):
    """A random convolution on each path, and with the paths mixed."""
    run_ranks(world_of(case), check_paths, case, True)


MESHES = [
    grid((12, 16), 3, 1, 1, 1, (2, 2)),
    grid((12, 16), 3, 1, 1, 1, (2, 2), (3, 2), channels=(4, 4), groups=4, channels_last=True),
    grid((12, 16), 3, 1, 2, 1, (2, 2), batch=2),
    grid((13, 24), 5, 2, 1, 1, (2, 2), channels_last=True),
    grid((12, 16), 3, 1, 1, 1, (2, 2), (0, 3), batch=3),
    grid((4, 8, 8), 3, 1, 1, 1, (2, 2), (2, 4)),
    grid((3, 24), (1, 3), (0, 1), 1, 1, (1, 3)),
]


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_meshes_with_several_dims(case):
    """Fails when corners are wrong, or when a second sharded dim keeps the last one from the fast path."""
    for rank, found in enumerate(run_ranks(world_of(case), check_paths, case, True)):
        assert took(found["fast"])[::2] == (True, True), f"rank {rank}: {found}"
        assert took(found["auto"])[0], f"rank {rank}: {found}"


# ------------------------------------------------------------------------------------------------ the ops
# themselves


def op_arguments(world, size, *, kernel=3, stride=1, groups=1, periodic=0):
    group = dist.group.WORLD.group_name
    pad = kernel // 2
    return (
        [stride] * 2,
        [pad] * 4,
        [1, 1],
        False,
        [0, 0],
        groups,
        [0, periodic],
        [3],
        [size],
        [dist.get_rank()],
        [world],
        group,
    )


def outputs(x, weight, bias, grad, args, needs):
    out = torch.ops.haloconv.convolution(x, weight, bias, *args)
    return out, *torch.ops.haloconv.convolution_backward(grad, x, weight, *args, *needs)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}


def formats_and_masks(dtype, form, stride, groups, periodic):
    """Strides, dtypes and what is left out are the same on both paths, on this rank."""
    world, width = dist.get_world_size(), 8
    args = op_arguments(world, world * width, stride=stride, groups=groups, periodic=periodic)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def random(*shape):
        tensor = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        if form == "channels_last":
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        elif form == "neither":
            tensor = tensor.transpose(2, 3).contiguous().transpose(2, 3)
        return tensor

    x, weight = random(2, 4, 6, width), random(4, 4 // groups, 3, 3)
    bias = random(1, 4, 1, 1).reshape(4)
    grad = random(2, 4, 6 // stride, width // stride)
    for grad_output in (grad, grad[:1, :1, :1, :1].expand(grad.shape)):
        for needs in [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]:
            results = {}
            for name in ("fast", "general"):
                with path(name):
                    results[name] = outputs(x, weight, [bias], grad_output, args, needs)
            for what, fast, general in zip(("output", "input", "weight", "bias"), *results.values()):
                assert fast.stride() == general.stride(), (what, fast.stride(), general.stride())
                assert_close(
                    fast, general, f"{what} {needs}", rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
                )
    return True


@pytest.mark.many
@pytest.mark.parametrize("periodic", [0, 1], ids=["zeros", "circular"])
@pytest.mark.parametrize("stride, groups", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "neither"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_formats_and_masks(dtype, form, stride, groups, periodic):
    """Fails when the fast path changes strides or dtypes, or computes with what was masked out."""
    run_ranks(3, formats_and_masks, dtype, form, stride, groups, periodic)


def thin(width, kernel, channels=2):
    world = dist.get_world_size()
    args = op_arguments(world, world * width, kernel=kernel)
    x = torch.ones(1, channels, kernel, width)
    weight = torch.ones(channels, channels, kernel, kernel)
    with path("auto"):
        return counted(lambda: outputs(x, weight, [], torch.ones_like(x), args, (True, True, False)))[1]


def test_thin_shards_are_copied():
    """Fails when strips are computed where they are most of the work, or not where they are little of it."""
    for width, kernel, fast in [(3, 3, False), (6, 3, True), (17, 7, False), (18, 7, True), (40, 7, True)]:
        middle = run_ranks(3, thin, width, kernel)[1]
        assert took(middle) == (fast,) * 4, (width, kernel, middle)


def test_small_shards_under_a_large_weight_are_copied():
    """Fails when a second pass over the weight is made to save the copy of a shard that is nothing beside it."""
    for channels, fast in [(4, True), (5, False)]:  # weight: 9 * channels**2 of at most 2 * 18 * channels
        middle = run_ranks(3, thin, 6, 3, channels)[1]
        assert took(middle) == (fast,) * 4, (channels, middle)


@pytest.mark.skipif(
    sanitized(), reason="a process of its own would need the sanitizer preloaded before all else"
)
def test_switch(monkeypatch):
    """Fails when the environment's switch is not read, or takes any word."""
    import subprocess
    import sys

    code = "import torch; from haloconv import _C; print(_C.convolution_path())"
    for value in ("fast", "general"):
        monkeypatch.setenv("HALOCONV_CONV_PATH", value)
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == value
    monkeypatch.setenv("HALOCONV_CONV_PATH", "quick")
    done = subprocess.run([sys.executable, "-c", code], text=True, stderr=subprocess.PIPE)
    assert done.returncode != 0 and "HALOCONV_CONV_PATH is 'quick', expected" in done.stderr


# ------------------------------------------------------------------------------------------------ failures


def needs_faults():
    from haloconv import _C

    if not hasattr(_C, "fault_arm"):
        pytest.skip("built without HALOCONV_FAULTS=1")


def faults_on_fast_path(which):
    key = "backward_fast" if which == "convolution_backward" else "forward_strips"
    with path("fast"):
        return faults(which, lambda op, args: counted(lambda: op(*args))[1][key] > 0, most=2)


@pytest.mark.parametrize("which", ["convolution", "convolution_backward"])
def test_every_libtorch_call_may_fail_alone(which):
    """Fails when an error path of the fast path crashes or leaks, be it one handle; on a group of one."""
    needs_faults()
    assert len(run_ranks(1, faults_on_fast_path, which, timeout=250)[0]) == 2


LEFT = 4 * 6000  # bytes, over 4 failures


def faults_between_ranks(which):
    """On every rank the 1st, 2nd, ... call fails, until the op gets through. After each the group goes on.

    Every tensor here is of 8 kilobytes or more: one that is left over shows, beside the 890 bytes that gloo keeps for
    every report that nobody receives."""
    from haloconv import _C

    world, width = dist.get_world_size(), 6
    args = op_arguments(world, world * width)
    x, weight = torch.ones(1, 16, 64, width), torch.ones(16, 16, 3, 3)
    backward = which == "convolution_backward"

    def call():
        if backward:
            return torch.ops.haloconv.convolution_backward(x, x, weight, *args, True, True, True)
        return torch.ops.haloconv.convolution(x, weight, [], *args)

    def failed(n):
        """Whether the op failed on the ranks, on all or on none, when its n-th call failed."""
        error = None
        _C.fault_arm(n)
        try:
            call()
        except RuntimeError as caught:
            error = str(caught)
        finally:
            _C.fault_arm(0)
        errors = [None] * world
        dist.all_gather_object(errors, error)
        assert len({value is None for value in errors}) == 1, f"call {n} failed on some ranks: {errors}"
        assert error is None or "fault" in error or "reported" in error, error
        if error is not None:
            call()  # the group goes on
        return error is not None

    def left(n):
        gc.collect()
        before = heap_bytes()
        for _ in range(4):
            failed(n)
        gc.collect()
        return heap_bytes() - before

    gc.collect()
    gc.freeze()  # what is alive is looked at once; each collection below is then a short one
    with path("fast"):
        _, counts, _ = counted(call)
        assert counts["backward_strips" if backward else "forward_strips"] == 1, counts
        n = 1
        while failed(n):
            grown = left(n)
            others = [None] * world
            dist.all_gather_object(others, grown)
            if max(others) >= LEFT:  # gloo's own tables grow by jumps; a leak shows every time
                grown = min(grown, left(n), left(n))
            assert grown < LEFT or sanitized(), f"call {n}: {grown}"
            n += 1
    gc.unfreeze()
    assert n > 20, n
    return n


@pytest.mark.parametrize("which", ["convolution", "convolution_backward"])
def test_every_libtorch_call_may_fail(which):
    """Fails when an error on the fast path leaves other ranks waiting, leaks a tensor, or spoils what follows."""
    needs_faults()
    run_ranks(2, faults_between_ranks, which, timeout=250)
