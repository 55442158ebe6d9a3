"""haloconv: convolutional networks on images that are split over several devices."""

import torch  # noqa: F401  first: the extension module is linked to the libtorch that this loads

from . import _ops
from ._plan import Plan, RankPlan, plan
from ._version import __version__
