"""scaling_model.py's predictions for machines that are not here: the published table, and 1 to 10,000 cards.

Every figure in `NODES` and below is an assumption, from data sheets and round numbers, and none is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness import GIB, PUBLISHED_SPEED
from memory_cases import Case
from scaling_count import count


@dataclass(frozen=True)
class Node:
    """Per card; nodes of eight."""

    flops: float  # dense, bfloat16, per second
    bandwidth: float  # of memory, bytes per second
    memory: float  # bytes
    link: float  # between cards of a node, bytes per second and direction
    network: float  # between nodes, bytes per second, card and direction


NODES = {
    "A100": Node(312e12, 2.0e12, 80 * GIB, 300e9, 25e9),
    "H100": Node(989e12, 3.35e12, 80 * GIB, 450e9, 50e9),
    "H200": Node(989e12, 4.8e12, 141 * GIB, 450e9, 50e9),
}
ATTAINED = 0.5  # of flops and of memory bandwidth
LAUNCH = 5e-6  # host seconds of an op: a step takes no less than its ops
EXCHANGE = 15e-6  # latency of a halo exchange inside a node
HOP = 5e-6  # of a collective, per doubling of its ranks
PER_NODE = 8
BATCH, IMAGE = 1024, (512, 2048)
SPATIAL = (1, 2, 4, 8)
CARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10000)
# (bytes per second of a link, of what is hidden behind backward) for the published table, which names no hardware
LINKS = {"NVLink": (300e9, True), "PCIe 4": (20e9, False)}


def roofline(work, node, itemsize=4):
    """Seconds of a step's ops: products at the card's rate, everything else (depthwise too) at its memory's. What is
    counted is float32, of 4 bytes."""
    depthwise = sum(v for name, v in work.flops_of.items() if name.startswith("depthwise"))
    # Windows of a depthwise convolution are read and written once, as the large ones of these networks are.
    columns = sum(2 * window.column_bytes * window.width for window in work.windows if window.kernel >= 7)
    moved = (work.bytes() + columns) * itemsize / 4
    return ((work.flops() - depthwise) / node.flops + moved / node.bandwidth) / ATTAINED


def all_reduce(nbytes, ranks, rate):
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * nbytes / rate + HOP * math.log2(ranks)


def published(bench, model):
    """The table's rows from its first: one rate of everything, so that the first row is right; the rest is counted."""
    rows = [{"width": w, "ranks": r, "ms": ms} for (w, r), ms in PUBLISHED_SPEED.items()]
    base = Case(model=model, input=(7, 3, 512, rows[0]["width"]), optimizer="sgd")
    first = count(base)
    rate = rows[0]["ms"] / 1e3 / roofline(first, NODES["A100"])
    for link, (bandwidth, hidden) in LINKS.items():
        for row in rows:
            width, ranks = row["width"], row["ranks"]
            whole = count(replace(base, input=(7, 3, 512, width)))
            strip = count(replace(base, input=(7, 3, 512, width // ranks)))
            compute = rate * roofline(strip, NODES["A100"])
            exchanges, _, sent = whole.exchanges(ranks)
            halo = exchanges * EXCHANGE + sent / bandwidth
            reduction = all_reduce(whole.parameter_bytes, ranks, bandwidth)
            exposed = max(0.0, reduction - 2 / 3 * compute) if hidden else reduction
            total = compute + halo + exposed
            bench.add(
                part="published", **base.as_row() | {"name": f"{width}/{ranks}, {link}", "ranks": ranks}
                | {"input": [7, 3, 512, width]}, measured="predicted", step_ms=1e3 * total, predicted=1e3 * total,
                actual=row["ms"], unit="ms",
                deviation=1e3 * total / row["ms"] - 1, compute_share=compute / total, exchange_share=halo / total,
                reduction_share=exposed / total, boundary=whole.boundary(ranks), published=row["ms"],
                note="calibrates" if row is rows[0] else None,
            )  # fmt: skip


def scale_out(bench, model, nodes):
    """Milliseconds of a step of BATCH images on so many cards, split 1, 2, 4 or 8 ways in space, the rest in data."""
    height, width = IMAGE
    image = Case(model=model, input=(1, 3, height, width), optimizer="adam")
    whole, fixed = count(image), count(replace(image, input=(1, 3, height, 0)))
    strips = {spatial: count(replace(image, input=(1, 3, height, width // spatial))) for spatial in SPATIAL}
    for name in nodes:
        for cards in CARDS:
            options = [_option(NODES[name], whole, fixed, strips, cards, spatial) for spatial in SPATIAL]
            options = [option for option in options if option is not None]
            fastest = min(options, key=lambda option: option["seconds"], default=None)
            for option in options:
                seconds = option.pop("seconds")
                bench.add(
                    part="scale", name=f"{name}, {cards} cards", node=name, cards=cards, model=model, dtype="bfloat16",
                    input=[BATCH, 3, height, width], optimizer="adam", unit="ms",
                    predicted=1e3 * seconds, step_ms=1e3 * seconds, measured="predicted", checkpointing="none",
                    note="fastest" if option is fastest else None, **option,
                )  # fmt: skip


def _option(node, whole, fixed, strips, cards, spatial):
    """None where it cannot be: cards that spatial does not divide, more groups than images (with the most cards to an
    image what is over is left idle), too little memory."""
    groups = cards // spatial
    if groups < 1 or cards % spatial or (groups > BATCH and spatial < max(SPATIAL)):
        return None
    groups = min(groups, BATCH)
    idle, cards = cards - groups * spatial, groups * spatial
    work = strips[spatial]
    images = math.ceil(BATCH / groups)
    kept = min(PER_NODE, cards)  # states are sharded over a node (HSDP): master, two moments, gradient
    held = 4 * work.parameter_bytes / kept + work.parameter_bytes / 2
    each = work.activation_bytes / 2  # counted in float32
    fit = int((0.9 * node.memory - held) // each)
    if fit < 1:
        return None
    at_once = min(fit, images)
    passes = math.ceil(images / at_once)
    once = roofline(
        fixed, node
    )  # what a step takes whatever the images: the optimizer, on the states that are kept
    compute = (
        images * (roofline(work, node, 2) - roofline(fixed, node, 2)) * (1 + whole.boundary(spatial) / 10)
    )
    compute += once / kept  # a tenth of the time, about, is of convolutions with a halo
    launch = passes * sum(work.calls.values()) * LAUNCH
    exchanges, _, sent = whole.exchanges(spatial)
    halo = passes * (exchanges * EXCHANGE + at_once * sent / 2 / node.link)
    gradients = all_reduce(work.parameter_bytes, min(PER_NODE, cards), node.link)
    if cards > PER_NODE:
        gradients += all_reduce(work.parameter_bytes / PER_NODE, cards / PER_NODE, node.network)
    busy = max(compute, launch)
    exposed = max(0.0, gradients - 2 / 3 * busy / passes)  # behind the last backward
    parts = {
        "compute": compute if compute >= launch else 0.0,
        "launches": launch if launch > compute else 0.0,
    }
    parts |= {"exchanges": halo, "gradients": exposed}
    total = busy + halo + exposed
    return {
        "seconds": total, "spatial": spatial, "data_parallel": groups, "ranks": cards, "idle_cards": idle,
        "bound": max(parts, key=parts.get), "peak_gib": (held + at_once * each) / GIB,
        "compute_share": busy / total, "exchange_share": halo / total, "reduction_share": exposed / total,
    }  # fmt: skip
