"""Operator graph: a model's steps as a DAG of operators, and the pieces that run sets of operators.

Where it sits: ``planner`` chooses sets of operators by name, and ``pipelining.dag`` runs the pieces, one a
stage.

An operator is a call of a layer, together with the function calls around it. A value goes from the piece that
computes it to each piece that reads it. Values computed from inputs, weights and constants alone are computed
wherever they are read, and so are values that are not tensors.

::

    towers   a.lin ── relu ──┐                    relu reads a.lin alone and belongs to it.
                             cat ── top.lin       cat reads two operators and top.lin alone reads it:
             b.lin ── relu ──┘                    it belongs to top.lin, else to the last that it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from torch import nn

from kagome.errors import ModelError
from kagome.model.forward_call import ForwardCall
from kagome.model.operators.pieces import Piece
from kagome.model.operators.probe import Fact, Probe, compare, compare_gradients, probe
from kagome.model.operators.samples import Batch, inputs_of
from kagome.model.trace.builder import OF_SAMPLES
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import trace

# Operators that change a proxy's value in place, and those that return a new one.
_OUT_OF_PLACE: Final[Mapping[Any, Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

_ANEW: Final = "a new tensor in its place: torch.where, torch.cat, or the method without its last underscore"
_WRONG_OUTPUTS: Final = {
    "input": "a forward that ends in a layer: there is nothing to train in what it gives back",
    "several": "return one of them, or for a layer of torch's own a module around it whose forward does: "
    "self.layer(x)[0], say",
    "fixed": "return a row a sample; take a mean over the batch in the loss",
    "none": "return a tensor that forward computes from its inputs",
    "samples": "out.movedim(axis, 0) at the end of forward",
}


class Branches:
    """A model as a DAG of operators.

    Args:
        graph: Steps of the model.
        found: Facts that a probe found about the steps.

    Raises:
        ModelError: If the output is not a tensor with samples along axis 0, or if a value that is changed in
            place is read elsewhere.
    """

    def __init__(self, graph: LayerGraph, found: Probe) -> None:
        self.facts: Mapping[str, Fact] = found.facts
        self.places = found.places
        steps = [_out_of_place(step) for step in _alive(graph)]
        self.graph = replace(graph, steps=tuple(steps))
        self._by_name = {step.name: step for step in steps}
        self._order = {step.name: place for place, step in enumerate(steps)}
        self._check()
        self.owner: dict[str, str] = {}
        """Operator of each step that belongs to one."""
        self._assign()
        self.operators: dict[str, list[Step]] = {name: [] for name in self._names}
        """Steps of each operator; the operators are in topological order."""
        for step in steps:
            if step.name in self.owner:
                self.operators[self.owner[step.name]].append(step)
        self._closures = {name: self._closure(own) for name, own in self.operators.items()}
        self._read = {value for _, takes, _ in self._closures.values() for value in takes}

    def reads(self, name: str) -> tuple[str, ...]:
        """Return the operators whose values an operator reads."""
        _, takes, _ = self._closures[name]
        return tuple(dict.fromkeys(self.owner[value] for value in takes))

    @cached_property
    def bound(self) -> tuple[tuple[str, str], ...]:
        """Pairs of operators that must share a stage, because the value between them cannot be sent."""
        return tuple(
            dict.fromkeys(
                (self.owner[value], name)
                for name, (_, takes, _) in self._closures.items()
                for value in takes
                if self.facts[value].kind != "samples"
            )
        )

    def pieces(self, groups: Sequence[Collection[str]]) -> tuple[Piece, ...]:
        """Return a piece for each set of operators.

        Args:
            groups: Sets of operators, each operator in exactly one.

        Raises:
            ModelError: If a value sent between pieces is not a tensor with samples along an axis.
        """
        home = {name: number for number, names in enumerate(groups) for name in names}
        inside = [
            [s for s in self.graph.steps if home.get(self.owner.get(s.name, "")) == number]
            for number in range(len(groups))
        ]
        # Pieces form a DAG: a value is sent directly to each piece that reads it, and not passed on.
        closures = [self._closure(steps) for steps in inside]
        place = {value: home[name] for value, name in self.owner.items() if name in home}
        out = []
        for number, (steps, takes, inputs) in enumerate(closures):
            for value in takes:
                self._check_crossing(value, number)
            gives = {
                other: tuple(v for v in theirs[1] if place[v] == number)
                for other, theirs in enumerate(closures)
                if other != number and any(place[v] == number for v in theirs[1])
            }
            sources = sorted({place[v] for v in takes})
            taken = {one: tuple(v for v in takes if place[v] == one) for one in sources}
            output = self.graph.output if place.get(self.graph.output) == number else None
            out.append(Piece(number, steps, taken, gives, inputs, output))
        return tuple(out)

    def alone(self, name: str) -> Piece:
        """Return the piece of a single operator: it takes values from piece 0 and gives some to piece 2."""
        steps, takes, inputs = self._closures[name]
        read = [step.name for step in self.operators[name] if step.name in self._read]
        output = self.graph.output if self.owner[self.graph.output] == name else None
        gives = {2: tuple(read)} if read else {}
        return Piece(1, steps, {0: tuple(takes)} if takes else {}, gives, inputs, output)

    # Assignment of steps to operators -------------------------------------------------------------

    def _free(self, step: Step) -> bool:
        """Return whether a step is computed wherever its value is read."""
        return step.name not in self.owner

    def _assign(self) -> None:
        """Assign each step that is not free to an operator."""
        steps, output = self.graph.steps, self.graph.output
        roots: dict[str, frozenset[str]] = {}
        behind: dict[str, frozenset[str]] = {}  # operators that free steps read nevertheless
        index: dict[str, int] = {}
        calls: dict[str, int] = {}
        for step in steps:
            # A value that is no tensor, or has no sample axis, is free: computed wherever it is read.
            kind = self.facts[step.name].kind
            made_of = frozenset[str]().union(*(roots.get(name, frozenset()) for name in step.reads))
            before = made_of.union(*(behind.get(name, frozenset()) for name in step.reads))
            if kind in ("none", "fixed") and step.name != output:
                behind[step.name] = before
                continue
            name = ""
            if step.kind == "module":
                name = step.path or step.name
                calls[name] = calls.get(name, 0) + 1
                name = name if calls[name] == 1 else f"{name}#{calls[name]}"
            # A function of weights and inputs alone: with no layer before it, it is an operator itself.
            elif not made_of and (step.name == output or step.parameters):
                name = step.name
            if name:
                index[name] = len(index)
                self.owner[step.name], made_of = name, frozenset((name,))
            roots[step.name] = made_of
        self._names = tuple(index)
        sinks = self._sinks()
        for step in steps:
            made_of = roots.get(step.name, frozenset())
            if step.name in self.owner or not made_of:
                continue
            # Made of one operator: that one. Of several, read by one operator: the reader, so that a join is
            # computed where its value is used. Of several, read by several: the last of them.
            last = max(made_of, key=index.__getitem__)
            several = [r for r in step.reads if r in self.owner and self.facts[r].kind == "several"]
            reader = next(iter(sinks[step.name])) if len(sinks[step.name]) == 1 else ""
            if several:  # a step that takes one of several tensors stays with their operator
                last = max((self.owner[r] for r in several), key=index.__getitem__)
            elif len(made_of) > 1 and reader:
                last = reader
            # Free steps that it reads may be made of later operators, before which it cannot run.
            late = made_of.union(*(behind.get(name, frozenset()) for name in step.reads))
            self.owner[step.name] = max(last, *late, key=index.__getitem__)

    def _sinks(self) -> dict[str, set[str]]:
        """Return for each step the operators that read it through functions alone; "" is the caller."""
        found: dict[str, set[str]] = {step.name: set() for step in self.graph.steps}
        found[self.graph.output].add("")
        for step in reversed(self.graph.steps):
            # Backwards through functions that have no owner yet, up to the operators that read them.
            reached = {self.owner[step.name]} if step.name in self.owner else found[step.name]
            for name in step.reads:
                if name in found:
                    found[name] |= reached
        return found

    def _closure(self, own: Iterable[Step]) -> tuple[list[Step], list[str], list[str]]:
        """Return steps with the free steps they need, the values they take, and the inputs they read."""
        inside = {step.name: step for step in own}
        takes: dict[str, None] = {}
        inputs: set[str] = set()
        left = list(inside.values())
        while left:
            for name in left.pop().reads:
                step = self._by_name.get(name)
                if step is None:
                    inputs.add(name)
                elif name in inside:
                    continue
                elif self._free(step):
                    inside[name] = step
                    left.append(step)
                else:
                    takes[name] = None
        steps = sorted(inside.values(), key=lambda step: self._order[step.name])
        ordered = sorted(takes, key=self._order.__getitem__)
        return steps, ordered, [name for name in self.graph.inputs if name in inputs]

    # Checks ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        output = self.facts.get(self.graph.output)
        if output is not None and output.kind == "odd":
            step = self._by_name[self.graph.output]
            raise ModelError(
                "a pipeline's model to return one tensor with a row a sample, made of that sample alone",
                f"{step.called!r}, which gives {output.told}, as in a product of a batch with itself",
                where=step.line or step.path,
                hint="train what compares all samples of a batch (a @ b.T) without a pipeline: no "
                "micro-batch has all of them",
            )
        if output is None or output.kind != "samples" or output.axis:
            raise ModelError(
                OF_SAMPLES.output,
                f"its input {self.graph.output!r}" if output is None else output.told,
                hint=_WRONG_OUTPUTS["input" if output is None else output.kind],
            )
        readers: dict[str, list[str]] = {}
        for step in self.graph.steps:
            for name in step.reads:
                readers.setdefault(name, []).append(step.name)
        for step in self.graph.steps:
            for name in step.changes:
                if readers[name] != [step.name]:
                    raise ModelError(
                        "what a step changes in place to be read by that step alone",
                        f"{step.called!r}, which changes {name!r}, read by {readers[name]}",
                        where=step.line or step.path,
                        hint="inplace=False" if step.path or "inplace" in step.kwargs else _ANEW,
                    )

    def _check_crossing(self, value: str, number: int) -> None:
        fact = self.facts[value]
        if fact.kind != "samples":
            step = self._by_name[value]
            raise ModelError(
                "what crosses between stages to be a tensor with samples along one axis",
                f"{step.called!r}, which gives {fact.told}",
                where=step.line or step.path,
                hint=f"have {self.owner[value]!r} and what reads it in one stage (it is read in {number})",
            )


def branches_of(model: nn.Module, sample: Batch, *, batch_norm: str = "refuse") -> Branches:
    """Trace a model, probe it with a few samples, and name its operators.

    Args:
        model: The user's module.
        sample: A batch of two samples or more.
        batch_norm: ``refuse``, or ``micro-batch`` for separate statistics of each micro-batch.

    Raises:
        DataError: If the sample does not fit the model.
        ModelError: If the model cannot be traced, its steps do not compute what forward computes, or its
            samples depend on each other.
    """
    inputs = inputs_of(model, sample)
    calling = ForwardCall.named_as(model, inputs)
    graph = trace(model, list(inputs), words=OF_SAMPLES, calling=calling)
    branches = Branches(graph, probe(model, graph, inputs, batch_norm=batch_norm))
    compare(model, branches.graph, inputs, batch_norm=batch_norm)
    compare_gradients(model, branches.graph, inputs, batch_norm=batch_norm)
    return branches


def _alive(graph: LayerGraph) -> list[Step]:
    """Return the steps that the output needs, and those that change values it needs in place."""
    needed = {graph.output}
    kept = []
    for step in reversed(graph.steps):
        if step.name in needed or needed & set(step.changes):
            needed |= {step.name, *step.reads}
            kept.append(step)
    return kept[::-1]


def _out_of_place(step: Step) -> Step:
    """Turn ``x += y`` into ``x + y``, because x may have come from another stage."""
    if step.kind == "function" and step.target in _OUT_OF_PLACE:
        return replace(step, target=_OUT_OF_PLACE[step.target])
    return step
