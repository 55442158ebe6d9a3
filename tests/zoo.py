"""The zoo: whole published ConvNets, each trained for one step unsplit and split, and compared.

    python tests/zoo.py [--world 2 3] [--only NAME ...] [--json FILE] [--list]

Each entry of `ZOO` is a model and a size of image. `compare` builds it in float64 in train mode with a fixed
seed and no dropout, copies it, runs one step of both, and compares every output, the gradient of every
parameter and every running statistic. It also counts what crosses ranks whole: a model that torch quietly
gathers somewhere gives the right numbers, but not the memory that sharding is for.

Sizes are small but awkward on purpose: most widths are divisible by neither 2 nor 3 somewhere on the way
down, and many models end one to three columns wide, so that some rank holds nothing.

As a script it runs them all and prints a table; the exit status is 1 if any fails. test_zoo.py runs one
entry for each mechanism. `check` runs one entry and never raises.
"""

import argparse
import collections
import copy
import dataclasses
import fnmatch
import functools
import importlib.util
import json
import re
import sys
import time
import traceback

import harness
import torch
import torch.nn as nn
from harness import RankFailure, mesh_of, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoomodels import (
    VAE,
    BilinearUNet,
    PyramidPooling,
    StyleTransfer,
    SuperResolution,
    UNet,
    group_norm,
    instance_norm,
)

RTOL = 1e-7  # of each value: a step adds up to about 10^5 rounded products through up to 300 layers
ATOL = 1e-9  # of the largest value of its kind: what is zero but for rounding, as a bias before batch norm
GATHERED = 0.01  # how much may be gathered, of the bytes of the unsplit model's activations
# All-reduced values for each sample and channel of each activation: means, variances, their gradients. Besides,
# each parameter's gradient once: one that has a computation behind it, as a standardised weight, is reduced there.
REDUCED = 8
TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo. It travels to the ranks, so `build` must be picklable."""

    name: str
    build: object  # () -> module
    size: tuple  # of an image: height and width, in 3-D depth, height and width
    batch: int = 2
    on_missing: str | None = None  # for parallelize; None: its default, which refuses what cannot be sharded
    gathered: float | None = GATHERED  # None: no limit

    @property
    def shape(self):
        return (self.batch, 3, *self.size)


# ------------------------------------------------------------------------------------------------ published
# models


def _timm(name, **options):
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **options)


MONAI = {  # three dims
    "UNet": dict(spatial_dims=3, channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "BasicUNet": dict(spatial_dims=3, features=(4, 4, 8, 8, 8, 4)),
    "SegResNet": dict(spatial_dims=3, init_filters=8),
    "DynUNet": dict(spatial_dims=3, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
}


def _monai(name):
    from monai.networks import nets

    return getattr(nets, name)(in_channels=3, out_channels=2, **MONAI[name])


def _detector():
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    return maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).backbone


def _torchvision(name, hidden=None, **options):
    """hidden: the width of a classifier's hidden layers; VGG's own would be most of the model's memory."""
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    if hidden:
        layers = [i for i, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
        widths = [model.classifier[layers[0]].in_features, *[hidden] * (len(layers) - 1), 10]
        for i, inputs, outputs in zip(layers, widths, widths[1:]):
            model.classifier[i] = nn.Linear(inputs, outputs)
    return model


def _segmentation(name, **options):
    import torchvision

    return torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **options)


def _pyramid():
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d
    )


def _entry(source, build, name, *size, batch=2, on_missing=None, gathered=GATHERED, **options):
    return Entry(
        f"{source}/{name}", functools.partial(build, name, **options), size, batch, on_missing, gathered
    )


def _own(name, build, *size):
    return Entry(f"own/{name}", build, size)


timm_ = functools.partial(_entry, "timm", _timm)
vision = functools.partial(_entry, "torchvision", _torchvision)
dense = functools.partial(_entry, "torchvision", _segmentation)
GATHERS = dict(on_missing="gather", gathered=None)  # attention over space has no sharded form

