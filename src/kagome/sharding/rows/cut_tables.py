"""Cut tables: parameters with a row for each vertex or edge, of which each rank holds its own rows only.

Where it sits: ``kagome.shard(cut=...)`` finds and cuts them before the model is put on its part;
``gradient_sync`` leaves their gradients to their owners; ``positions.cut_rows`` reads them in forward.

::

    embedding.weight [N, d]   rank 0's values  ──cut──>   the same Parameter with own rows [n, d]
                                                          .grad [n, d], optimizer state [n, d]
    state_dict()    [N, d] in the graph's order  <──────  rows of all ranks
    close()         the Parameter has all rows again, trained

The ``nn.Parameter`` stays the same object, so an optimizer made before finds its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from kagome.comm.channel import Channel
from kagome.errors import ConfigError, ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import SetsPartition
from kagome.intercept.interceptor import Interceptor
from kagome.placement.placement import Placement, PlacementKind
from kagome.positions.edge_tables import tensors_of
from kagome.sharding.rows.row_blocks import RowBlocks
from kagome.sharding.rows.row_sets import RowSet, sets_of
from kagome.sharding.rows.row_transfer import joined, spread

WHERE = "kagome.shard(cut=...)"
Shown = Callable[["Table", Tensor, str], Tensor | None]
"""What a state dict has in place of a table's own rows, given them and what is done; None for own rows."""


