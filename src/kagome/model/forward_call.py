"""Forward call: calls a user's forward with the inputs it asks for by name, or with one ``Data`` object.

Where it sits: ``model.trace.tracer`` calls the model with it; code that runs a whole model can do the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.errors import KagomeError, ModelError
from kagome.launch.os_errors import in_words
from kagome.user_frame import raised_at

_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class ForwardCall:
    """How one module's forward is called.

    Args:
        by_data: Whether forward takes one ``Data`` object.
        places: Inputs given by position.
        named: Inputs given by name.
    """

    by_data: bool
    places: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    @staticmethod
    def of(model: nn.Module, names: Collection[str]) -> ForwardCall:
        """Find how a model's forward is called.

        Args:
            model: The user's module.
            names: Names of the available inputs.

        Raises:
            ModelError: If forward asks for something that the data does not have.
        """
        plain = (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)
        parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in plain]
        needed = [p for p in parameters if p.default is p.empty]
        # ``forward(data)``: PyG's habit. ``forward(x)`` names an input and is called with that.
        if len(needed) == 1 and needed[0].name not in names:
            return ForwardCall(by_data=True)
        places: list[str] = []
        named: list[str] = []
        second = _second(names, [p.name for p in parameters])
        for place, parameter in enumerate(parameters):
            # The first two arguments are x and edge_index, whatever their names.
            name = parameter.name if parameter.name in names else {0: "x"}.get(place, "")
            name = second if place == 1 and name in ("", "edge_index") else name
            if place < 2 and parameter.kind is not parameter.KEYWORD_ONLY and name in names:
                places.append(name)
            elif parameter.name in names:
                named.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise ModelError(
                    f"data with {parameter.name!r} for forward({', '.join(p.name for p in parameters)})",
                    f"data with {', '.join(sorted(names))}",
                    hint=f"give the Data an attribute {parameter.name!r}",
                )
        return ForwardCall(False, tuple(places), tuple(named))

    @staticmethod
    def named_as(model: nn.Module, names: Collection[str]) -> ForwardCall:
        """Return how a model is called if each input has the name of one of forward's arguments.

        No input stands for an argument of another name, whereas :meth:`of` passes ``x`` as the first
        argument.

        Args:
            model: The user's module.
            names: Names of the inputs.
        """
        parameters = inspect.signature(model.forward).parameters.values()
        places = [p.name for p in parameters if p.kind in _BY_PLACE]
        # By position up to the first argument that has no input, and by name behind it.
        first = next((place for place, name in enumerate(places) if name not in names), len(places))
        named = [p.name for p in parameters if p.name in names and p.name not in places[:first]]
        return ForwardCall(False, tuple(places[:first]), tuple(named))

    def wants(self, names: Collection[str]) -> list[str]:
        """Return those of the available inputs that forward receives."""
        if self.by_data:
            # A ``Data`` counts its vertices itself; the number is no attribute of it.
            return [name for name in names if name != "num_nodes"]
        return [*self.places, *self.named]

    def call(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Call a model with its inputs, or with values that stand for them."""
        if self.by_data:
            return model(as_data(inputs))
        # As ``data.x_dict`` does, each call gives dicts of its own, to which forward may write.
        own = {name: _fresh(inputs[name]) for name in (*self.places, *self.named)}
        return model(*(own[name] for name in self.places), **{name: own[name] for name in self.named})


def _fresh(value: Any) -> Any:
    """Return a copy of a dict of tensors; any other dict is the user's own, and keeps what is written."""
    by_type = type(value) is dict and any(isinstance(each, Tensor) for each in value.values())
    return dict(value) if by_type else value


def _second(names: Collection[str], asked: Collection[str]) -> str:
    """Return the input for forward's second argument: the edges, or the sparse matrix that holds them.

    The values of the matrix reach forward as edge weights instead, if it asks for those.
    """
    weights = {"edge_weight", "edge_attr"}
    weighted = "adj_t" in names and not weights.isdisjoint(names)
    return "adj_t" if weighted and weights.isdisjoint(asked) else "edge_index"


@contextmanager
def told() -> Iterator[None]:
    """Report exceptions of a user's forward, run inside the block, as errors of the model with their line.

    Raises:
        KagomeError: As it was raised; a :class:`ModelError` from any other error, and a
            :class:`~kagome.errors.ResourceError` if memory ran out.
    """
    try:
        yield
    except KagomeError:
        raise
    except Exception as error:
        raise in_words(error) or failed(error) from error


def failed(error: Exception) -> ModelError:
    """Build the error for a forward that raised another exception."""
    words = (str(error).strip().splitlines() or [""])[0]
    return ModelError(
        "forward to run on the data as it is given",
        ": ".join(filter(None, (type(error).__name__, words[:300]))),
        where=raised_at(error),
    )


def as_data(inputs: Mapping[str, Any]) -> Data:
    """Return a ``Data`` object with these inputs, and with their number of vertices."""
    data = _Inputs(**{name: value for name, value in inputs.items() if name != "num_nodes"})
    # Behind the back of ``Data``, which would store an attribute, and give it out by ``keys()``.
    data.__dict__["count"] = inputs.get("num_nodes")
    return data


class _Inputs(Data):  # type: ignore[misc]
    """A ``Data`` object that takes the number of vertices from the rows of x, whatever stands for x."""

    count: Any = None

    @property
    def num_nodes(self) -> Any:
        # PyG would look at several attributes, and else guess from the edges, which on a part name halo rows
        # too. The size of ``x`` is symbolic on a part, and a proxy while a model is traced.
        if "x" in self:
            return self.x.size(0)
        return super().num_nodes if self.__dict__["count"] is None else self.__dict__["count"]
