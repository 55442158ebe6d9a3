"""Wide panoramas with handwritten digits: the data of the training example.

Everything in a picture is real and ships with scikit-learn, so the example needs no download:

- the digits are the 1,797 scanned ones of `load_digits` (8x8, sixteen grey levels), enlarged about four
  times, turned a little and written in light ink;
- the paper is a strip of one of the two photographs of `load_sample_images` (`china.jpg`, `flower.jpg`),
  cut anywhere, mirrored at random and dimmed.

The task is to find and name each digit along the width. The width is divided into cells of `CELL` pixels; a
cell's class is that of the digit that covers the cell's middle column, or `BACKGROUND`:

        photograph       .---.        .---.
        ......... 3 .....| 7 |........| 1 |....      digit = (class, centre, extent)
                         '---'        '---'
        cells  |bg|3 |3 |bg|7 |7 |bg|bg|1 |bg|

A seam is a column where the width is divided between two ranks. A digit that straddles one is the
interesting case: neither rank holds enough of it to read it. `seam_columns` says where the seams are, and a
chosen share of panoramas gets a digit centred within `SEAM_JITTER` pixels of every seam, so that each rank
holds about half of it.

Two invariants matter to the comparison of a split and an unsplit run. A batch is a pure function of `(seed,
split, index)`: no generator is carried from one batch to the next, so every rank, and every later run, sees
the same pixels. And training and held-out digits are disjoint scans (a stratified split), so held-out
accuracy cannot come from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images
from sklearn.model_selection import train_test_split

CLASSES = 10
BACKGROUND = CLASSES
CELL = 16
SEAM_JITTER = 3
SIZE_RANGE = (26.0, 32.0)
MAX_TURN = 0.1
DIM = 0.45
# Clear columns between the frames of two digits, fewest and most.
GAP_RANGE = (2, 14)
# Any fixed numbers do; the two splits just must not share one.
SPLIT_KEYS = {"train": 1, "held_out": 2}
IMAGE_MEAN, IMAGE_STD = 0.3, 0.25


@dataclass(frozen=True)
class Batch:
    """`images` (batch, 3, height, width) float32; `cells` (batch, width / CELL) int64 classes.

    The last four have one entry per digit: the panorama it is in, the cell that contains its centre, its
    class, and whether a seam runs through it.
    """

    images: torch.Tensor
    cells: torch.Tensor
    panorama: torch.Tensor
    cell: torch.Tensor
    digit: torch.Tensor
    on_seam: torch.Tensor


def seam_columns(width: int, ranks: int) -> list[int]:
    """The columns at which `width` is divided over `ranks` (torch.chunk's rule); none for one rank."""
    share = -(-width // ranks)
    return list(range(share, width, share))


class Panoramas:
    """Batches of one split, addressed by index.

    `seams` are columns (see `seam_columns`); `seam_share` is the share of panoramas that get a digit on
    every seam.
    """

    def __init__(
        self, split: str, *, height: int, width: int, seams: list[int], seam_share: float, seed: int
    ):
        if split not in SPLIT_KEYS:
            raise ValueError(f"split must be one of {sorted(SPLIT_KEYS)}, not {split!r}")
        if height < SIZE_RANGE[1]:
            raise ValueError(
                f"height must be at least {SIZE_RANGE[1]:.0f}, so that a digit fits, not {height}"
            )
        if width % CELL:
            raise ValueError(f"width must be a multiple of the cell, {CELL}, not {width}")
        self.height, self.width = height, width
        self.seams, self.seam_share, self.seed = list(seams), seam_share, seed
        self.key = SPLIT_KEYS[split]

        scans, classes = load_digits(return_X_y=True)
        parts = train_test_split(scans, classes, test_size=0.25, random_state=0, stratify=classes)
        scans, classes = (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])
        self.scans = torch.from_numpy(scans.reshape(-1, 1, 8, 8) / 16.0).float()
        self.classes = classes
        self.photographs = [self._as_paper(photograph) for photograph in load_sample_images().images]

    def _as_paper(self, photograph: np.ndarray) -> np.ndarray:
        """(3, height, width) in 0..DIM, mirrored to the right as often as the panorama's width needs."""
        paper = np.ascontiguousarray(photograph.transpose(2, 0, 1), dtype=np.float32) * (DIM / 255.0)
        pieces = [paper]
        while sum(piece.shape[2] for piece in pieces) < self.width:
            pieces.append(pieces[-1][:, :, ::-1])
        return np.concatenate(pieces, axis=2)

    def batch(self, index: int, size: int) -> Batch:
        """The `index`-th batch of `size` panoramas: always the same for the same arguments."""
        rng = np.random.default_rng((self.seed, self.key, index))
        centres, owners = [], []
        for panorama in range(size):
            placed = self._place(rng)
            centres += placed
            owners += [panorama] * len(placed)
        centre, owner = np.array(centres), np.array(owners)
        chosen = rng.integers(len(self.classes), size=len(centre))
        extent = rng.uniform(*SIZE_RANGE, size=len(centre))

        ink = self._write(rng, chosen, extent)
        images = self._paper(rng, size)
        colours = rng.uniform(0.85, 1.0, size=(len(centre), 3, 1, 1)).astype(np.float32)
        frame = ink.shape[-1]
        for mark, colour, at, where in zip(ink, colours, centre - frame // 2, owner, strict=True):
            window = images[where, :, :, at : at + frame]
            window += mark * (colour - window)
        images -= IMAGE_MEAN
        images /= IMAGE_STD

        cells = np.full((size, self.width // CELL), BACKGROUND, dtype=np.int64)
        middles = np.arange(self.width // CELL) * CELL + CELL // 2
        covered = np.abs(middles[None, :] - centre[:, None]) * 2 < extent[:, None]
        of_digit, column = np.nonzero(covered)
        cells[owner[of_digit], column] = self.classes[chosen[of_digit]]

        seams = np.array(self.seams, dtype=np.float64).reshape(1, -1)
        on_seam = (np.abs(seams - centre[:, None]) * 2 < extent[:, None]).any(axis=1)
        return Batch(
            images=torch.from_numpy(images),
            cells=torch.from_numpy(cells),
            panorama=torch.from_numpy(owner),
            cell=torch.from_numpy(centre // CELL),
            digit=torch.from_numpy(self.classes[chosen]).long(),
            on_seam=torch.from_numpy(on_seam),
        )

    def _place(self, rng: np.random.Generator) -> list[int]:
        """Centres of one panorama's digits: the seams first, then each free stretch is filled left to
        right."""
        frame = int(SIZE_RANGE[1])
        fixed = []
        if rng.random() < self.seam_share:
            fixed = [seam + int(rng.integers(-SEAM_JITTER, SEAM_JITTER + 1)) for seam in self.seams]
            # Ranks may hold less than two digits' width; then only every so many seams can carry one.
            fixed = [c for i, c in enumerate(fixed) if i == 0 or c - fixed[i - 1] >= frame]
        centres = []
        begin = 0
        for stop in [*fixed, None]:
            end = self.width if stop is None else stop - frame // 2
            at = begin + int(rng.integers(*GAP_RANGE))
            while at + frame <= end:
                centres.append(at + frame // 2)
                at += frame + int(rng.integers(*GAP_RANGE))
            if stop is not None:
                centres.append(stop)
                begin = stop + frame // 2
        return centres

    def _write(self, rng: np.random.Generator, chosen: np.ndarray, extent: np.ndarray) -> np.ndarray:
        """(digits, 1, height, frame): how much ink each pixel of a digit's frame gets, 0..1."""
        frame, count = int(SIZE_RANGE[1]), len(chosen)
        turn = rng.uniform(-MAX_TURN, MAX_TURN, size=count)
        slack = (self.height - extent) / 2
        drop = rng.uniform(-slack, slack)
        cos, sin = np.cos(turn), np.sin(turn)
        # From the frame's coordinates (-1..1 over its width and height) to the scan's.
        across, along = frame / extent, self.height / extent
        shift = 2 * drop / extent
        theta = np.stack(
            [
                np.stack([cos * across, sin * along, -sin * shift], axis=1),
                np.stack([-sin * across, cos * along, -cos * shift], axis=1),
            ],
            axis=1,
        )
        grid = F.affine_grid(
            torch.from_numpy(theta).float(), [count, 1, self.height, frame], align_corners=False
        )
        return F.grid_sample(self.scans[chosen], grid, padding_mode="zeros", align_corners=False).numpy()

    def _paper(self, rng: np.random.Generator, size: int) -> np.ndarray:
        strips = np.empty((size, 3, self.height, self.width), dtype=np.float32)
        for strip in strips:
            photograph = self.photographs[int(rng.integers(len(self.photographs)))]
            top = int(rng.integers(photograph.shape[1] - self.height + 1))
            left = int(rng.integers(photograph.shape[2] - self.width + 1))
            cut = photograph[:, top : top + self.height, left : left + self.width]
            strip[:] = cut[:, :, ::-1] if rng.random() < 0.5 else cut
        return strips
