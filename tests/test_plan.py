"""The propagation rule against brute force: who owns what, who reads what, who sends what to whom, and the
adjoint.

Nothing here needs tensors or processes: `haloconv.plan` is integers in, integers out. The expected values are
enumerated in reference.py from the definition of a convolution.
"""

import os
import random

import haloconv
import pytest
import reference
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import Window

pytestmark = [pytest.mark.core, pytest.mark.own]

# Twice (forward and transposed), so more than 10,000 windows; `make fuzz` asks for more, the sanitizer's run
# for fewer.
EXAMPLES = 10 * int(os.environ.get("HALOCONV_FUZZ_CASES", "550"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate] if "HALOCONV_MUTATION" in os.environ else list(Phase),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def plan_of(w, world):
    args, options = w.plan_args(world)
    return haloconv.plan(*args, **options)


@st.composite
def windows(draw, transposed=False, periodic=False, biggest=40):
    """(window, world size): sizes from 1, so that with up to 16 ranks many shards are empty; any padding,
    also negative."""
    size = draw(st.integers(1, biggest))
    kernel = draw(st.integers(1, 9))
    stride = draw(st.integers(1, 6))
    dilation = draw(st.integers(1, 4))
    span = dilation * (kernel - 1)
    low = 0 if periodic else -4
    pad = (draw(st.integers(low, span + 3)), draw(st.integers(low, span + 3)))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1)) if transposed else 0
    w = Window(size, kernel, stride, pad, dilation, transposed, output_padding, periodic)
    from hypothesis import assume

    assume(reference.out_size(w) >= 1)
    return w, draw(st.integers(1, 16))


def indices(segments):
    return [i for _, b, e in segments for i in range(b, e)]


def check_against_brute_force(w, world):
    got = plan_of(w, world)
    assert got.out_size == reference.out_size(w)
    assert len(got.ranks) == world
    want = reference.rank_references(w, world)
    for r, (mine, ref) in enumerate(zip(got.ranks, want, strict=True)):
        where = f"rank {r} of {world}, {w}: {mine}"
        assert tuple(mine.owned_in) == ref.owned_in, where
        assert tuple(mine.owned_out) == ref.owned_out, where
        if ref.needed[0] == ref.needed[1]:
            assert mine.needed[0] == mine.needed[1], where
        else:
            assert tuple(mine.needed) == ref.needed, where
        if ref.owned_out[0] == ref.owned_out[1] and not w.transposed:
            assert tuple(mine.needed) == (0, 0), where
        assert (mine.pad_left, mine.pad_right) == (ref.pad_left, ref.pad_right), where

        # what the rank gets is exactly what it reads and doesn't own
        reads = {i % w.size for i in range(*mine.needed)}
        own = set(range(*mine.owned_in))
        received = indices(mine.recvs)
        assert set(received) == reads - own, where
        if not w.periodic:  # a wrapped interval may hold an index more than once
            assert len(received) == len(set(received)), f"received twice: {where}"
        for q, b, e in mine.recvs:
            assert q != r and b < e, where
            assert got.ranks[q].owned_in[0] <= b and e <= got.ranks[q].owned_in[1], (
                f"from a rank that lacks it: {where}"
            )
        for q, b, e in mine.sends:
            assert q != r and b < e, where
            assert mine.owned_in[0] <= b and e <= mine.owned_in[1], f"sends what it lacks: {where}"
            assert set(range(b, e)) <= {i % w.size for i in range(*got.ranks[q].needed)}, (
                f"sends what nobody reads: {where}"
            )
    for p in range(world):
        for q in range(world):
            sent = [(b, e) for peer, b, e in got.ranks[p].sends if peer == q]
            taken = [(b, e) for peer, b, e in got.ranks[q].recvs if peer == p]
            assert sent == taken, f"{p} sends {sent} to {q}, which expects {taken}: {w}"
    return got


@SETTINGS
@given(windows())
def test_forward_equals_brute_force(case):
    """Fails when a rank reads, sends or receives anything else than the definition of a convolution says."""
    check_against_brute_force(*case)


@SETTINGS
@given(windows(transposed=True))
def test_transposed_equals_brute_force(case):
    """Fails when the inputs that touch a rank's outputs (also the question of every backward) are found
    wrongly."""
    check_against_brute_force(*case)


