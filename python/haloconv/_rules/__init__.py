"""DTensor rules: ``F.conv2d(dtensor, ...)``, ``F.max_pool2d``, batch norm and all their kin become right for any
spatial sharding, and stay sharded.

One file a family; _registry.py has the switch, _missing.py what happens to an op that has no sharded form.
"""

from . import (  # noqa: F401  they register themselves
    adaptive,
    convolution,
    losses,
    norms,
    padding,
    pointwise,
    pooling,
    randomness,
    rearranging,
    reductions,
    resizing,
    strides,
    unfolding,
    viewing,
)
from ._missing import MARK, add_policy
from ._registry import disable_rules, enable_rules, layer_rules, rules, rules_enabled, tag_caches
from .randomness import agree, disagree

__all__ = [
    "MARK",
    "add_policy",
    "agree",
    "disable_rules",
    "disagree",
    "enable_rules",
    "layer_rules",
    "rules",
    "rules_enabled",
    "tag_caches",
]
