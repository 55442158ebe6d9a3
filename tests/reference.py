"""What the plan must say, in plain Python, from the definition of the operations and not from the plan's
formulas.

A window operation of one dimension is a set of triples (output index, tap, input index). Everything here is
enumerated: slow, and hard to get wrong.
"""

import random
from typing import NamedTuple


class Window(NamedTuple):
    """One dimension of a convolution (or of a transposed one)."""

    size: int
    kernel: int
    stride: int = 1
    pad: tuple = (0, 0)
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0
    periodic: bool = False

    def plan_args(self, world):
        return (self.size, world, self.kernel, self.stride, self.pad, self.dilation), {
            "transposed": self.transposed,
            "output_padding": self.output_padding,
            "periodic": self.periodic,
        }


def shards(size, world):
    """[(begin, end)] by torch.chunk's rule: pieces of one length, the last shorter, then empty ones."""
    pieces, left, begin = [], size, 0
    length = 0
    while length * world < size:
        length += 1
    for _ in range(world):
        take = min(length, left)
        pieces.append((begin, begin + take))
        begin += take
        left -= take
    return pieces


def out_size(w):
    """Counts the outputs: forward, window positions that fit into the padded input; transposed, torch's
    documented formula as the extent of everything that is touched, less padding, plus output padding."""
    if not w.transposed:
        padded = w.size + w.pad[0] + w.pad[1]
        count = 0
        while count * w.stride + (w.kernel - 1) * w.dilation < padded:
            count += 1
        return count
    last = max((i * w.stride + j * w.dilation for i in range(w.size) for j in range(w.kernel)), default=-1)
    return last + 1 - w.pad[0] - w.pad[1] + w.output_padding


def taps(w):
    """All (output, tap, input) with an input that exists. Forward and periodic: the input index is taken
    modulo the size."""
    n, triples = out_size(w), []
    if w.transposed:
        for i in range(w.size):
            for j in range(w.kernel):
                o = i * w.stride + j * w.dilation - w.pad[0]
                if 0 <= o < n:
                    triples.append((o, j, i))
        return triples
    for o in range(n):
        for j in range(w.kernel):
            i = o * w.stride + j * w.dilation - w.pad[0]
            if w.periodic:
                triples.append((o, j, i % w.size))
            elif 0 <= i < w.size:
                triples.append((o, j, i))
    return triples


class RankReference(NamedTuple):
    owned_in: tuple
    owned_out: tuple
    needed: tuple  # (begin, end), clipped to the input unless periodic; (0, 0) when there is nothing
    pad_left: int
    pad_right: int


def rank_references(w, world):
    """What each rank owns, and the smallest interval that holds all it reads."""
    n = out_size(w)
    found = []
    for mine, out in zip(shards(w.size, world), shards(n, world), strict=True):
        if w.transposed:
            touching = [
                i
                for i in range(w.size)
                if any(out[0] <= i * w.stride + j * w.dilation - w.pad[0] < out[1] for j in range(w.kernel))
            ]
            needed = (min(touching), max(touching) + 1) if touching else (0, 0)
            found.append(RankReference(mine, out, needed, 0, 0))
            continue
        reads = [o * w.stride + j * w.dilation - w.pad[0] for o in range(*out) for j in range(w.kernel)]
        if not reads:
            found.append(RankReference(mine, out, (0, 0), 0, 0))
            continue
        span = range(min(reads), max(reads) + 1)
        if w.periodic:
            found.append(RankReference(mine, out, (span.start, span.stop), 0, 0))
            continue
        inside = [i for i in span if 0 <= i < w.size]
        needed = (inside[0], inside[-1] + 1) if inside else (0, 0)
        found.append(
            RankReference(mine, out, needed, sum(i < 0 for i in span), sum(i >= w.size for i in span))
        )
    return found


def census(w, world):
    """Which of the three awkward things happen in this dimension on this many ranks."""
    ranks = rank_references(w, world)
    n = out_size(w)
    marks = set()
    if any(b == e for b, e in shards(w.size, world) + shards(n, world)):
        marks.add("empty shard")
    for r, rank in enumerate(ranks):
        want = {i % w.size for i in range(*rank.needed)} if w.size else set()
        own = set(range(*rank.owned_in))
        if want and own and not want & own:
            marks.add("misses own shard")
        for neighbour in (r - 1, r + 1):
            if 0 <= neighbour < world:
                b, e = ranks[neighbour].owned_in
                beyond = [i for i in want - own if (i >= e if neighbour > r else i < b)]
                if want & own and beyond:
                    marks.add("halo wider than a neighbour")
    return marks


def random_window(
    rng, *, transposed=None, biggest=14, torch_padding=False, periodic=False, want=None, world=None
):
    """A random window with at least one output; `want` names a census mark it must have on `world` ranks."""
    for _ in range(4000):
        is_transposed = rng.random() < 0.3 if transposed is None else transposed
        kernel = rng.choice([1, 2, 2, 3, 3, 3, 4, 5, 5, 7])
        stride = rng.choice([1, 1, 1, 2, 2, 3, 4])
        dilation = rng.choice([1, 1, 1, 2, 2, 3])
        most = (kernel - 1) * dilation + rng.choice([0, 0, 0, 2])
        low = rng.randint(0, most)
        high = low if torch_padding else rng.randint(0, most)
        if not torch_padding and rng.random() < 0.2:
            low, high = rng.randint(-3, most), rng.randint(-3, most)
        w = Window(
            rng.randint(1, biggest),
            kernel,
            stride,
            (low, high),
            dilation,
            is_transposed,
            rng.randint(0, max(stride, dilation) - 1) if is_transposed else 0,
            periodic,
        )
        if out_size(w) < 1:
            continue
        if periodic and (min(w.pad) < 0):
            continue
        if want and want not in census(w, world):
            continue
        return w
    raise AssertionError(f"no window found that has {want!r} on {world} ranks")


if __name__ == "__main__":
    generator = random.Random(0)
    for _ in range(10):
        example = random_window(generator)
        print(example, rank_references(example, 3))
