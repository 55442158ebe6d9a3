"""torch.nn's layers for DTensors whose spatial dims (or batch) are sharded.

Each class is a subclass of torch's class of the same name: same arguments, same ``state_dict`` keys, and the very same
behaviour for plain tensors. Given a DTensor they return a DTensor sharded in the same dims. Their parameters may be
plain (then they count as replicated, and their gradients are summed over the ranks) or DTensors. They do not need
`haloconv.enable_rules`, except under torch.compile.
"""

from ._convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from ._layers import LAYERS

globals().update(LAYERS)

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]
__all__ += [*LAYERS]  # noqa: PLE0604  names
