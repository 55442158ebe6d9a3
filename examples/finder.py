"""The network of the training example, its loss and its score.

The network is one of timm's ConvNeXts with timm's own code. Asked for no global pooling (`global_pool=""`)
its head becomes dense: layer norm and a 1x1 convolution, evaluated at every position of the last map. That
map has a stride of 32 pixels, the task's cells are `CELL` = 16 wide, so the head is asked for `32 / CELL`
answers at once and `cell_logits` lays them out side by side:

    images (B, 3, H, W) -> network -> (B, 2 * 11, H/32, W/32) -> cell_logits -> (B, 11, W/16)

The network's output is a few kilobytes. It is gathered, and everything from `cell_logits` on is plain torch
on plain tensors, the same on every rank. What is sharded is what is large: every activation of the network.

Layer scale is switched off (`ls_init_value=None`): with timm's 1e-6 the residual branches need thousands of
steps to wake up, and this run has a few hundred.
"""

from __future__ import annotations

from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F
from panoramas import BACKGROUND, CELL, CLASSES, Batch
from torch import nn

# Pixels per position of the last map: the same for every ConvNeXt.
STRIDE = 32


def build_model(name: str, *, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A ConvNeXt with a dense head. Weights are drawn in float32, so that float64 starts from the same
    ones."""
    torch.manual_seed(seed)
    answers = (CLASSES + 1) * (STRIDE // CELL)
    model = timm.create_model(name, pretrained=False, num_classes=answers, global_pool="", ls_init_value=None)
    found = model.feature_info[-1]["reduction"]
    if found != STRIDE:
        raise ValueError(f"the model must have a stride of {STRIDE}, but {name} has {found}")
    return model.to(device=device, dtype=dtype)


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, weight decay on matrices and kernels only. Fused: one call updates all parameters, DTensors
    too."""
    kernels = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def cell_logits(output: torch.Tensor) -> torch.Tensor:
    """(B, answers * classes, h, w), the network's output, to (B, classes, w * answers)."""
    batch, channels, _, columns = output.shape
    answers = channels // (CLASSES + 1)
    pooled = output.mean(dim=2).view(batch, CLASSES + 1, answers, columns)
    return pooled.transpose(2, 3).reshape(batch, CLASSES + 1, columns * answers)


def cell_loss(logits: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Cross entropy, averaged over all cells of all panoramas."""
    return F.cross_entropy(logits, cells)


@dataclass
class Score:
    """What was found, counted over batches. A digit is found if the cell with its centre names it."""

    seam_digits: int = 0
    seam_found: int = 0
    rest_digits: int = 0
    rest_found: int = 0
    background_cells: int = 0
    background_found: int = 0

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        named = logits.argmax(dim=1).cpu()
        found = named[batch.panorama, batch.cell] == batch.digit
        background = batch.cells == BACKGROUND
        self.seam_digits += int(batch.on_seam.sum())
        self.seam_found += int((found & batch.on_seam).sum())
        self.rest_digits += int((~batch.on_seam).sum())
        self.rest_found += int((found & ~batch.on_seam).sum())
        self.background_cells += int(background.sum())
        self.background_found += int((named == BACKGROUND)[background].sum())

    @property
    def seam(self) -> float:
        """The share of digits on a seam that was found; nan without a seam."""
        return self.seam_found / self.seam_digits if self.seam_digits else float("nan")

    @property
    def rest(self) -> float:
        return self.rest_found / self.rest_digits if self.rest_digits else float("nan")

    @property
    def all(self) -> float:
        digits = self.seam_digits + self.rest_digits
        return (self.seam_found + self.rest_found) / digits if digits else float("nan")

    @property
    def background(self) -> float:
        """The share of background cells in which no digit was named."""
        return self.background_found / self.background_cells if self.background_cells else float("nan")
