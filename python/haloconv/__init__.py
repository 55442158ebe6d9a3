"""haloconv: convolutional networks on images that are split over several devices.

    mesh = init_device_mesh("cuda", (4,))
    model = haloconv.parallelize(model, mesh)       # weights replicated
    x = haloconv.distribute(images, mesh)           # each device holds one strip
    loss = criterion(haloconv.gather(model(x)), target)
    loss.backward()                                 # gradients already summed

Each device holds one strip of every activation. An operation that looks across a strip's edge fetches what it needs
from the ranks that hold it; outputs and gradients equal those of the unsplit network.
"""

import torch  # noqa: F401  first: the extension module is linked to the libtorch that this loads

from . import _nccl, nn  # noqa: F401  _nccl registers haloconv::_connect
from ._distribute import distribute, distribute_local, gather, shard_range
from ._parallel import parallelize, unparallelize
from ._plan import Plan, RankPlan, plan
from ._rules import disable_rules, enable_rules, rules
from ._state import full_state_dict, load_full_state_dict
from ._transport import comm_stats, reset_comm_stats
from ._version import __version__

__all__ = [
    "Plan",
    "RankPlan",
    "__version__",
    "comm_stats",
    "disable_rules",
    "distribute",
    "distribute_local",
    "enable_rules",
    "full_state_dict",
    "gather",
    "load_full_state_dict",
    "nn",
    "parallelize",
    "plan",
    "reset_comm_stats",
    "rules",
    "shard_range",
    "unparallelize",
]