# Of each family of timm the smallest, or a small one with all that the family has; by the size of image.
TIMM = {
    (35, 50): "convmixer_768_32",
    (64, 64): "fbnetc_100 ghostnetv2_100",
    (64, 65): "resnet50d mobilenetv4_conv_small_035",
    (64, 66): "regnetz_005 mixnet_s",
    (64, 67): """
        convnextv2_atto resnetv2_18d tf_efficientnetv2_b0 mobilenetv2_035 hardcorenas_b cspresnet50
        dm_nfnet_f0 ese_vovnet19b_slim_dw fasternet_t0 rdnet_tiny pnasnet5large
    """,
    (64, 70): """
        convnext_atto resnet18 resnext26ts resnetblur18 resnetv2_18 regnetx_002 efficientnet_lite0
        mobilenetv1_100 tf_mobilenetv3_small_075 mnasnet_small fbnetv3_b tinynet_e densenet121 dpn48b
        cspresnext50 darknet17 cs3darknet_focus_s nfnet_l0 nf_regnet_b0 rexnet_100 res2next50 seresnet18
        ecaresnet26t gernet_s selecsls42 mobileone_s0 vovnet39a xception41p repvit_m1 repghostnet_050
        starnet_s050 hgnet_tiny mambaout_femto poolformer_s12 convformer_s18 fastvit_t8 focalnet_tiny_srf
    """,
    (64, 71): """
        resnet10t regnety_002 tf_efficientnet_b0 mobilenetv3_small_050 tf_mixnet_s lcnet_035 cspdarknet53
        ghostnet_050 eca_nfnet_l0 res2net50_14w_8s legacy_seresnet18 repvgg_a0 legacy_xception
        inception_next_atto hgnetv2_b0 poolformerv2_s12
    """,
    (64, 73): "resnetrs50 efficientnet_b0",
    (64, 96): "convnext_zepto_rms resnetaa34d dla46x_c hrnet_w18_small tresnet_m",
    (128, 130): "inception_resnet_v2",
    (128, 135): "inception_v4",
    (128, 139): "inception_v3",
}
ENTRIES = [
    _own("unet2d", functools.partial(UNet, 2, group_norm), 32, 68),
    _own("unet3d", functools.partial(UNet, 3, instance_norm), 8, 12, 20),
    _own("unet_bilinear", BilinearUNet, 30, 71),
    _own("vae", VAE, 32, 70),
    _own("style_transfer", StyleTransfer, 32, 76),
    _own("super_resolution", SuperResolution, 16, 34),
    _own("pyramid_pooling", PyramidPooling, 32, 47),
    timm_("ghostnetv3_050", 64, 96, batch=3),
    timm_("resnest14d", 64, 70, batch=4),
    timm_("skresnet18", 64, 67, batch=4),
    timm_("vgg11", 96, 110, mlp_ratio=0.05),
    timm_("vgg11_bn", 96, 103, mlp_ratio=0.05),
    timm_("nasnetalarge", 64, 71, num_features=1344, stem_size=32),
    timm_("gcresnext26ts", 64, 67, **GATHERS),
    timm_("edgenext_xx_small", 64, 70, **GATHERS),
    timm_("efficientformerv2_s0", 224, 224, **GATHERS),
    vision("alexnet", 96, 131, hidden=64),
    vision("vgg11", 96, 131, hidden=64),
    vision("resnet18", 64, 67),
    vision("squeezenet1_0", 64, 71),
    vision("densenet121", 64, 67),
    vision("googlenet", 96, 110, init_weights=False),
    vision("inception_v3", 299, 301, init_weights=False),
    vision("mobilenet_v2", 64, 70),
    vision("mobilenet_v3_small", 64, 73),
    vision("shufflenet_v2_x0_5", 64, 71),
    vision("mnasnet0_5", 64, 70),
    vision("efficientnet_b0", 64, 71),
    vision("efficientnet_v2_s", 64, 70),
    vision("regnet_x_400mf", 64, 67),
    vision("convnext_tiny", 64, 71),
    dense("deeplabv3_mobilenet_v3_large", 64, 71, aux_loss=True),
    dense("lraspp_mobilenet_v3_large", 64, 70),
    Entry("torchvision/resnet18_fpn", _pyramid, (64, 71)),
]
ENTRIES += [Entry("torchvision/maskrcnn_resnet50_fpn backbone", _detector, (64, 96))]
if importlib.util.find_spec("monai"):  # where it is installed
    ENTRIES += [
        Entry("monai/UNet", functools.partial(_monai, "UNet"), (8, 16, 20)),
        Entry("monai/BasicUNet", functools.partial(_monai, "BasicUNet"), (16, 16, 34)),
        Entry("monai/SegResNet", functools.partial(_monai, "SegResNet"), (8, 16, 24)),
        Entry("monai/DynUNet", functools.partial(_monai, "DynUNet"), (8, 12, 20)),
    ]
