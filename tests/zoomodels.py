"""Models of the zoo's own: what segmentation, generation and super-resolution do that classification does not."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F


def _block(ndim, norm, *channels):
    """3x3 convolutions, each with a norm and an activation."""
    conv = getattr(nn, f"Conv{ndim}d")
    layers = []
    for inputs, outputs in itertools.pairwise(channels):
        layers += [conv(inputs, outputs, 3, padding=1), norm(outputs), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Max pooling down, transposed convolutions up, concatenation across."""

    def __init__(self, ndim, norm):
        super().__init__()
        up = getattr(nn, f"ConvTranspose{ndim}d")
        self.pool = getattr(nn, f"MaxPool{ndim}d")(2)
        self.drop = getattr(nn, f"Dropout{ndim}d")(0.1)
        self.down = nn.ModuleList(_block(ndim, norm, *c) for c in [(3, 8, 8), (8, 12, 12), (12, 16, 16)])
        self.grow = nn.ModuleList([up(16, 12, 2, stride=2), up(12, 8, 2, stride=2)])
        self.up = nn.ModuleList([_block(ndim, norm, 24, 12), _block(ndim, norm, 16, 8)])
        self.head = getattr(nn, f"Conv{ndim}d")(8, 2, 1)

    def forward(self, x):
        fine = self.down[0](x)
        middle = self.down[1](self.pool(fine))
        x = self.drop(self.down[2](self.pool(middle)))
        x = self.up[0](torch.cat([middle, self.grow[0](x)], 1))
        return self.head(self.up[1](torch.cat([fine, self.grow[1](x)], 1)))


class BilinearUNet(nn.Module):
    """The other U-Net: upsampled with aligned corners, padded to the size of the skip, also where that is odd."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (_block(2, nn.BatchNorm2d, *c) for c in [(3, 8), (8, 8), (8, 8)])
        self.d, self.e = _block(2, nn.BatchNorm2d, 16, 8), _block(2, nn.BatchNorm2d, 16, 8)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.head = nn.Conv2d(8, 2, 1)

    def grow(self, x, skip):
        x = self.up(x)
        dy, dx = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return torch.cat([skip, x], 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        return self.head(self.e(self.grow(self.d(self.grow(c, b)), a)))


class Residual(nn.Module):
    """Group norm, SiLU, convolution, twice, and a shortcut: the block of diffusion models."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs, eps=1e-6), nn.GroupNorm(4, outputs, eps=1e-6)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Down(nn.Module):
    """A stride over an image padded on the right and below only."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class VAE(nn.Module):
    """An autoencoder of latent diffusion, small. Its second output is the divergence of each sample."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            *[Residual(8, 8), Down(8), Residual(8, 16), Down(16), Residual(16, 16)],
            *[nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3, padding=1)],
        )
        self.decode = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1),
            *[Residual(16, 16), nn.Upsample(scale_factor=2), Residual(16, 8), nn.Upsample(scale_factor=2)],
            *[nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)],
        )

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, dim=1)
        logvar = logvar.clamp(-30, 20)
        divergence = 0.5 * torch.sum(mean**2 + logvar.exp() - 1 - logvar, dim=[1, 2, 3])
        return self.decode(mean + torch.exp(0.5 * logvar) * 0.3), divergence


class StyleTransfer(nn.Module):
    """Reflected borders, instance norm, nearest-neighbour upsampling."""

    def __init__(self):
        super().__init__()

        def conv(inputs, outputs, kernel, stride=1):
            norm = nn.InstanceNorm2d(outputs, affine=True)
            pad = nn.ReflectionPad2d(kernel // 2)
            return nn.Sequential(pad, nn.Conv2d(inputs, outputs, kernel, stride), norm, nn.ReLU())

        self.down = nn.Sequential(conv(3, 8, 9), conv(8, 8, 3, 2), conv(8, 12, 3, 2), conv(12, 12, 3))
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.up1, self.up2 = conv(12, 8, 3), conv(8, 8, 3)
        self.head = nn.Sequential(nn.ReplicationPad2d(4), nn.Conv2d(8, 3, 9))

    def forward(self, x):
        x = self.up1(self.grow(self.down(x)))
        return torch.tanh(self.head(self.up2(self.grow(x))))


class SuperResolution(nn.Module):
    """Pixels unshuffled at the start and shuffled at the end, over a bicubic copy of the image."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 12, 3, padding=1), nn.PReLU())
        self.body = _block(2, nn.BatchNorm2d, 12, 12)
        self.tail = nn.Sequential(nn.Conv2d(12, 48, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, x):
        y = self.head(x)
        skip = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return skip + self.tail(y + self.body(y))


class PyramidPooling(nn.Module):
    """Averages over 1, 2, 3 and 6 cells each way, enlarged again, beside the image that they are of."""

    def __init__(self):
        super().__init__()
        self.stem = _block(2, nn.BatchNorm2d, 3, 8)
        self.levels = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(cells), nn.Conv2d(8, 4, 1)) for cells in (1, 2, 3, 6)
        )
        self.head = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        size = x.shape[2:]
        grown = [F.interpolate(level(x), size, mode="bilinear", align_corners=False) for level in self.levels]
        return self.head(torch.cat([x, *grown], 1))


def group_norm(channels):
    return nn.GroupNorm(4, channels)


def instance_norm(channels):
    return nn.InstanceNorm3d(channels, affine=True, track_running_stats=True)
