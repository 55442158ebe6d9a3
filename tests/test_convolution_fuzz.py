"""Sharded convolutions against the unsplit one: every listed grid, and random windows on every kind of mesh.

Each test is one convolution in float64, forward and backward: output, input gradient, weight gradient and
bias gradient are equal to 1e-9 and placements are kept. A failure means that training with this window, on
this mesh, is wrong. The random ones are seeded and the same in every run; HALOCONV_FUZZ_CASES raises their
number.
"""

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
import reference
from convcase import ROUTES, Case, grid, marks, run, world_of

pytestmark = pytest.mark.core

RANDOM_CASES = int(os.environ.get("HALOCONV_FUZZ_CASES", "520"))
MARKS = ("halo wider than a neighbour", "empty shard", "misses own shard")

# ------------------------------------------------------------------------------------------------ listed
# grids


def listed():
    """The grids of CASES.md, each on the mesh it names and on 1-D meshes of 1 to 4 ranks, over every sharded
    dim."""
    # (sizes, kernel, padding, stride, dilation)
    two_d = [
        ((10, 10), 5, 2, 2, 1),
        ((5, 5), 3, 1, 2, 1),
        ((6, 10), 5, 2, 4, 1),
        ((10, 8), 5, 1, 1, 1),
        ((8, 8), 4, 1, 1, 1),
        ((10, 10), 5, 1, 1, 2),
        ((20, 20), 7, 3, 2, 1),
    ]
    cases = []
    for numbers in two_d:
        cases.append(grid(*numbers, (2, 2)))
        cases.append(grid(*numbers, (2, 2), (3, 2)))  # the mesh's dims the other way round
        for world in (1, 2, 3, 4):
            for dim in (2, 3):
                cases.append(grid(*numbers, (world,), (dim,)))
        cases.append(grid(*numbers, (4, 1)))
        cases.append(grid(*numbers, (1, 3)))
    three_d = ((5, 5, 6), 5, 2, (2, 2, 1), 1)
    cases += [grid(*three_d, (2, 2), shards) for shards in ((2, 3), (3, 4), (4, 2))]
    cases += [grid(*three_d, (2, 1, 2)), grid(*three_d, (1, 2, 2), (4, 3, 2))]
    cases += [grid(*three_d, (world,), (dim,)) for world in (1, 2, 3, 4) for dim in (2, 3, 4)]
    # 15, 63, 99 with k 1/3/5/7, s 1/2, p 0/1: in one spatial dim here, on a 2x2 mesh (smallest other side
    # that fits) below
    for size in (15, 63, 99):
        for k in (1, 3, 5, 7):
            for s in (1, 2):
                for p in (0, 1):
                    for world in (1, 2, 3, 4):
                        cases.append(grid((size,), k, p, s, 1, (world,)))
                    cases.append(grid((size, 15), k, p, s, 1, (2, 2)))
    # 4: stems and even kernels
    for k, s, p in [(3, 2, 1), (7, 2, 3), (3, 1, 0), (5, 1, 1), (4, 1, 1), (4, 1, 2)]:
        for world in (1, 2, 3, 4):
            for size in (16, 13):
                cases.append(grid((4, size), k, (max(p, k // 2), p), (1, s), 1, (world,)))
        cases.append(grid((12, 14), k, p, s, 1, (2, 2)))
    # 5: dilation; some inputs are read by nobody
    for k, s, p, d in [(3, 1, 0, 2), (3, 1, 1, 2), (3, 1, 2, 2), (2, 3, 0, 1), (2, 3, 1, 1), (1, 4, 0, 1)]:
        for world in (1, 2, 3, 4):
            cases.append(grid((11,), k, p, s, d, (world,)))
            cases.append(grid((13, 3), k, (p, 2), (s, 1), d, (world,), (2,)))
        cases.append(grid((12, 11), k, p, s, d, (2, 2)))
    # 11, 12: empty and one-column shards, kernels wider than the neighbour's shard
    for size, world, k, s, p in [
        (5, 4, 3, 1, 1),
        (9, 4, 3, 1, 1),
        (9, 4, 5, 1, 2),
        (10, 4, 5, 2, 2),
        (3, 4, 3, 1, 1),
        (1, 4, 3, 1, 1),
    ]:
        cases.append(grid((size,), k, p, s, 1, (world,)))
        cases.append(grid((3, size), k, (k // 2, p), (1, s), 1, (world,)))
    # 10 on two ranks (periodic padding itself: test_cases); 20: every number of dims, transposed ones
    for k, s, p, op in [(4, 2, 1, 0), (3, 2, 1, 1), (2, 2, 0, 0), (3, 1, 0, 0), (5, 3, 1, 2)]:
        for world in (1, 2, 3, 4):
            cases.append(grid((7,), k, p, s, 1, (world,), transposed=True, output_padding=op))
        cases.append(grid((5, 6), k, p, s, 1, (2, 2), transposed=True, output_padding=op))
        cases.append(grid((5, 6), k, p, s, 1, (3,), (2,), transposed=True, output_padding=op))
        cases.append(grid((3, 3, 4), k, p, s, 1, (2, 1, 2), transposed=True, output_padding=op))
        cases.append(grid((3, 3, 4), k, p, s, 1, (2,), (3,), transposed=True, output_padding=op))
    return [replace(case, route=ROUTES[i % 3], seed=i) for i, case in enumerate(cases)]


@pytest.mark.many
@pytest.mark.parametrize("case", listed(), ids=str)
def test_listed_grid(case):
    """A grid that systems like this one are known to get wrong."""
    run(case)


EIGHT = [
    grid((9,), 7, 3, 1, 1, (8,)),
    grid((3, 9), 7, 3, 1, 1, (8,)),
    grid((3, 20), 3, 1, 1, 1, (8,)),
    grid((20,), 3, 1, 2, 1, (8,)),
    grid((5, 5, 6), 5, 2, (2, 2, 1), 1, (2, 2, 2)),
    grid((5, 5, 6), 3, 1, 1, 1, (2, 2, 2), (4, 2, 3)),
    grid((4, 3, 3), 3, 1, 2, 1, (2, 2, 2), transposed=True, output_padding=1),
    grid((6, 7), 3, 1, 1, 1, (2, 2, 2), (0, 2, 3), batch=3),
    grid((50, 50, 50), (5, 4, 3), (1, 1, 2), (3, 1, 2), (3, 3, 1), (2, 2, 2), channels=(1, 1)),
]


@pytest.mark.many
@pytest.mark.parametrize("case", EIGHT, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_on_eight_ranks(case, route):
    """Kernels wider than several shards, and three sharded dims at once with the corners in."""
    run(replace(case, route=route), timeout=120)


def test_50_cubed_on_3x3x2():
    """The listed 3-D grid on its own mesh, 18 ranks: every kind of edge and corner at once."""
    import harness

    try:
        run(
            grid((50, 50, 50), (5, 4, 3), (1, 1, 2), (3, 1, 2), (3, 3, 1), (3, 3, 2), channels=(1, 1)),
            timeout=180,
        )
    finally:
        harness.discard(18)


SUBGROUPS = [
    # (mesh, which dim alone): [2, 3] and [1, 3] as submeshes of a 2-D mesh, whose groups work on different
    # data at the same time
    ([[0, 1], [2, 3]], "b"),
    ([[0, 2], [1, 3]], "b"),
    ([[0, 2], [1, 3]], "a"),
    # and as meshes of their own, the other ranks idle; also not next to each other
    ([2, 3], None),
    ([1, 3], None),
    ([0, 3], None),
    ([1, 2, 3], None),
]


@pytest.mark.many
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize("ranks, alone", SUBGROUPS, ids=str)
def test_subgroups(ranks, alone, transposed, route):
    """Fails when global ranks are used as peers, or when two groups' messages mix."""
    more = dict(transposed=True, output_padding=1) if transposed else {}
    run(grid((4, 9), 3, 1, 2, 1, ranks, (3,), submesh=alone, route=route, **more), world=4)
    run(
        grid((5, 4), 5, 2, 1, 1, ranks, (2,), submesh=alone, route=route, transposed=transposed, seed=1),
        world=4,
    )


@pytest.mark.parametrize("route", ["rules", "layer"])
@pytest.mark.parametrize(
    "shards", [(None, 3), (3, None), (0, 3), (3, 0), (2, None), (None, None), (0, None), (None, 0)], ids=str
)
def test_mesh_with_batch_or_replicate(shards, route):
    """Fails when a mesh dim that doesn't shard space changes the result, or when weight gradients are summed
    over the wrong ranks."""
    run(grid((6, 7), 3, 1, 1, 1, (2, 2), shards, batch=3, channels=(4, 6), groups=2, route=route))
    run(grid((6, 7), 4, 1, 2, 1, (2, 2), shards, batch=4, channels=(3, 3), groups=3, bias=False, route=route))


@pytest.mark.parametrize("shards", [(0, 3), (3, 0), (2, 3), (3, 2), (0, 2)], ids=str)
def test_parallelize_over_two_dims(shards):
    """Fails when parallelize over batch and width (or height and width) doesn't equal unsplit."""
    run(grid((6, 7), 3, 1, 1, 1, (2, 2), shards, batch=3, channels=(4, 6), groups=2, route="parallelize"))


# ------------------------------------------------------------------------------------------------ random ones

MESHES = {  # number of sharded dims -> meshes on at most 4 ranks
    1: [(1,), (2,), (3,), (3,), (4,), (4,), (4,), [2, 3], [1, 3], [0, 3]],
    2: [(2, 2), (2, 2), (1, 3), (4, 1), (2, 1), [[0, 2], [1, 3]]],
    3: [(2, 1, 2), (1, 2, 2), (2, 2, 1)],
}


def random_case(seed):
    rng = random.Random(seed)
    nd = rng.choice([1, 1, 2, 2, 2, 3])
    dims = min(rng.choice([1, 1, 1, 2, 2, 3]), nd)
    mesh = rng.choice(MESHES[dims])
    extents = list(mesh) if isinstance(mesh, tuple) else ([2, 2] if dims == 2 else [len(mesh)])
    shards = list(range(2, 2 + nd))
    rng.shuffle(shards)
    shards = shards[:dims]
    route = rng.choice(ROUTES)
    submesh = None
    if dims == 1 and nd >= 2 and rng.random() < 0.1:
        mesh, submesh, extents = [[0, 2], [1, 3]], rng.choice("ab"), [2]
    batch = rng.choice([1, 1, 2])
    if dims == 2 and rng.random() < 0.3:
        other = rng.randrange(2)
        shards[other] = 0 if route == "parallelize" else rng.choice([0, None])
        batch = rng.choice([1, 2, 3])
    transposed = rng.random() < 0.3
    want = rng.choice([*MARKS, *MARKS, *[None] * 8])
    biggest = {1: 14, 2: 10, 3: 6}[nd]
    windows = [None] * nd
    for position, dim in enumerate(shards):
        if dim is not None and dim >= 2:
            possible = (
                want
                if extents[position] >= {"misses own shard": 3, "halo wider than a neighbour": 3}.get(want, 2)
                else None
            )
            if possible == "empty shard" and extents[position] == 2:
                possible = None if rng.random() < 0.5 else possible
            windows[dim - 2] = reference.random_window(
                rng,
                transposed=transposed,
                biggest=biggest,
                torch_padding=True,
                want=possible,
                world=extents[position],
            )
    for axis in range(nd):
        if windows[axis] is None:
            windows[axis] = reference.random_window(rng, transposed=transposed, biggest=5, torch_padding=True)
    groups, per_in, per_out = rng.choice(
        [(1, 2, 3), (1, 1, 2), (2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 1, 1), (1, 3, 1)]
    )
    return Case(
        sizes=tuple(w.size for w in windows),
        kernel=tuple(w.kernel for w in windows),
        stride=tuple(w.stride for w in windows),
        padding=tuple(w.pad[0] for w in windows),
        dilation=tuple(w.dilation for w in windows),
        mesh=mesh,
        shards=tuple(shards),
        batch=batch,
        channels=(groups * per_in, groups * per_out),
        groups=groups,
        bias=rng.random() < 0.6,
        transposed=transposed,
        output_padding=tuple(w.output_padding for w in windows) if transposed else (),
        channels_last=nd > 1 and rng.random() < 0.3,
        route=route,
        submesh=submesh,
        seed=seed,
    )


RANDOM = [random_case(seed) for seed in range(RANDOM_CASES)]


@pytest.mark.many
@pytest.mark.parametrize("case", RANDOM, ids=lambda case: f"{case.seed}-{case}")
def test_random_window(case):
    """A random convolution on a random mesh by a random route."""
    run(case)


def test_census_of_the_random_windows(capsys):
    """Fails when the random windows above would no longer be awkward enough to mean anything."""
    counts = Counter(mark for case in RANDOM for mark in marks(case))
    kinds = Counter(
        kind
        for case in RANDOM
        for kind in [
            f"{len(case.sizes)}-D",
            f"{len(case.shards)}-D mesh",
            case.route,
            "transposed" if case.transposed else "forward",
            "depthwise" if case.groups == case.channels[0] > 1 else "groups" if case.groups > 1 else "dense",
            "channels_last" if case.channels_last else "contiguous",
            "bias" if case.bias else "no bias",
            "batch sharded" if 0 in case.shards else "space only",
            f"{world_of(case)} ranks",
        ]
    )
    with capsys.disabled():
        print(
            f"\ncensus of {len(RANDOM)} random windows: "
            + ", ".join(f"{m} {100 * counts[m] / len(RANDOM):.1f} %" for m in MARKS)
        )
        print("   " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
    assert len(RANDOM) >= 500 or "HALOCONV_FUZZ_CASES" in os.environ
    for mark in MARKS:
        assert counts[mark] >= 0.05 * len(RANDOM), (
            f"only {counts[mark]} of {len(RANDOM)} windows have {mark!r}"
        )
    assert min(kinds.values()) >= 0.02 * len(RANDOM), kinds