ENTRIES += [timm_(name, *size) for size, names in TIMM.items() for name in names.split()]
ZOO = {entry.name: entry for entry in ENTRIES}


# ------------------------------------------------------------------------------------------------ building


def build(entry):
    """The model in float64 and train mode, seeded, without randomness of its own, all of it in use."""
    torch.manual_seed(0)
    model = entry.build().double().train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name in ("drop_rate", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _wake(name, parameter)
    return model


def _wake(name, parameter):
    """Residual blocks often start as nothing: a last norm or a layer scale of zero, or of 1e-6. No gradient
    would come through, and none be tested. Such parameters, and biases of zero, are drawn instead."""
    if parameter.abs().max() < 1e-3:
        if name.endswith("bias"):
            parameter.normal_(0, 0.1)
        else:
            parameter.uniform_(0.3, 0.7)


def _normal(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ on the ranks


class Traffic(TorchDispatchMode):
    """Counts what collectives return, by the op on DTensors that they are for, and knows the latest such op.

    On DTensors it steps aside, so that the collectives that DTensor makes of an op come past. Gradients of
    parameters are reduced in place by haloconv and are not counted; nor are halos, which are no collectives.
    """

    GATHERS = ("all_gather", "allgather", "all_to_all", "alltoall", "reduce_scatter", "broadcast", "scatter")

    def __init__(self):
        super().__init__()
        self.op = "no op"
        self.gathered, self.reduced = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            self.op = str(func)
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        space, _, name = str(func).partition(".")
        if space in ("_c10d_functional", "c10d", "haloconv"):
            if any(word in name for word in self.GATHERS):
                self.gathered[self.op] += nbytes(out)
            elif name.startswith("all_reduce") and space != "c10d":
                self.reduced[self.op] += nbytes(out)
        return out


def nbytes(tensors):
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))