@settings(SETTINGS, max_examples=EXAMPLES // 3)
@given(windows(periodic=True, biggest=20))
def test_periodic_equals_brute_force(case):
    """Fails when circular padding doesn't wrap, or when two ranks' two messages are mixed up."""
    check_against_brute_force(*case)


def test_every_small_window():
    """The exhaustive corner: every window with size <= 6, kernel <= 3, stride <= 3, padding -1..2, dilation
    <= 2, 1..4 ranks."""
    count = 0
    for size in range(1, 7):
        for kernel in (1, 2, 3):
            for stride in (1, 2, 3):
                for low in (-1, 0, 1, 2):
                    for high in (-1, 0, 1, 2):
                        for dilation in (1, 2):
                            for transposed in (False, True):
                                w = Window(size, kernel, stride, (low, high), dilation, transposed)
                                if reference.out_size(w) < 1:
                                    continue
                                for world in (1, 2, 3, 4):
                                    check_against_brute_force(w, world)
                                    count += 1
    assert count > 10000


# ------------------------------------------------------------------------------------------------ adjointness


def exchange(plan, values, size):
    """Every rank's readable inputs after the exchange that the plan's segments describe: [{index: value}]."""
    held = [{i: values[i] for i in range(*rank.owned_in)} for rank in plan.ranks]
    extended = [dict() for _ in plan.ranks]
    for r, rank in enumerate(plan.ranks):
        reads = {i % size for i in range(*rank.needed)}
        extended[r].update({i: v for i, v in held[r].items() if i in reads})
    for p, rank in enumerate(plan.ranks):
        for q, b, e in rank.sends:
            assert (p, b, e) in [tuple(s) for s in plan.ranks[q].recvs]
            for i in range(b, e):
                extended[q][i] = held[p][i]
    return extended


def exchange_adjoint(plan, contributions, size):
    """The reverse: each rank's contributions to the inputs it read go back to their owners and are added
    there."""
    total = [0] * size
    for r, rank in enumerate(plan.ranks):
        for i in range(*rank.owned_in):
            total[i] += contributions[r].pop(i, 0)
    for r, rank in enumerate(plan.ranks):
        for q, b, e in rank.recvs:
            for i in range(b, e):
                assert plan.ranks[q].owned_in[0] <= i < plan.ranks[q].owned_in[1]
                total[i] += contributions[r].pop(i, 0)
        assert not contributions[r], f"rank {r} has contributions that no message carries: {contributions[r]}"
    return total


def forward(w, plan, x, weight):
    """A x: each rank computes its own outputs from its own exchange."""
    y = [0] * plan.out_size
    for rank, local in zip(plan.ranks, exchange(plan, x, w.size), strict=True):
        for o in range(*rank.owned_out):
            for j in range(w.kernel):
                if w.transposed:
                    i, rest = divmod(o + w.pad[0] - j * w.dilation, w.stride)
                    if rest == 0 and 0 <= i < w.size:
                        y[o] += weight[j] * local[i]
                    continue
                i = o * w.stride + j * w.dilation - w.pad[0]
                if w.periodic:
                    y[o] += weight[j] * local[i % w.size]
                elif 0 <= i < w.size:
                    y[o] += weight[j] * local[i]
    return y


def backward_by_contributions(w, plan, y, weight):
    """Aᵀ y, each rank scattering its own outputs' gradients into what it read."""
    contributions = [dict() for _ in plan.ranks]
    for r, rank in enumerate(plan.ranks):
        for o, j, i in reference.taps(w):
            if rank.owned_out[0] <= o < rank.owned_out[1]:
                contributions[r][i] = contributions[r].get(i, 0) + weight[j] * y[o]
    return exchange_adjoint(plan, contributions, w.size)


def adjoint_window(w, n):
    """The window that maps the output gradient to the input gradient, as the library has to plan its
    backward."""
    span = w.dilation * (w.kernel - 1) + 1
    if w.transposed:
        return Window(n, w.kernel, w.stride, w.pad, w.dilation), w.size
    extra = w.size - ((n - 1) * w.stride - w.pad[0] - w.pad[1] + span)
    return Window(n, w.kernel, w.stride, w.pad, w.dilation, True, extra), w.size


@settings(SETTINGS, max_examples=EXAMPLES // 2)
@given(
    st.one_of(windows(), windows(transposed=True), windows(periodic=True, biggest=16)), st.integers(0, 2**32)
)
def test_exchange_is_adjoint_to_its_reverse_exactly(case, seed):
    """<A x, y> = <x, Aᵀ y> in integers, A and Aᵀ both built from the plan's messages. Fails when a gradient
    is lost, doubled or sent to the wrong owner."""
    w, world = case
    rng = random.Random(seed)
    plan = plan_of(w, world)
    x = [rng.randint(-99, 99) for _ in range(w.size)]
    y = [rng.randint(-99, 99) for _ in range(plan.out_size)]
    weight = [rng.randint(-99, 99) for _ in range(w.kernel)]
    ax = forward(w, plan, x, weight)
    want = [0] * plan.out_size
    for o, j, i in reference.taps(w):
        want[o] += weight[j] * x[i]
    assert ax == want
    aty = backward_by_contributions(w, plan, y, weight)
    assert sum(a * b for a, b in zip(ax, y, strict=True)) == sum(a * b for a, b in zip(x, aty, strict=True))


@settings(SETTINGS, max_examples=EXAMPLES // 2)
@given(st.one_of(windows(), windows(transposed=True)), st.integers(0, 2**32))
def test_backward_by_the_output_gradients_halo_is_the_adjoint_exactly(case, seed):
    """<A x, y> = <x, Aᵀ y> where Aᵀ is planned as its own window over the output gradient, as backward does.
    Fails when the input gradient's plan isn't the adjoint of the forward's (columns that nobody reads, output
    padding, uneven shards)."""
    w, world = case
    rng = random.Random(seed)
    plan = plan_of(w, world)
    back, size = adjoint_window(w, plan.out_size)
    backplan = plan_of(back, world)
    # A transposed convolution's output padding shows as outputs that nothing has touched: the forward window
    # reads past them
    assert backplan.out_size == size or (w.transposed and backplan.out_size >= size)
    if backplan.out_size != size:
        return
    assert [tuple(r.owned_out) for r in backplan.ranks] == [tuple(r.owned_in) for r in plan.ranks]
    x = [rng.randint(-99, 99) for _ in range(w.size)]
    y = [rng.randint(-99, 99) for _ in range(plan.out_size)]
    weight = [rng.randint(-99, 99) for _ in range(w.kernel)]
    ax = forward(w, plan, x, weight)
    aty = forward(back, backplan, y, weight)
    assert sum(a * b for a, b in zip(ax, y, strict=True)) == sum(a * b for a, b in zip(x, aty, strict=True))


# ------------------------------------------------------------------------------------------------ single
# facts


def test_shards_are_torch_chunks():
    """Fails when the library and DTensor disagree about which rank holds what."""
    for size in [*range(41), 63, 64, 65, 99, 100, 1000, 1023]:
        for world in range(1, 17):
            chunks = [] if size == 0 else list(torch.arange(size).chunk(world))
            want = [(int(c[0]), int(c[-1]) + 1) for c in chunks] + [(size, size)] * (world - len(chunks))
            assert reference.shards(size, world) == want
            if size:
                assert [tuple(r.owned_in) for r in haloconv.plan(size, world, 1).ranks] == want
                assert [tuple(r.owned_out) for r in haloconv.plan(size, world, 1).ranks] == want


def test_world_of_one_sends_nothing():
    """Fails when one process would talk to itself."""
    for w in (
        Window(7, 3, 1, (1, 1)),
        Window(7, 3, 2, (1, 1), 1, True, 1),
        Window(7, 3, 1, (1, 1), periodic=True),
    ):
        (rank,) = plan_of(w, 1).ranks
        assert list(rank.sends) == [] and list(rank.recvs) == []


def test_no_halo_no_messages():
    """Fails when a patch embedding or 1x1 convolution on even shards communicates for nothing."""
    for size, world, kernel in [(32, 4, 4), (64, 2, 2), (16, 16, 1), (12, 3, 4)]:
        for rank in haloconv.plan(size, world, kernel, stride=kernel).ranks:
            assert list(rank.sends) == [] and list(rank.recvs) == []


def test_padding_may_be_an_int_or_a_pair():
    """Fails when the two spellings of one padding give two plans."""
    assert haloconv.plan(10, 3, 5, padding=2) == haloconv.plan(10, 3, 5, padding=(2, 2))
    assert haloconv.plan(10, 3, 5, padding=(2, 0)).out_size == 8
    assert haloconv.plan(10, 3, 3, padding=(-1, 1)).out_size == 8
    assert haloconv.plan(10, 3, 3, padding=-1).out_size == 6


def test_periodic_with_two_ranks_has_one_peer():
    """Fails when the left and the right halo, which come from one peer, are swapped or sent as if from
    two."""
    plan = haloconv.plan(8, 2, 3, padding=1, periodic=True)
    assert tuple(plan.ranks[0].needed) == (-1, 5) and tuple(plan.ranks[1].needed) == (3, 9)
    assert {q for q, _, _ in plan.ranks[0].recvs} == {1}
    assert sorted(indices(plan.ranks[0].recvs)) == [4, 7]
    assert sorted(indices(plan.ranks[1].recvs)) == [0, 3]


def test_large_numbers():
    """Fails when the plan's integers are 32 bits wide or its time grows with the size."""
    size = 2**30
    plan = haloconv.plan(size, 4, 7, padding=3)
    assert plan.out_size == size
    assert tuple(plan.ranks[1].needed) == (size // 4 - 3, size // 2 + 3)
    plan = haloconv.plan(size, 4, 4, 4, transposed=True)
    assert plan.out_size == 4 * size
    assert tuple(plan.ranks[3].needed) == (3 * size // 4, size)
    back = haloconv.plan(size, 4, 2**20, 2**20)
    assert back.out_size == 2**10 and tuple(back.ranks[1].needed) == (2**28, 2**29)


def test_numbers_that_overflow_are_refused():
    """Fails when a product beyond 64 bits wraps round silently."""
    for args in [(2**62, 2, 3, 1, 2**62), (2**62, 2, 2**40, 2**40), (2**62, 2, 2**62, 1, 0, 2**62)]:
        with pytest.raises((ValueError, OverflowError)):
            haloconv.plan(*args)
        with pytest.raises((ValueError, OverflowError)):
            haloconv.plan(*args, transposed=True)
    with pytest.raises((ValueError, OverflowError)):
        haloconv.plan(2**70, 2, 3)


BAD = [
    ("size", -1, dict(size=-1)),
    ("world", 0, dict(world=0)),
    ("world", -2, dict(world=-2)),
    ("kernel", 0, dict(kernel=0)),
    ("kernel", -3, dict(kernel=-3)),
    ("stride", 0, dict(stride=0)),
    ("stride", -1, dict(stride=-1)),
    ("dilation", 0, dict(dilation=0)),
    ("dilation", -2, dict(dilation=-2)),
    ("output_padding", -1, dict(output_padding=-1, transposed=True)),
    ("output_padding", 5, dict(output_padding=5, transposed=True, stride=2)),
    ("output_padding", 1, dict(output_padding=1)),
]


@pytest.mark.parametrize("name, value, change", BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_bad_number_is_named(name, value, change):
    """Fails when an impossible window is planned, or refused without saying which argument and which
    value."""
    good = dict(size=10, world=2, kernel=3)
    with pytest.raises(ValueError, match=rf"(?s){name}.*{value}|{value}.*{name}"):
        haloconv.plan(**(good | change))


@pytest.mark.parametrize("name", ["size", "world", "kernel", "stride", "padding", "dilation"])
@pytest.mark.parametrize("value", ["3", 2.5, None, [1, 2, 3]], ids=repr)
def test_bad_type_is_named(name, value):
    """Fails when a float or a string is rounded or crashes deep inside."""
    good = dict(size=10, world=2, kernel=3)
    with pytest.raises((TypeError, ValueError), match=name):
        haloconv.plan(**(good | {name: value}))


def test_kernel_larger_than_the_padded_input():
    """Fails when a window that has no output gives a plan with a negative size."""
    with pytest.raises(ValueError, match=r"kernel|size"):
        haloconv.plan(3, 2, 5)
