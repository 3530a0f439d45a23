"""Saved weights: load the weights of a run, a checkpoint or a file into a model that scores with them.

Where it sits: the public function ``kagome.load_weights``; ``train.trainer`` loads them; ``kagome predict``
asks how many output columns the model had that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kagome.checkpoint import checkpoint
from kagome.checkpoint.files import latest
from kagome.comm.channel import Channel
from kagome.config.fields import check_kind, path_of
from kagome.errors import CheckpointError
from kagome.model.state import load_state

SUFFIX = ".safetensors"
"""The suffix of a file of weights."""
PROBES = 7, 11
"""Columns of two made-up models, whose shapes show where weights depend on the number of columns."""


def weights_at(where: str | Path) -> dict[str, Tensor]:
    """Return saved weights by name; of the best epoch, if a run knows it.

    Args:
        where: The folder of a run, of its ``checkpoints`` or of one of them, or a ``.safetensors`` file.

    Raises:
        CheckpointError: If there are none, or they are damaged.
    """
    path = path_of(where, "the place of weights")
    if path.is_dir():
        alone, saved = path / f"model{SUFFIX}", path / "checkpoints"
        # Checkpoints are sealed and checked, so they are preferred to model.safetensors beside them.
        if not alone.exists() or (saved.is_dir() and any(saved.iterdir())):
            return checkpoint.best_weights(latest(path))
        path = alone
    if not path.is_file() or path.suffix != SUFFIX:
        raise CheckpointError(
            f"weights in the folder of a run, a checkpoint, or a {SUFFIX} file",
            f"{'another file' if path.is_file() else 'no such file or folder'}: {where}",
            hint="ls runs/",
        )
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"weights in {path}", f"a file that cannot be read: {error}") from None


def load_weights(model: nn.Module, where: str | Path) -> None:
    """Load the weights of a run of ``kagome.Trainer`` or of a file into a model, for inference for example.

    Neither labels nor masks are needed, nor as many ranks as the run had. Before ``kagome.shard`` it is
    enough on rank 0, whose weights all ranks get; a model that is sharded loads them on all ranks.

    Args:
        model: A model of the same shapes; lazy layers get theirs from the file.
        where: The folder of a run, of its ``checkpoints`` or of one of them, or a ``.safetensors`` file. A
            run gives the weights of its best epoch, if it knows one.

    Raises:
        CheckpointError: If there are none, or they are damaged or of another model; the model is then as it
            was.

    Example:
        >>> import tempfile, torch, kagome
        >>> from torch_geometric.nn import GCN
        >>> data, out = kagome.load("digits"), tempfile.mkdtemp() + "/run"
        >>> trainer = kagome.Trainer(GCN(64, 16, num_layers=2, out_channels=10), data, out=out)
        >>> summary = trainer.fit(1)
        >>> model = GCN(64, 16, num_layers=2, out_channels=10)
        >>> kagome.load_weights(model, out)
        >>> with kagome.shard(model, data) as net, torch.no_grad():
        ...     net.gather(net(data.x, data.edge_index)).shape
        torch.Size([1797, 10])
    """
    check_kind("model", model, nn.Module)
    weights = weights_at(where)
    # A lazy weight has no shape to compare, so it takes the file's first.
    if _lazy(model):
        with suppress(RuntimeError):  # other names or shapes, which `give` names
            model.load_state_dict(weights, strict=False)
        if lost := _lazy(model):
            raise CheckpointError("weights of this model", f"none of its {lost[0]}", where=str(where))
    give(model, weights, where)


def _lazy(model: nn.Module) -> list[str]:
    """Return the names of weights that have no shape yet."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, value in named if nn.parameter.is_lazy(value)]


def give_alike(model: nn.Module, where: str | Path, world: Channel) -> None:
    """Load saved weights into the model of every rank. All ranks call it.

    Args:
        model: The user's module.
        where: See :func:`weights_at`.
        world: All ranks.

    Raises:
        CheckpointError: If a rank finds none, or they are damaged or of another model.
    """
    fault = None
    try:
        give(model, weights_at(where), where)
    except CheckpointError as error:
        fault = error
    # Other ranks must not go on with weights that this one could not load.
    faults: Any = world.gather_objects(fault and str(fault), "load weights")
    found = next((each for each in faults if each), None)
    if fault is not None or found is not None:
        raise fault or CheckpointError("all ranks to load the same weights", f"an error on one: {found}")


def give(model: nn.Module, weights: Mapping[str, Tensor], where: str | Path) -> None:
    """Load weights into a model; leave it as it was if they do not fit.

    Args:
        model: The user's module.
        weights: The weights by name.
        where: Where they come from, for the error.

    Raises:
        CheckpointError: If they are of another model.
    """
    own, found = model.state_dict(keep_vars=True), dict(weights)
    for name, tensor in own.items():  # a file holds a tensor of several names under one of them
        if name not in found:
            tied = (found[other] for other, one in own.items() if one is tensor and other in found)
            same = next(tied, None)
            if same is not None:
                found[name] = same
    if fault := checkpoint.misfit(model, found):
        raise CheckpointError(
            "weights of this model",
            fault,
            where=str(where),
            hint="the same --model settings, and data with as many features, as the run that wrote them",
        )
    load_state(model, found)


def columns_of(weights: Mapping[str, Tensor], make: Callable[[int], nn.Module]) -> int | None:
    """Return the number of output columns of the model that saved weights belong to.

    Args:
        weights: The saved weights by name.
        make: Makes a model with a given number of columns.

    Returns:
        The number; None where no weight shows it.
    """
    with torch.random.fork_rng(devices=[]):
        few, more = (_shapes(make(count)) for count in PROBES)
    for name, shape in few.items():
        saved = weights.get(name)
        if saved is None or saved.dim() != len(shape):
            continue
        # A size grows linearly with the number of columns c: size = one + step * (c - PROBES[0]). Two models
        # with 7 and 11 columns give `step`, and the saved size gives c.
        for one, other, size in zip(shape, more.get(name, ()), saved.shape, strict=False):
            # Sizes that do not change with the columns have step 0 and say nothing.
            step, rest = divmod(other - one, PROBES[1] - PROBES[0])
            if step > 0 and rest == 0:
                count, rest = divmod(size - one, step)
                return count + PROBES[0] if rest == 0 and count + PROBES[0] > 0 else None
    return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    state = model.state_dict(keep_vars=True)
    return {
        name: tuple(value.shape)
        for name, value in state.items()
        if not isinstance(value, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
    }
