"""The configurations of memory_table.py: a network, how it is split, what is recomputed, what the optimizer keeps.

One description, `Case`, builds the same program for fake tensors, CPUs and GPUs: `prepare` gives a training step on the
mesh that it is called on.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass

import haloconv
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

CHECKPOINTING = ("none", "stage", "block", "pointwise")
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One row. `way`: "one card", "pipeline" or "haloconv", on `ranks` of them."""

    model: str = "convnext_xlarge"
    input: tuple = (7, 3, 512, 2048)
    way: str = "one card"
    ranks: int = 1
    dtype: str = "float32"  # or "bfloat16 autocast"
    optimizer: str = "none"  # "sgd", "momentum", "adam"
    checkpointing: str = "none"
    sharded_states: bool = False
    gathered: str = "bfloat16"  # what sharded parameters are gathered in, under autocast; or "float32"
    rank: int | None = (
        None  # the one that is looked at; None: one with two neighbours, or all stages of a pipeline
    )

    @property
    def name(self):
        parts = [self.way if self.ranks == 1 else f"{self.way} on {self.ranks}"]
        parts += [] if self.checkpointing == "none" else [f"recomputing each {self.checkpointing}"]
        if self.checkpointing == "pointwise":
            parts[-1] = "recomputing pointwise ops"
        parts += ["sharded states"] if self.sharded_states else []
        parts += ["gathered in float32"] if self.gathered == "float32" else []
        return ", ".join(parts)

    def as_row(self):
        row = asdict(self)
        states = ", sharded" if self.sharded_states else ""
        return {
            "name": self.name,
            "optimizer": f"{self.optimizer}{states}",
            "input": list(self.input),
            **{key: row[key] for key in ("model", "ranks", "dtype", "checkpointing")},
        }


# ---- networks ----


class ElementwiseNorm(nn.Module):
    """Layer norm over channels of NCHW, written out in elementwise ops: what ConvNeXt's first code did, and the example
    whose figures were published. Each op keeps what its gradient needs."""

    def __init__(self, channels, eps=1e-6, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight * x + self.bias


class Float32LayerNorm(nn.LayerNorm):
    """What autocast makes of a layer norm on CUDA devices, and does not on CPUs."""

    def forward(self, x):
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)


