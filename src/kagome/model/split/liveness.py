"""Liveness: which steps can be recomputed in any stage, and up to where each value of a graph is read.

Where it sits: ``stages`` asks it where a graph can be cut and which values would be sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kagome.errors import ModelError
from kagome.model.split.balance import Floats
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey, Value

_SHAPES = ("size", "dim", "ndimension", "numel", "nelement")
_SHAPE_NAMES = ("shape", "dtype", "device", "ndim")
_VIEWS = (
    *("view", "view_as", "reshape", "getitem", "t", "transpose"),
    *("squeeze", "unsqueeze", "flatten", "detach"),
)


@dataclass(frozen=True, eq=False)
class Liveness:
    """The flow of values through a graph.

    Args:
        graph: The graph.
        body: Steps that are run once, in one stage, in order.
        recomputed: Names of the other steps: each stage that reads them computes them.
        readers: Indices in the body that read each value of the body, also through recomputed steps; the
            output is read by the last one.
        firm: Values that cannot be sent, with the reason.
        until: Value -> the last index that changes it in place: it cannot be sent before.
        same_state: Step -> the last index that changes the same buffers, of a module called twice.
    """

    graph: LayerGraph
    body: tuple[Step, ...]
    recomputed: frozenset[str]
    readers: Mapping[str, tuple[int, ...]]
    firm: Mapping[str, str]
    until: Mapping[str, int]
    same_state: Mapping[str, int]

    @staticmethod
    def of(graph: LayerGraph, survey: Survey) -> Liveness:
        """Find the flow of values through a graph, from a survey of it.

        Raises:
            ModelError: If forward changes an input in place, because each stage has its own inputs.
        """
        by_name = {step.name: step for step in graph.steps}
        changed = {step.name: _roots(step, by_name) for step in graph.steps if step.changes}
        fixed = {name for names in changed.values() for name in names}
        for step in graph.steps:
            given = [name for name in step.changes if name in graph.inputs]
            if given:
                raise ModelError(
                    "a pipeline to give each stage the graph's own inputs",
                    f"a forward that changes {given[0]!r} in place ({step.name})",
                    where=step.line,
                    hint="leave out inplace=True there",
                )
        # Computed by each stage that reads them: weights and buffers,
        # functions of inputs and buffers (``free``), sizes.
        recomputed: set[str] = set()
        free = set(graph.inputs)
        for step in graph.steps:
            if step.name in fixed or step.changes or survey.changed.intersection(step.buffers):
                continue  # a value that changes must be read in order, where it changes
            if step.kind == "attribute":
                recomputed.add(step.name)
                free |= set() if step.parameters else {step.name}
            elif not step.layer and not step.parameters and free.issuperset(step.reads):
                recomputed.add(step.name)
                free.add(step.name)
            elif _of_shapes(step, recomputed | free, survey):
                recomputed.add(step.name)
        body = tuple(step for step in graph.steps if step.name not in recomputed)
        flow = Liveness(graph, body, frozenset(recomputed), {}, {}, {}, {})
        readers: dict[str, list[int]] = {step.name: [] for step in body}
        for place, step in enumerate(body):
            for name in flow.needed(step.reads)[1]:
                readers[name].append(place)
        for name in flow.needed([graph.output])[1] if body else ():
            if not readers[name] or readers[name][-1] < len(body) - 1:
                readers[name].append(len(body) - 1)
        # No cut between a value and the last step that writes to it: the stage before would keep the old one.
        until = {
            name: place
            for place, step in enumerate(body)
            for name in changed.get(step.name, ())
            if name in readers
        }
        firm = {
            step.name: "is no tensor with a row a vertex or an edge"
            for step in body
            if survey.values[step.name].kind == "none"
        }
        # Nor between two calls of a module that moves a buffer in each: both must see one buffer.
        state = [set(step.buffers) & survey.changed for step in body]
        same_state = {
            step.name: max((k for k in range(place, len(body)) if state[place] & state[k]), default=place)
            for place, step in enumerate(body)
            if state[place]
        }
        return Liveness(
            graph, body, flow.recomputed, {k: tuple(v) for k, v in readers.items()}, firm, until, same_state
        )

    def needed(self, names: Iterable[str]) -> tuple[set[str], set[str], set[str]]:
        """Return what values are computed from: steps to recompute, values of the body, inputs."""
        by_name = {step.name: step for step in self.graph.steps}
        values = {step.name for step in self.body}
        recomputed: set[str] = set()
        found: set[str] = set()
        inputs: set[str] = set()
        left = list(names)
        while left:
            name = left.pop()
            if name in values:
                found.add(name)
            elif name not in by_name:
                inputs.add(name)
            elif name not in recomputed:
                recomputed.add(name)
                left += by_name[name].reads
        return recomputed, found, inputs

    def barred(self) -> list[bool]:
        """Return for each step of the body whether a cut before it is ruled out."""
        out = [False] * len(self.body)
        for place, step in enumerate(self.body):
            last = max(self.until.get(step.name, place), self.same_state.get(step.name, place))
            if step.name in self.firm:
                last = max((last, *self.readers[step.name]))
            # A cut at k lies before step k of the body.
            for between in range(place + 1, last + 1):
                out[between] = True
        return out

    def blocked(self) -> tuple[Step, str, str] | None:
        """Return the first step that no cut can separate from a value it reads, the value, and the reason."""
        for place, step in enumerate(self.body):
            later = [reader for reader in self.readers[step.name] if reader > place]
            if step.name in self.firm and later:
                return self.body[later[-1]], step.name, self.firm[step.name]
            if self.until.get(step.name, place) > place:
                return self.body[self.until[step.name]], step.name, "is changed in place"
            if self.same_state.get(step.name, place) > place:
                return self.body[self.same_state[step.name]], step.name, "is the same module, with a state"
        return None

    def seconds(self, seconds: Mapping[str, float]) -> list[float]:
        """Return the seconds of each step of the body, and of recomputed steps that it needs first."""
        counted: set[str] = set()
        out = []
        for step in self.body:
            # A step that several stages recompute counts once, with the first that needs it.
            recomputed = self.needed(step.reads)[0] - counted
            counted |= recomputed
            out.append(seconds.get(step.name, 0.0) + sum(seconds.get(name, 0.0) for name in recomputed))
        return out

    def bytes(self, survey: Survey, vertices: int, edges: int) -> Floats:
        """Return the bytes that a stage of steps i to j - 1 receives.

        Shapes:
            ``[n + 1, n + 1]`` for n steps of the body, at ``[i, j]``.
        """
        # A value made by step m and read by steps r1 < r2 (a skip connection):
        #
        #     out[i, j] += width   m < i <= r1, j > r1     a stage with r1 that begins behind m receives it
        #                          r1 < i <= r2, j > r2    one with r2 but not r1 has it from the stage of r1
        #
        # The sum along j turns "ends right behind the reader" into "ends anywhere behind it".
        count = len(self.body)
        out = np.zeros((count + 1, count + 1))
        for place, step in enumerate(self.body):
            value = survey.values.get(step.name, Value("none"))
            width = value.bytes(vertices, edges) * (2 if value.grad else 1)
            before = place
            for reader in self.readers[step.name]:
                # A stage that holds this reader, but begins after the previous one, receives the value.
                out[before + 1 : reader + 1, reader + 1] += width
                before = max(reader, before)
        return np.cumsum(out, axis=1)


def _roots(step: Step, by_name: Mapping[str, Step]) -> set[str]:
    """Return the values that a step changes in place, and those that they are views of."""
    found: set[str] = set()
    left = list(step.changes)
    while left:
        name = left.pop()
        found.add(name)
        maker = by_name.get(name)
        if maker is not None and _called(maker) in _VIEWS:
            left += maker.reads[:1]
    return found


def _called(step: Step) -> str:
    return step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")


def _of_shapes(step: Step, known: Collection[str], survey: Survey) -> bool:
    """Return whether a step returns a size or the like, or computes one from others."""
    if survey.values[step.name].kind != "none" or step.layer or step.parameters:
        return False
    # ``x.size(0)``, ``x.shape[1]``, ``len(x)``, and arithmetic with them.
    if step.kind == "method" and step.target in _SHAPES:
        return True
    if step.kind == "function" and step.target is getattr and step.args[1] in _SHAPE_NAMES:
        return True
    return step.kind in ("function", "method") and (step.target is len or set(step.reads) <= set(known))
