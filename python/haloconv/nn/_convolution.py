"""Conv1d/2d/3d and ConvTranspose1d/2d/3d for DTensors."""

import functools

import torch
import torch.nn.functional as F

from .. import _autograd
from .._check import on_rank
from .._convolution import Window, pairs
from .._dtensor import DTensor
from .._rules import layer_rules


@functools.lru_cache(maxsize=1024)
def _window_of(stride, last_first, dilation, output_padding, groups, circular):
    padding = tuple(side for at in range(len(last_first) - 2, -1, -2) for side in last_first[at : at + 2])
    periodic = tuple(circular and any(padding[at : at + 2]) for at in range(0, len(padding), 2))
    return Window(tuple(stride), padding, tuple(dilation), False, tuple(output_padding), groups, periodic)


class _ShardedConvolution:
    """What the six classes share; comes before torch's class in the bases."""

    def forward(self, input, *args, **kwargs):
        if not isinstance(input, DTensor):
            return super().forward(input, *args, **kwargs)
        n = len(self.kernel_size)
        if input.dim() == n + 1:  # without a batch dim
            return self.forward(input.unsqueeze(0), *args, **kwargs).squeeze(0)
        if input.dim() != n + 2:
            raise ValueError(
                f"input has {input.dim()} dims, expected {n + 1} or {n + 2} for {type(self).__name__}{on_rank()}"
            )
        input, window = self._window(input, *args, **kwargs)
        return _autograd.convolution(input, self.weight, self.bias, window)

    def _window(self, input):
        """The numbers of a convolution of `input`; with reflect or replicate padding it comes back padded."""
        # torch keeps the padding, with 'same' and 'valid' resolved, as F.pad wants it: last dim first.
        last_first = self._reversed_padding_repeated_twice
        if self.padding_mode not in ("zeros", "circular"):
            with layer_rules():
                input = F.pad(input, last_first, mode=self.padding_mode)
            last_first = [0] * len(last_first)
        return input, _window_of(
            self.stride,
            tuple(last_first),
            self.dilation,
            self.output_padding,
            self.groups,
            self.padding_mode == "circular",
        )


class _ShardedTransposed(_ShardedConvolution):
    def _window(self, input, output_size=None):
        n = len(self.kernel_size)
        if self.padding_mode != "zeros":
            raise ValueError(f"padding_mode is '{self.padding_mode}', expected 'zeros'{on_rank()}")
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, n, self.dilation
        )
        return input, Window(
            self.stride,
            pairs(self.padding),
            self.dilation,
            True,
            tuple(output_padding),
            self.groups,
            (False,) * n,
        )


class Conv1d(_ShardedConvolution, torch.nn.Conv1d):
    """`torch.nn.Conv1d` for DTensors of shape (N, C, L) or (C, L)."""


class Conv2d(_ShardedConvolution, torch.nn.Conv2d):
    """`torch.nn.Conv2d` for DTensors of shape (N, C, H, W) or (C, H, W)."""


class Conv3d(_ShardedConvolution, torch.nn.Conv3d):
    """`torch.nn.Conv3d` for DTensors of shape (N, C, D, H, W) or (C, D, H, W)."""


class ConvTranspose1d(_ShardedTransposed, torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` for DTensors of shape (N, C, L) or (C, L)."""


class ConvTranspose2d(_ShardedTransposed, torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` for DTensors of shape (N, C, H, W) or (C, H, W)."""


class ConvTranspose3d(_ShardedTransposed, torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` for DTensors of shape (N, C, D, H, W) or (C, D, H, W)."""