class Float32LayerNorm2d(Float32LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network(name, autocast):
    """A timm network on the meta device. A ConvNeXt's name may end in ", elementwise norm", and "convnext_tiny/4" has a
    quarter of the channels. What recomputes or makes a pipeline of parts needs a ConvNeXt's."""
    import timm
    from timm.layers import LayerNorm2d
    from timm.models.convnext import ConvNeXt

    base, _, form = name.partition(", ")
    base, _, divisor = base.partition("/")
    options = {}
    if form == "elementwise norm":
        options = dict(conv_mlp=True, norm_layer=ElementwiseNorm)
    elif form:
        raise ValueError(f"model is {name!r}, expected 'elementwise norm' after the comma")
    with unset_fake_temporarily(), torch.device("meta"):  # timm computes with numbers
        model = timm.create_model(base)
        if divisor or options:
            dims = [stage.blocks[0].conv_dw.in_channels // int(divisor or 1) for stage in model.stages]
            depths = [len(stage.blocks) for stage in model.stages]
            model = ConvNeXt(depths=depths, dims=dims, **options)
    if autocast:
        for child in model.modules():
            if type(child) is not nn.LayerNorm and isinstance(child, nn.LayerNorm):
                child.__class__ = Float32LayerNorm2d if isinstance(child, LayerNorm2d) else Float32LayerNorm
    return model


# ---- what is recomputed ----

_KEPT = (
    aten.convolution.default,
    aten.addmm.default,
    aten.mm.default,
    aten.bmm.default,
    aten.linear.default,
    torch.ops.haloconv.convolution.default,
)


def _keep_products(context, op, *args, **kwargs):
    """Convolutions and matrix products are kept, all between them is computed again."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model, what):
    """Wraps the forward of stages or blocks."""
    context = {}
    if what == "pointwise":
        context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)}
    if what == "none":
        return
    parts = model.stages if what == "stage" else [block for stage in model.stages for block in stage.blocks]
    for part in parts:
        forward = part.forward
        part.forward = functools.partial(checkpoint, forward, use_reentrant=False, **context)


# ---- a step ----


def _device(mesh_device, rank):
    return torch.device(
        mesh_device, rank % max(1, torch.cuda.device_count()) if mesh_device == "cuda" else None
    )


def _materialized(model, device, seed):
    """The meta model on a device; values that train, small and the same on every rank."""
    model = model.to_empty(device=device)
    if torch._guards.detect_fake_mode() is None:
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02, generator=generator)
            for buffer in model.buffers():
                buffer.zero_()
    return model


def _optimizer(case, model):
    kinds = {
        "none": lambda parameters: None,
        "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
        "momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "adam": functools.partial(torch.optim.Adam, lr=1e-3),
    }
    return kinds[case.optimizer](model.parameters())


class Program:
    """A training step and what it trains: `model`, `optimizer` (None if the case has none), `step()`, which returns the
    loss, and `inputs`, tensors that it holds from step to step."""

    def __init__(self, case, mesh, rank=0):
        self.case, self.mesh = case, mesh
        device = _device(mesh.device_type, rank)
        autocast = case.dtype != "float32"
        model = _materialized(network(case.model, autocast and device.type == "cpu"), device, seed=0)
        recompute(model, case.checkpointing)
        generator = None if torch._guards.detect_fake_mode() else torch.Generator(device).manual_seed(1)
        images = torch.randn(case.input, device=device, generator=generator)
        labels = torch.zeros(case.input[0], dtype=torch.long, device=device)
        self.gathers = case.way == "haloconv"
        if self.gathers:
            options = {}
            if case.sharded_states:
                blocks = [block for stage in model.stages for block in stage.blocks]
                gathered = torch.bfloat16 if autocast and case.gathered == "bfloat16" else None
                policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
                options = dict(
                    shard_states=[model.stem, *(s.downsample for s in model.stages[1:]), *blocks, model.head],
                    states_options={"mp_policy": policy, "reshard_after_forward": True},
                )
            model = haloconv.parallelize(model, mesh, **options)
            images = haloconv.distribute(images, mesh)
        self.model, self.images, self.labels = model, images, labels
        self.inputs = [images, labels]
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
        self.optimizer = _optimizer(case, model)

    def step(self, observe=lambda moment: None):
        """`observe` is called with "before", "forward" and "after"."""
        self.model.zero_grad(set_to_none=True)
        observe("before")
        with self.autocast:
            out = self.model(self.images)
            out = haloconv.gather(out) if self.gathers else out
        loss = F.cross_entropy(out.float(), self.labels)
        del out
        observe("forward")
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        observe("after")
        return loss.detach()


class Stage(nn.Module):
    """Some consecutive units of a ConvNeXt."""

    def __init__(self, units):
        super().__init__()
        self.units = nn.Sequential(*units)

    def forward(self, x):
        return self.units(x)


def units(model):
    """A timm ConvNeXt as a list of modules that run one after the other: a block costs as much as any other, at every
    resolution, so a pipeline is balanced that has as many in each stage."""
    listed = [model.stem]
    for stage in model.stages:
        blocks = list(stage.blocks)
        blocks[0] = (
            blocks[0]
            if isinstance(stage.downsample, nn.Identity)
            else nn.Sequential(stage.downsample, blocks[0])
        )
        listed += blocks
    stem = listed.pop(0)
    listed[0] = nn.Sequential(stem, listed[0])
    listed[-1] = nn.Sequential(listed[-1], model.norm_pre, model.head)
    return listed


class Pipeline:
    """A stage of torch.distributed.pipelining's 1F1B schedule; as many micro-batches as images."""

    def __init__(self, case, mesh, rank):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.case, self.mesh = case, mesh
        device = _device(mesh.device_type, rank)
        autocast = case.dtype != "float32"
        model = network(case.model, autocast and device.type == "cpu")
        recompute(model, case.checkpointing)
        listed, stages = units(model), case.ranks
        bounds = [len(listed) * index // stages for index in range(stages + 1)]
        at = _shapes(listed, bounds, (1, *case.input[1:]), autocast)
        mine = Stage(listed[bounds[rank] : bounds[rank + 1]])
        self.model = _materialized(mine, device, seed=rank)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
        stage = PipelineStage(
            self.model,
            rank,
            stages,
            device,
            input_args=(_like(*at[rank], requires_grad=rank > 0),),
            output_args=(_like(*at[rank + 1], requires_grad=True),),
            group=mesh.get_group(),
        )
        self.schedule = Schedule1F1B(
            stage,
            n_microbatches=case.input[0],
            loss_fn=lambda out, labels: F.cross_entropy(out.float(), labels),
        )
        self.images = torch.randn(case.input, device=device) if rank == 0 else None
        last = rank == stages - 1
        self.labels = torch.zeros(case.input[0], dtype=torch.long, device=device) if last else None
        self.inputs = [tensor for tensor in (self.images, self.labels) if tensor is not None]
        self.optimizer = _optimizer(case, self.model)

    def step(self, observe=lambda moment: None):
        """There is no moment between the forwards and the backwards of the micro-batches to observe."""
        self.model.zero_grad(set_to_none=True)
        with self.autocast:
            args = () if self.images is None else (self.images,)
            losses = []
            self.schedule.step(*args, target=self.labels, losses=losses)
        if self.optimizer is not None:
            self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def _like(shape, dtype, requires_grad):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def _shapes(listed, bounds, shape, autocast):
    """Shape and dtype between the stages, for one image, from a forward on the meta device, which has no autocast."""
    with torch.no_grad(), unset_fake_temporarily():
        x = torch.empty(shape, device="meta")
        seen = [(tuple(x.shape), torch.float32)]
        for begin, end in itertools.pairwise(bounds):
            for unit in listed[begin:end]:
                x = unit(x)
            seen.append((tuple(x.shape), torch.bfloat16 if autocast else torch.float32))
    return seen


def program(case, mesh, rank):
    """The case's program on this rank."""
    return Pipeline(case, mesh, rank) if case.way == "pipeline" else Program(case, mesh, rank)


def kept_bytes(run):
    """What this rank keeps from step to step, after one: bytes of parameters (and buffers), gradients, states."""

    def nbytes(tensors):
        own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]
        return sum(tensor.nbytes for tensor in own)

    parameters = list(run.model.parameters())
    states = [] if run.optimizer is None else [v for s in run.optimizer.state.values() for v in s.values()]
    return {
        "parameters": nbytes([*parameters, *run.model.buffers()]),
        "gradients": nbytes([parameter.grad for parameter in parameters]),
        "states": nbytes(states),
    }
