"""The example's data and score: what `examples/train_convnext.py` compares is only as good as these.

The example's promises (same loss split and unsplit, digits on the seam found as well as others) mean
something only if every rank sees the same pixels, if held-out digits were never trained on, and if a digit
on the seam really is divided between two ranks. The training itself is run by `make demo`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

finder = pytest.importorskip("finder", reason="the example needs timm")
panoramas = pytest.importorskip("panoramas", reason="the example needs scikit-learn")


def make(split="train", ranks=2, width=512, height=32, seam_share=1.0, seed=0):
    seams = panoramas.seam_columns(width, ranks)
    return panoramas.Panoramas(
        split, height=height, width=width, seams=seams, seam_share=seam_share, seed=seed
    )


def test_batch_depends_on_its_arguments_alone():
    """A failure means that two ranks, or two runs, train on different pixels."""
    first, second = make(), make()
    second.batch(5, 3)
    second.batch(0, 8)
    a, b = first.batch(1, 4), second.batch(1, 4)
    for name in ("images", "cells", "panorama", "cell", "digit", "on_seam"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_batches_differ_by_index_seed_and_split():
    """A failure means that training repeats itself, or that a seed has no effect."""
    one = make().batch(0, 2).images
    assert not torch.equal(one, make().batch(1, 2).images)
    assert not torch.equal(one, make(seed=1).batch(0, 2).images)
    assert not torch.equal(one, make("held_out").batch(0, 2).images)


def test_held_out_digits_are_not_trained_on():
    """A failure means that held-out accuracy can be memory. (No two of the 1,797 scans are equal.)"""
    train = {scan.numpy().tobytes() for scan in make().scans}
    held_out = {scan.numpy().tobytes() for scan in make("held_out").scans}
    assert len(train) + len(held_out) == 1797
    assert not train & held_out
    assert set(make("held_out").classes) == set(range(panoramas.CLASSES))


@pytest.mark.parametrize(("width", "ranks"), [(512, 1), (512, 2), (512, 3), (480, 4), (96, 4), (1024, 2)])
def test_digits_do_not_overlap_and_cells_name_them(width, ranks):
    """A failure means wrong labels: a digit's centre must lie in a cell of its own class."""
    batch = make(width=width, ranks=ranks, height=64).batch(0, 16)
    assert batch.images.shape == (16, 3, 64, width)
    assert batch.cells.shape == (16, width // panoramas.CELL)
    assert torch.equal(batch.cells[batch.panorama, batch.cell], batch.digit)
    assert (batch.cells == panoramas.BACKGROUND).any()
    for panorama in range(16):
        cells = batch.cell[batch.panorama == panorama].tolist()
        assert cells == sorted(set(cells))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_seam_has_its_digit(ranks):
    """A failure means that the seam's accuracy is that of digits which one rank holds nearly whole."""
    data = make(ranks=ranks)
    rng = np.random.default_rng(0)
    for _ in range(50):
        centres = data._place(rng)
        for seam in data.seams:
            assert min(abs(centre - seam) for centre in centres) <= panoramas.SEAM_JITTER
    batch = data.batch(0, 32)
    assert int(batch.on_seam.sum()) == 32 * (ranks - 1)
    assert not make(ranks=1).batch(0, 8).on_seam.any()


def test_seam_columns_follow_the_shards():
    """A failure means that the digits sit where no seam is, for widths that do not divide evenly."""
    assert panoramas.seam_columns(512, 1) == []
    assert panoramas.seam_columns(512, 2) == [256]
    for width, ranks in ((512, 3), (10, 4), (9, 4), (7, 5)):
        ends = np.cumsum([len(part) for part in torch.arange(width).chunk(ranks)])
        assert panoramas.seam_columns(width, ranks) == ends[:-1].tolist()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="split must be one of"):
        make("validation")
    with pytest.raises(ValueError, match="height must be at least 32"):
        make(height=16)
    with pytest.raises(ValueError, match="multiple of the cell"):
        make(width=500)


def test_cell_logits_keep_left_to_right():
    """A failure means that the head's answers are laid out in another order than the cells."""
    answers, columns = finder.STRIDE // panoramas.CELL, 3
    classes = panoramas.CLASSES + 1
    output = torch.arange(classes * answers).float().view(1, -1, 1, 1).expand(-1, -1, 2, columns).clone()
    output += 1000.0 * torch.arange(columns)
    logits = finder.cell_logits(output)
    assert logits.shape == (1, classes, columns * answers)
    for column in range(columns):
        for answer in range(answers):
            expected = torch.arange(classes) * answers + answer + 1000.0 * column
            assert torch.equal(logits[0, :, column * answers + answer], expected)


def test_score_counts_seam_and_rest_apart():
    """A failure means that the closing table's accuracies are not what they say."""
    batch = make("held_out").batch(0, 4)
    perfect = torch.nn.functional.one_hot(batch.cells, panoramas.CLASSES + 1).transpose(1, 2).float()
    score = finder.Score()
    score.add(perfect, batch)
    assert (score.all, score.seam, score.rest, score.background) == (1.0, 1.0, 1.0, 1.0)
    blind = perfect.clone()
    middle = 256 // panoramas.CELL
    blind[:, :, middle - 1 : middle + 1] = 0
    blind[:, panoramas.BACKGROUND, middle - 1 : middle + 1] = 1
    score = finder.Score()
    score.add(blind, batch)
    assert score.seam == 0.0
    assert score.rest == 1.0
