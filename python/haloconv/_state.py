"""State dicts of plain tensors, with the unsplit model's keys."""

import torch

from ._check import on_rank
from ._dtensor import DTensor, Replicate


def full_state_dict(model):
    """``model.state_dict()`` with plain, full tensors, on every rank.

    A collective operation where some tensor is sharded; replicated ones cost no communication. The tensors are copies:
    training on does not change them.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module{on_rank()}")
    with torch.no_grad():
        return {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            if isinstance(value, torch.Tensor)
            else value
            for key, value in model.state_dict().items()
        }


def load_full_state_dict(model, sd, strict=True):
    """Loads plain, full tensors, the same on every rank, into a model whose parameters are DTensors or plain.

    Args:
        model: a module, parallelized or not.
        sd: what `full_state_dict` or an unsplit model's ``state_dict()`` returned.
        strict: as in ``Module.load_state_dict``.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        RuntimeError: keys or shapes do not fit, as ``load_state_dict`` says it.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module{on_rank()}")
    if not hasattr(sd, "items"):
        raise TypeError(f"sd is a {type(sd).__name__}, expected a dict of tensors{on_rank()}")
    own = model.state_dict()
    placed = {}
    for key, value in sd.items():
        target = own.get(key)
        if isinstance(target, DTensor) and isinstance(value, torch.Tensor) and target.shape == value.shape:
            mesh = target.device_mesh
            value = value.to(device=target.device, dtype=target.dtype)
            whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            value = whole.redistribute(placements=target.placements)
        elif isinstance(target, DTensor) and isinstance(value, torch.Tensor):
            raise RuntimeError(
                f"sd['{key}'] has shape {tuple(value.shape)}, expected {tuple(target.shape)}{on_rank()}"
            )
        placed[key] = value
    return model.load_state_dict(placed, strict=strict)
