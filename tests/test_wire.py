"""What travels: for random plans, each rank's messages are those that the others expect, in one process on integers.

A message is what one rank has for another in one exchange: the pieces of its plan that name that rank, in their order,
one after the other (csrc/halo.c). So sender and receiver must list the same pieces in the same order, and a rank's
pieces for one peer must lie together, for each run of them is a message.
"""

import itertools
import os
import random
from collections import Counter

import pytest

PLANS = int(os.environ.get("HALOCONV_WIRE_PLANS", "10000"))
PARTS = 8
WORLDS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 12, 16, 31, 64)


def random_plan(rng):
    """Numbers for _C.plan that it accepts, with what it returns."""
    from haloconv import _C

    while True:
        world = rng.choice(WORLDS)
        size = rng.choice([rng.randint(1, 4 * world), rng.randint(1, world), rng.randint(1, 300)])
        kernel, stride, dilation = (
            rng.choice([1, 2, 3, 3, 4, 5, 7, 11]),
            rng.choice([1, 1, 2, 3, 4]),
            rng.randint(1, 3),
        )
        pads = rng.randint(0, 2 * kernel), rng.randint(0, 2 * kernel)
        transposed, periodic = rng.random() < 0.3, rng.random() < 0.25
        output_padding = rng.randint(0, max(stride, dilation) - 1) if transposed else 0
        numbers = (size, world, kernel, stride, *pads, dilation, output_padding, transposed, periodic)
        try:
            return numbers, _C.plan(*numbers)
        except ValueError:  # a window larger than the tensor, and the like
            continue


def messages(pieces):
    """{peer: its pieces}; a peer whose pieces do not lie together would get two messages."""
    runs = [
        (peer, [piece[1:] for piece in run]) for peer, run in itertools.groupby(pieces, key=lambda p: p[0])
    ]
    found = dict(runs)
    assert len(found) == len(runs), pieces
    return found


def check(numbers, ranks):
    """Compares both sides of a plan. Returns what it was like."""
    world, size = numbers[1], numbers[0]
    part = -(-size // world)
    sent, expected = {}, {}
    for rank, (owned, _, _, _, _, sends, recvs) in enumerate(ranks):
        for peer, pieces in messages(sends).items():
            assert peer != rank and 0 <= peer < world, (numbers, rank, sends)
            assert all(owned[0] <= begin < end <= owned[1] for begin, end in pieces), (numbers, rank, sends)
            sent[rank, peer] = pieces
        for peer, pieces in messages(recvs).items():
            assert peer != rank, (numbers, rank, recvs)
            expected[peer, rank] = pieces
    assert sent == expected, (
        numbers,
        {k: (sent.get(k), expected.get(k)) for k in sent.keys() ^ expected.keys()},
    )
    marks = {f"world {world}" if world in (2, 64) else "", "periodic" if numbers[9] else ""}
    marks.add("transposed" if numbers[8] else "")
    marks.add("empty shards" if part * (world - 1) >= size and world > 1 else "")
    marks.add("several pieces in a message" if any(len(pieces) > 1 for pieces in sent.values()) else "")
    marks.add("beyond the neighbours" if any(abs(a - b) not in (1, world - 1) for a, b in sent) else "")
    marks.add("nothing sent" if not sent else "")
    return marks - {""}


@pytest.mark.parametrize("part", range(PARTS))
def test_messages_sent_are_messages_expected(part):
    """Fails when a rank waits for a message that nobody sends, or one is sent that nobody waits for."""
    rng = random.Random(part)
    seen = Counter()
    for _ in range(PLANS // PARTS):
        numbers, (_, ranks) = random_plan(rng)
        seen.update(check(numbers, ranks))
    for mark in ("world 2", "world 64", "periodic", "transposed", "empty shards", "several pieces in a message",
                 "beyond the neighbours"):  # fmt: skip
        assert seen[mark] >= 0.02 * PLANS / PARTS, (mark, seen)


def test_a_lost_message_is_noticed():
    """Fails when the comparison above has no teeth."""
    rng = random.Random(99)
    noticed = tried = 0
    while tried < 200:
        numbers, (_, ranks) = random_plan(rng)
        senders = [rank for rank, plan in enumerate(ranks) if plan[5]]
        if senders:
            tried += 1
            rng.choice([ranks[rank][5] for rank in senders]).pop()
            try:
                check(numbers, ranks)
            except AssertionError:
                noticed += 1
    assert noticed == tried