@dataclass(frozen=True)
class Table:
    """A parameter that is cut with the rows of vertices or edges.

    Args:
        parameter: The user's parameter; while it is cut it has own rows.
        names: Its names in the model; tied layers have several.
        placement: What its rows belong to; of edges, without their list.
        ids: The ids of own rows in the whole graph.
        shape: Its shape with all rows.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    placement: Placement
    ids: Tensor
    shape: torch.Size


class CutTables:
    """The cut parameters of one model.

    Args:
        tables: Which they are.
        channel: The channel of all ranks of the graph.
    """

    def __init__(self, tables: Sequence[Table], channel: Channel) -> None:
        self.tables, self.channel = tuple(tables), channel
        self.parameters = [table.parameter for table in self.tables]
        self._whole: list[tuple[Table, Tensor, Tensor | None]] = []
        self._handles: list[RemovableHandle] = []
        self._shown: Shown = self.whole
        self._is_cut = False

    def __bool__(self) -> bool:
        return bool(self.tables)

    def table_of(self, parameter: object) -> Table | None:
        """Return the table that a parameter is, while it is cut; else None."""
        found = (table for table in self.tables if table.parameter is parameter)
        return next(found, None) if self._is_cut else None

    # Cut and joined -------------------------------------------------------------------------------

    def cut(self, device: torch.device) -> None:
        """Leave each parameter this rank's rows of rank 0's values. All ranks call it.

        Raises:
            ModelError: If a parameter differs in shape or type between ranks, or rank 0 has no values.
        """
        for table in self.tables:
            p, name = table.parameter, table.names[0]
            mine = [list(p.shape), str(p.dtype), p.is_meta and self.channel.rank == 0]
            told: Any = self.channel.gather_objects(mine, f"shape of {name}")
            if any(other[:2] != mine[:2] or other[2] for other in told):
                raise ModelError(
                    "a parameter of one shape and type on all ranks, with values on rank 0",
                    f"{', '.join(f'{shape} {dtype}' for shape, dtype, _ in told)}"
                    + (", on the meta device of rank 0" if told[0][2] else ""),
                    where=name,
                )
            own = spread(self.channel, p, table.ids, device, f"rows of {name}")
            # Torch refuses a gradient of another shape than its parameter, so it is taken off meanwhile.
            gradient = p.grad
            self._whole.append((table, p.data, gradient))
            p.grad = None
            _put(p, own)
            if gradient is not None:
                p.grad = self.owned(table, gradient.to_dense()).to(device)
        self._is_cut = True

    def undo(self) -> None:
        """Give the parameters back as they were, if the model could not be put on its part."""
        for table, values, gradient in self._whole:
            table.parameter.grad = None
            _put(table.parameter, values)
            table.parameter.grad = gradient
        if self._whole:
            self._whole, self._is_cut = [], False

    def keep(self) -> None:
        """Forget the whole tensors: the model is on its part."""
        self._whole = []

    def place(self, scope: Interceptor) -> None:
        """Record what the parameters' rows are, for the model's forward."""
        for table in self.tables:
            placement = table.placement
            if placement.kind is PlacementKind.PAIRS:
                placement = replace(placement, edges=scope.views[placement.view].edge_index)
            scope.placements.put(table.parameter, placement)

    def join(self) -> None:
        """Give each parameter all rows again, and its gradient too. All ranks call it."""
        if not self._is_cut:
            return
        for table in self.tables:
            p, gradient = table.parameter, table.parameter.grad
            values = self.whole(table, p.detach(), f"all rows of {table.names[0]}")
            # A gradient may be there on some ranks alone, if the user set it: then it is dropped.
            has = torch.tensor(float(gradient is not None), device=self.channel.device)
            every = float(self.channel.all_reduce(has, "min", action="gradients of tables"))
            if gradient is not None:
                gradient = self.whole(table, gradient, "gradients of a table") if every else None
            assert values is not None
            p.grad = None
            p.data = values
            p.grad = gradient
        # A closed model is the user's own: no hook of its state dict may wait for other ranks.
        self.release()

    def release(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_cut = [], False

    def whole(self, table: Table, rows: Tensor, action: str, *, dst: int | None = None) -> Tensor | None:
        """Return all rows of a tensor with a table's own rows: on rank ``dst`` alone, or on all."""
        return joined(self.channel, rows, table.ids, table.shape[0], action, dst=dst)

    def first_rank_whole(self, action: str) -> dict[str, Tensor]:
        """Return all rows of each table by its name, on rank 0; nothing on others. All ranks call it."""
        found = {}
        for table in self.tables if self._is_cut else ():
            whole = self.whole(table, table.parameter, f"{action}: {table.names[0]}", dst=0)
            if whole is not None:
                found[table.names[0]] = whole
        return found

    def of_copy(self, model: nn.Module, whole: Mapping[str, Tensor] | None) -> CutTables:
        """Return the cut tables of a copy of the model, none if it gets all rows.

        Args:
            model: The copy, with own rows.
            whole: All rows of each table, by its name, which the copy gets; None to keep own rows.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, rows in (whole or {}).items():
            named[name].data = rows
        kept = () if whole is not None else self.tables
        found = CutTables([replace(each, parameter=named[each.names[0]]) for each in kept], self.channel)
        found._is_cut = self._is_cut
        return found

    def blocks(self, table: Table, rows: Tensor, action: str) -> Tensor:
        """Return all rows of a tensor with a table's own rows, a block of them on each rank: a DTensor."""
        group = self.channel.group or dist.group.WORLD
        assert group is not None
        return RowBlocks(self.channel, table.ids, table.shape[0]).of(rows, group, action)

    def owned(self, table: Table, whole: Tensor) -> Tensor:
        """Return own rows of a tensor with all rows; all ranks call it if each has a block of them.

        Shapes:
            ``[N, ...]`` -> ``[n, ...]``.
        """
        if isinstance(whole, DTensor):
            blocks = RowBlocks(self.channel, table.ids, table.shape[0])
            return blocks.own(whole, f"own rows of {table.names[0]}")
        return whole.detach().index_select(0, table.ids.to(whole.device))

    # State dicts ----------------------------------------------------------------------------------

    def watch(self, *modules: nn.Module) -> None:
        """Make the state dicts of these modules whole, and let them load whole ones."""

        def give(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            self._give(state, prefix)

        def take(state: Any, prefix: str, metadata: Any, *_: Any) -> None:
            self._take(state, prefix, assigned=bool(metadata.get("assign_to_params_buffers")))

        # The model's hook serves net.state_dict() too, which calls the model's. A state dict is loaded into
        # either: a wrapper such as DistributedDataParallel loads into ``net`` by its layers, not by its
        # ``load_state_dict``.
        # Functions, which deepcopy leaves as they are: a copy of the model has a whole state dict too.
        self._handles.append(modules[0].register_state_dict_post_hook(give))
        for module in modules:
            self._handles.append(module._register_load_state_dict_pre_hook(take))

    @contextmanager
    def showing(self, how: Shown) -> Iterator[None]:
        """Within a block, state dicts have what a function makes of the tables' own rows."""
        self._shown = how
        try:
            yield
        finally:
            self._shown = self.whole

    def _give(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Replace own rows in a state dict by all rows. All ranks call it.

        Raises:
            ModelError: If the net is closed, so that other ranks may not answer.
        """
        for table in self.tables:
            # Tied layers have one table under several names: it is gathered once.
            found = [f"{prefix}{name}" for name in table.names if f"{prefix}{name}" in state]
            if not found:
                continue
            if not self._is_cut:
                raise ModelError(
                    "the state dict of a copy while the model is sharded, when the ranks can gather its rows",
                    f"one after net.close(), with {table.ids.numel():,} own rows of {table.shape[0]:,}",
                    where=found[0],
                    hint="state_dict() of the copy before net.close()",
                )
            # Rows of the state dict, not of the parameter: in a copy they are the copy's own.
            whole = self._shown(table, state[found[0]], f"state dict: {found[0]}")
            state.update(dict.fromkeys(found, state[found[0]] if whole is None else whole))

    def _take(self, state: MutableMapping[str, Any], prefix: str, *, assigned: bool) -> None:
        """Replace all rows in a state dict by own rows.

        Raises:
            ModelError: If a tensor has another shape, or takes the parameter's place.
        """
        if not self._is_cut:
            return
        for table in self.tables:
            for name in (f"{prefix}{each}" for each in table.names):
                value = state.get(name)
                # A missing key is torch's to report, by ``strict``.
                if not isinstance(value, Tensor):
                    continue
                if value.shape != table.shape or assigned:
                    raise ModelError(
                        f"a tensor with all rows, {list(table.shape)}, copied into the cut parameter",
                        f"shape {list(value.shape)}{', with assign=True' if assigned else ''}",
                        where=name,
                        hint="what net.state_dict() returned, or the model's before it was cut",
                    )
                state[name] = self.owned(table, value)


def _put(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, of another shape; it stays the same object."""
    if parameter.is_meta == values.is_meta:
        parameter.data = values
        return
    # ``.data`` does not take a tensor of another device than ``meta``.
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))


