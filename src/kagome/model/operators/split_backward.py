"""Split backward: the gradients of a stage's inputs first, those of its weights when there is time.

Where it sits: ``pipelining.dag.stage_run`` makes one for each micro-batch of a zero-bubble program, and
``profile.operators`` times what two halves cost.

::

    loss ── N3 ── N2 ── N1 ── received value        I   runs along the path, and keeps the gradient that comes
             │     │     │                              to each N beside which there are weights
             w3    b2    w1                         W   runs from each N to its weights

Gradients of vectors, as of the bias b2, are part of the first half: they cost less than a call of their own,
and one kernel of a norm computes them with those of its input.

``torch.distributed.pipelining`` splits a backward in this way too. Its function detaches the outputs in
place, which views do not allow, and frees what a second group of weights may still need; hence this one.

Source: zero bubble pipelines (Qi et al., ICLR 2024); the walk is that of ``stage_backward_input`` of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from kagome.errors import ModelError
from kagome.model.operators import autocast

LEAF: Final = "torch::autograd::AccumulateGrad"
"""The name of the node that adds to the gradient of a weight, or of a received value."""
NONE: Final[frozenset[Any]] = frozenset()
"""No weights."""
Come = tuple[Tensor | None, ...]
"""The gradients that have come to a node, one for each of its outputs."""


class SplitBackward:
    """A backward in two halves, whose sum is that of one ``torch.autograd.backward``.

    The first half is for some leaves, and for vectors that are read on the paths to them; the second for all
    other weights.

    Args:
        roots: The tensors to start from.
        gradients: The gradient of each; None for a scalar.
        leaves: The tensors whose gradients are wanted first.

    Raises:
        ModelError: If a step has a reentrant checkpoint, whose backward torch cannot do in two.

    Cost: a walk over the nodes of the graph. The graph is kept until the second half is done.
    """

    def __init__(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> None:
        # The tensors stay here, because nodes of Python functions do not keep their graph alive.
        self._roots, self._leaves = roots, leaves
        self._edges = [get_gradient_edge(root) for root in roots]
        self._given = [
            torch.ones_like(root) if given is None else given
            for root, given in zip(roots, gradients, strict=True)
        ]
        self._ends = {get_gradient_edge(leaf).node for leaf in leaves}
        self._through: set[Node] = set()
        # For each node, the weights of the second half that it reaches without a node on a path to a leaf.
        self._weights: dict[Node, AbstractSet[Any]] = {}
        self._vectors: set[Any] = set()
        self._come: dict[Node, Come] = {}
        if leaves:
            self._walk()

    def _walk(self) -> None:
        """Find the paths, what lies beside them, and the vectors that lie beside nothing else."""
        through, weights, ends = self._through, self._weights, self._ends
        roots = [edge.node for edge in self._edges]
        vectors, late = set[Any](), set[Any](roots)
        for node, below in _sources_first(roots):
            beside = [weights[other] for other in below if other not in through]
            if node in ends or len(beside) < len(below):
                through.add(node)
                self._vectors.update(other for other in below if other in vectors)
            else:
                # A gradient that comes through this node is of the second half, and each is added to once.
                late.update(other for other in below if other in vectors)
            # By name: the node of a user's function has any attribute that its forward gave it.
            if not below and node.name() == LEAF and node not in ends:
                beside.append({node})
                if node.variable.dim() < 2:  # type: ignore[attr-defined]
                    vectors.add(node)
            weights[node] = beside[0] if len(beside) == 1 else NONE.union(*beside)
        self._vectors -= late
        # The second half must not add to a vector that the first half has added to.
        for node in through:
            if weights[node]:
                weights[node] = weights[node] - self._vectors

    def inputs(self) -> None:
        """Compute the gradients of the leaves, and add those of vectors, to their ``.grad``."""
        if not self._leaves:
            return
        starts = [
            (edge, given)
            for edge, given in zip(self._edges, self._given, strict=True)
            if edge.node in self._through
        ]
        # A root beside all paths to a leaf belongs to the second half, with the gradient that it has.
        for edge, given in zip(self._edges, self._given, strict=True):
            if edge.node not in self._through:
                before = self._come.get(edge.node, ())
                self._come[edge.node] = _added(before, edge.output_nr, given)
        if not starts:
            return
        with ExitStack() as hooks, autocast.without(self._roots[0].device):
            for node in self._through:
                if self._weights[node]:
                    hooks.callback(node.register_prehook(self._keeping(node)).remove)
            torch.autograd.backward(
                [edge for edge, _ in starts],
                [given for _, given in starts],
                retain_graph=True,
                inputs=[*self._leaves, *(vector.variable for vector in self._vectors)],
            )

    def weights(self) -> None:
        """Add the gradients of all other weights to their ``.grad``."""
        # Nothing is received: the second half is the whole, as one walk.
        if not self._leaves:
            with autocast.without(self._roots[0].device):
                torch.autograd.backward(self._roots, self._given)
            return
        for nodes in self._groups():
            with ExitStack() as hooks, autocast.without(self._roots[0].device):
                # What comes to a node on a path is replaced by what came to it in the first half. Hooks on
                # its value run again here, and would change that a second time. And of two uses of one
                # weight, the first may lie on the second one's path, so that its share would be added again.
                # (A root beside all paths has its own gradient alone, to which the engine adds the others'.)
                for node in self._through.intersection(nodes):
                    hooks.callback(node.register_prehook(_replacing(self._come[node])).remove)
                edges = [
                    (GradientEdge(node, place), gradient)
                    for node in nodes
                    for place, gradient in enumerate(self._come[node])
                    if gradient is not None
                ]
                weights = set[Any]().union(*(self._weights[node] for node in nodes))
                torch.autograd.backward(
                    [edge for edge, _ in edges],
                    [gradient for _, gradient in edges],
                    retain_graph=True,  # groups may share nodes on their paths
                    inputs=[weight.variable for weight in weights],
                )

    def _groups(self) -> Iterator[list[Node]]:
        """Yield the nodes that gradients start from, those with a weight in common together."""
        groups: list[tuple[AbstractSet[Any], list[Node]]] = []
        for node in self._come:
            own, nodes = self._weights[node], [node]
            if not own:
                continue
            for group in [group for group in groups if group[0] & own]:
                groups.remove(group)
                own, nodes = own | group[0], group[1] + nodes
            groups.append((own, nodes))
        yield from (nodes for _, nodes in groups)

    def _keeping(self, node: Node) -> Callable[[Come], None]:
        def keep(come: Come) -> None:
            self._come[node] = come

        return keep


def _replacing(kept: Come) -> Callable[[Come], Come]:
    return lambda come: kept


def _added(before: Come, place: int, gradient: Tensor) -> Come:
    """Return gradients with one more, which is added where there is one already."""
    found = [*before, *[None] * (place + 1 - len(before))]
    old = found[place]
    found[place] = gradient if old is None else old + gradient
    return tuple(found)


def _sources_first(starts: Iterable[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield the nodes of a graph with those that each leads to, each after all of these."""
    below: dict[Node, list[Node]] = {}
    waiting = [(node, False) for node in starts]
    while waiting:
        node, left = waiting.pop()
        if left:
            yield node, below[node]
        elif node not in below:
            below[node] = [other for other, _ in node.next_functions if other is not None]
            if node.name() == "CheckpointFunctionBackward":
                raise ModelError(
                    "checkpoints whose backward can be done in two halves, for zero-bubble",
                    "torch.utils.checkpoint with use_reentrant=True",
                    hint="use_reentrant=False",
                )
            waiting.append((node, True))
            waiting += [(other, False) for other in below[node]]