class Activations:
    """Adds up the bytes of what the leaf modules of a model return, and of one value for each of their samples
    and channels."""

    def __init__(self, model):
        self.nbytes = self.statistics = 0
        self.hooks = [
            module.register_forward_hook(self.add)
            for module in model.modules()
            if not list(module.children())
        ]

    def add(self, module, args, out):
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                self.nbytes += nbytes(x)
                self.statistics += x.shape[0] * max(x.shape[1], x.shape[-1]) * x.element_size()

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def floating(outputs):
    """The tensors in whatever a model returns, in order."""
    return [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def loss_of(outputs):
    """A weighted sum that no symmetry makes zero."""
    return sum((x * _normal(x.shape, 2 + i)).sum() for i, x in enumerate(outputs))


class Difference:
    """Compares tensors of one kind (outputs, gradients, buffers), pair by pair, on one scale."""

    def __init__(self, kind, pairs):
        self.failures, self.largest = [], 0.0
        scale = max((_size(want) for _, _, want in pairs), default=0.0)
        worst = 0.0
        for name, got, want in pairs:
            what = f"{kind} {name}"
            if got is None or want is None:
                if got is not want:
                    self.failures.append(f"{what} is {_is(got)}, expected {_is(want)}")
                continue
            if got.shape != want.shape or got.dtype != want.dtype:
                self.failures.append(
                    f"{what} is {got.dtype} {tuple(got.shape)}, expected {tuple(want.shape)}"
                )
                continue
            if not want.numel():
                continue
            difference = torch.nan_to_num((got - want).abs().double(), nan=float("inf"))
            self.largest = max(self.largest, difference.max().item() / (scale or 1.0))
            exceeds = (difference / (RTOL * want.abs() + ATOL * (scale or 1.0))).max().item()
            if exceeds > max(worst, 1.0):
                worst = exceeds
                relative = difference.max().item() / (_size(want) or 1.0)
                self.failures[:0] = [f"{what} is off by {relative:.1e} of its largest value"]
        del self.failures[3:]


def _size(tensor):
    return 0.0 if tensor is None or not tensor.numel() else tensor.detach().abs().max().item()


def _is(tensor):
    return "None" if tensor is None else "a tensor"


def compare(world, entry):
    """Runs on every rank: one step of the model of `entry` unsplit and split. Returns the numbers of a `Record`."""
    import haloconv

    mesh = mesh_of((world,))
    plain = build(entry)
    sharded = copy.deepcopy(plain)
    x = _normal(entry.shape, 1)

    begin = time.perf_counter()
    activations = Activations(plain)
    wanted = floating(plain(x))
    activations.remove()
    loss_of(wanted).backward()
    unsplit_s = time.perf_counter() - begin
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    buffers = dict(plain.named_buffers())
    parameters = nbytes(gradients)
    del plain

    options = {} if entry.on_missing is None else dict(on_missing=entry.on_missing)
    haloconv.parallelize(sharded, mesh, **options)
    haloconv.reset_comm_stats()
    begin = time.perf_counter()
    forward, backward = Traffic(), Traffic()
    outputs = _during("forward", forward, lambda: floating(sharded(haloconv.distribute(x, mesh))))
    got = [_whole(y) for y in outputs]
    loss = loss_of(got)
    _during("backward", backward, loss.backward)
    split_s = time.perf_counter() - begin
    stats = haloconv.comm_stats()["by_op"]

    failures = []
    if len(got) != len(wanted):
        failures.append(f"{len(got)} outputs, expected {len(wanted)}")
    differences = [
        Difference("output", [(i, y, want) for i, (y, want) in enumerate(zip(got, wanted))]),
        Difference("gradient of", [(n, _local(p.grad), gradients[n]) for n, p in sharded.named_parameters()]),
        Difference("buffer", [(n, _local(b), buffers[n]) for n, b in sharded.named_buffers()]),
    ]
    for difference in differences:
        failures += difference.failures
    sizes = sorted(_size(gradient) for gradient in gradients.values())
    if sizes[len(sizes) // 2] < 1e-4 * sizes[-1]:
        failures.append("half of the gradients are too small for the comparison to say much")
    by_op = forward.gathered + backward.gathered
    gathered, most = by_op.total() / activations.nbytes, by_op.most_common(3)
    reduced = (forward.reduced + backward.reduced).total()
    if entry.gathered is not None and gathered > entry.gathered:
        ops = ", ".join(f"{op} {count / activations.nbytes:.1%}" for op, count in most)
        failures.append(f"{gathered:.1%} of the activations are gathered: {ops}")
    if reduced > REDUCED * activations.statistics + parameters:
        failures.append(f"{reduced / activations.nbytes:.1%} of the activations are all-reduced")
    halos = sum(s["bytes"] for op, s in stats.items() if op not in ("gradients", "all_reduce", "gather"))
    numbers = dict(
        output=differences[0].largest,
        gradient=differences[1].largest,
        buffer=differences[2].largest,
        gathered=gathered,
        reduced=reduced / activations.nbytes,
        halos=halos / activations.nbytes,
        unsplit_s=unsplit_s,
        split_s=split_s,
    )
    return numbers, dict(most), failures


def _during(phase, traffic, run):
    """run() with its traffic counted. An error gets the name of the op that raised it."""
    try:
        with traffic:
            return run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or f"{where.line} in {where.name}"
        named = re.search(r"\b(aten|haloconv|prims|_c10d_functional|c10d)\.\w+(\.\w+)?", text)
        op = named.group() if named else traffic.op
        raise RuntimeError(f"[{op}] in {phase}: {type(error).__name__}: {text}") from error


def _whole(y):
    import haloconv
    from torch.distributed.tensor import DTensor

    return haloconv.gather(y) if isinstance(y, DTensor) else y


def _local(tensor):
    """What this rank holds of a replicated tensor: it must be right on every rank."""
    if tensor is None:
        return None
    assert all(placement.is_replicate() for placement in tensor.placements), tensor.placements
    return tensor.to_local()


# ------------------------------------------------------------------------------------------------ from outside


@dataclasses.dataclass
class Record:
    """What `check` found. Shares are of the bytes of the unsplit model's activations, errors of the largest value
    of that kind; both are the largest over the ranks."""

    name: str
    world: int
    ok: bool
    op: str = ""  # that raised
    failures: list = dataclasses.field(default_factory=list)
    output: float | None = None
    gradient: float | None = None
    buffer: float | None = None
    gathered: float | None = None
    gathered_by_op: dict | None = None
    reduced: float | None = None
    halos: float | None = None
    unsplit_s: float | None = None
    split_s: float | None = None


def check(world, entry):
    """Compares one entry on `world` ranks. Does not raise: what went wrong is in the record's failures."""
    try:
        parts = run_ranks(world, compare, world, entry, timeout=TIMEOUT_S)
    except RankFailure as failure:
        errors = [message for kinds, message, _ in failure.errors.values() if kinds[0] != "ProcessDied"]
        message = errors[0] if errors else str(failure)
        op = re.match(r"\[(.*?)\]", message)
        return Record(entry.name, world, False, op.group(1) if op else "", [message])
    numbers = {key: max(rank[key] for rank, _, _ in parts) for key in parts[0][0]}
    by_op = max((ops for _, ops, _ in parts), key=lambda ops: sum(ops.values()))
    failures = list(dict.fromkeys(failure for *_, rank in parts for failure in rank))
    return Record(entry.name, world, not failures, failures=failures, gathered_by_op=by_op, **numbers)


def select(patterns):
    """The entries that the patterns name: `timm/resnet18`, `resnet18`, `torchvision/*`."""
    chosen = [
        entry
        for entry in ENTRIES
        if not patterns
        or any(fnmatch.fnmatch(name, p) for p in patterns for name in (entry.name, entry.name.split("/")[1]))
    ]
    if not chosen:
        raise SystemExit(f"zoo: no entry is named {' or '.join(patterns)}; --list shows them")
    return chosen


def table(records):
    from rich.markup import escape
    from rich.table import Table

    result = Table(title="One training step, split against unsplit")
    for heading in ("model", "ranks", "output", "gradients", "buffers", "gathered", "halos", "seconds", ""):
        text = heading in ("model", "")
        result.add_column(heading, justify="left" if text else "right", no_wrap=heading != "")
    for r in records:
        numbers = [""] * 6
        if r.output is not None:
            numbers = [f"{r.output:.0e}", f"{r.gradient:.0e}", f"{r.buffer:.0e}"]
            numbers += [f"{r.gathered:.2%}", f"{r.halos:.1%}", f"{r.unsplit_s:.1f} → {r.split_s:.1f}"]
        verdict = "[green]✓" if r.ok else "[red]✗[/] " + escape(r.op or r.failures[0].splitlines()[0])
        result.add_row(r.name, str(r.world), *numbers, verdict)
    return result


def main(argv=None):
    parser = argparse.ArgumentParser(prog="zoo.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 3], help="numbers of ranks (default 2 3)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names; * and ? are wildcards")
    parser.add_argument("--json", metavar="FILE", help="also write every number there")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(argv)
    entries = select(options.only)
    if options.list:
        for entry in entries:
            print(entry.name, *entry.size)
        return 0
    from rich.console import Console

    harness.PRELOAD += ["timm", "torchvision"]
    console = Console()
    if not console.is_terminal:
        console.width = 130
    records = []
    for entry in entries:
        for world in options.world:
            begin = time.perf_counter()
            record = check(world, entry)
            records.append(record)
            mark = "[green]✓[/]" if record.ok else "[red]✗[/]"
            console.print(
                f"{mark} {entry.name} on {world} ranks, {time.perf_counter() - begin:.1f} s", highlight=False
            )
            for failure in record.failures:
                console.print("   ", failure.splitlines()[0], markup=False, highlight=False, soft_wrap=True)
    console.print(table(records))
    failed = sum(not record.ok for record in records)
    console.print(f"{len(records) - failed} of {len(records)} equal the unsplit model")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(record) for record in records], file, indent=1)
    harness.shutdown()
    return 1 if failed else 0


if __name__ == "__main__":
    import zoo  # by this name the ranks know it, too

    sys.exit(zoo.main())