# Which parameters are cut -------------------------------------------------------------------------


def refuse_uncuttable(cut: bool | Sequence[str], *, staged: bool) -> None:
    """Refuse cut tables where the model does not run on one part.

    Raises:
        ConfigError: If it runs in stages or chunks.
    """
    if cut is False or not staged:
        return
    raise ConfigError(
        "one part a rank, for a table that is cut",
        "stages or chunks",
        where=WHERE,
        hint="leave cut= out: the table is whole on every rank then",
    )


def tables_in(
    model: nn.Module, cut: bool | Sequence[str], part: Partition | SetsPartition, channel: Channel
) -> CutTables:
    """Return the parameters of a model that are to be cut.

    Args:
        model: The user's module.
        cut: Their names; or True for all with a row for each vertex or edge, but weights of layers.
        part: This rank's part.
        channel: The channel of all ranks of the graph.

    Raises:
        ConfigError: If a name is unknown, or its rows are not the graph's.
    """
    if cut is False:
        return CutTables((), channel)
    if isinstance(cut, str) or not (isinstance(cut, bool) or all(isinstance(each, str) for each in cut)):
        raise ConfigError(
            "names of parameters, or True", repr(cut), where=WHERE, hint='cut=("embedding.weight",)'
        )
    held = dict(model.named_parameters(remove_duplicate=False))
    sizes = sets_of(part)
    names = _found(model, held, sizes) if isinstance(cut, bool) else list(dict.fromkeys(cut))
    if not names:
        if cut is True:
            what = "a parameter with a row for each vertex or edge"
            raise ConfigError(what, _sizes(sizes), where=WHERE, hint=_known(held))
        return CutTables((), channel)
    tables: dict[int, Table] = {}
    for name in names:
        rows = _rows_of(name, held, sizes)
        p = held[name]
        # ``named_parameters`` without duplicates would know the first name of a tied parameter only.
        every = tuple(each for each, other in held.items() if other is p)
        tables[id(p)] = Table(p, every, rows.placement, rows.own, p.shape)
    # One part has all rows. Only a saved partition may have them in another order, and then they are cut too.
    ascending = all(bool((each.own[1:] > each.own[:-1]).all()) for each in sizes)
    return CutTables(() if channel.size == 1 and ascending else tuple(tables.values()), channel)


def _found(model: nn.Module, held: Mapping[str, nn.Parameter], sizes: Sequence[RowSet]) -> list[str]:
    """Return the names of embeddings and of parameters of the user's own modules whose sizes fit."""
    return [
        name
        for name, value in tensors_of(model)
        if name in held and value.dim() and any(value.size(0) == each.size for each in sizes)
    ]


def _rows_of(name: str, held: Mapping[str, nn.Parameter], sizes: Sequence[RowSet]) -> RowSet:
    """Return what the rows of a parameter belong to.

    Raises:
        ConfigError: If there is no such parameter, or its rows are not the graph's.
    """
    if name not in held:
        raise ConfigError("the name of a parameter of the model", repr(name), where=WHERE, hint=_known(held))
    count = held[name].size(0) if held[name].dim() else -1
    # A graph with as many edges as vertices leaves it open whose rows they are.
    fits = [rows for rows in sizes if rows.size == count]
    if len(fits) != 1:
        raise ConfigError(
            "a parameter with a row for each vertex, or for each edge, of the graph",
            f"{name} of shape {list(held[name].shape)}; {_sizes(sizes)}",
            where=WHERE,
            hint="leave it out of cut=: it is whole on every rank then",
        )
    return fits[0]


def _sizes(sizes: Sequence[RowSet]) -> str:
    return f"a graph of {' and '.join(f'{each.size:,} {each.name}' for each in sizes)}"


def _known(held: Mapping[str, nn.Parameter]) -> str:
    shown = [f"{name} {list(p.shape)}" for name, p in list(held.items())[:8]]
    return f"the model has {', '.join(shown)}{', ...' if len(held) > 8 else ''}"
