"""Stage run: one chunk in one stage of a rank, with its inputs, its outputs and its backward pass.

Where it sits: ``chunk_passes`` makes one for each stage, chunk and epoch. The stage's steps run here, with
the chunk's interceptor active. Samples of a batch have ``dag.stage_run``: they do not read each other,
so that they need no interceptor, but their values come in parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kagome.deferred import rewrite_rules
from kagome.intercept.active import ActiveInterceptor
from kagome.intercept.interceptor import Interceptor
from kagome.model.split.stages import Stage
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey
from kagome.pipelining.foreign_weights import watched
from kagome.placement.placement import Placement, PlacementKind
from kagome.positions.vertex_tables import refuse_some_rows


@dataclass(frozen=True)
class StageCode:
    """One stage of a model, ready to run.

    Args:
        model: The user's module.
        graph: The steps of the whole model.
        survey: Shape, dtype and kind of each step's value.
        stage: The stage, which names the steps that it runs.
        current: Holds the interceptor that is active.
        cast: Makes the context of mixed precision.
        save_activations: Makes the context that measures or offloads activations.
        foreign: The weights that other ranks train, by name; their values here are out of date.
    """

    model: nn.Module
    graph: LayerGraph
    survey: Survey
    stage: Stage
    current: ActiveInterceptor
    cast: Any
    save_activations: Callable[[], AbstractContextManager[None]]
    foreign: Mapping[str, Tensor] = field(default_factory=dict)

    def shape(self, name: str, scope: Interceptor) -> tuple[int, ...]:
        """Return the shape that a value has on a chunk."""
        value = self.survey.values[name]
        if value.kind == "fixed":
            return tuple(value.shape)
        rows = scope.own if value.kind == "rows" else scope.views[0].edge_index.size(1)
        return (rows, *value.shape)


@dataclass
class StageRun:
    """One chunk's run through one stage in one pass.

    Args:
        code: The stage.
        scope: The chunk's interceptor.
        epoch: The epoch.
        training: Whether a backward follows.
        checked: Whether ranks compare the headers of their messages.
        named: How often the chunk has reached each site on this rank; its runs in other stages share this
            counter.
        values: The values that earlier stages have sent, by name.
        outs: The values that the stage has computed for later stages or as the output, by name.
        token: The scalar that makes backward reach every exchange; see [Note: token] in ``halo.exchange``.
        roots: Further tensors that backward starts from, such as the loss, each with its gradient or None.
        gradients: The gradients that later stages have sent back, by name.
        lost: The chunk's share of the loss, in float64 on the device.
    """

    code: StageCode
    scope: Interceptor
    epoch: int
    training: bool
    checked: bool = False
    named: Counter[str] = field(default_factory=Counter)
    values: dict[str, Tensor] = field(default_factory=dict)
    outs: dict[str, Tensor] = field(default_factory=dict)
    token: Tensor | None = None
    roots: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    lost: Tensor | float = 0.0

    def take(self, name: str, value: Tensor) -> None:
        """Store a value that an earlier stage has sent, as a leaf with its placement."""
        known = self.code.survey.values[name]
        # A leaf, so that backward ends here and leaves the gradient that is sent back in `.grad`.
        leaf = value.detach()
        if known.kind == "rows":
            leaf = self.scope.placements.put(leaf, Placement(PlacementKind.ROWS))
        elif known.kind == "edges":
            leaf = self.scope.placements.put(
                leaf, Placement(PlacementKind.PAIRS, 0, edges=self.scope.views[0].edge_index)
            )
        self.values[name] = leaf.requires_grad_(known.grad and self.training)

    def returned(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that a later stage has sent back; several stages may read one value."""
        before = self.gradients.get(name)
        self.gradients[name] = gradient if before is None else before + gradient

    def forward(self) -> None:
        """Run the stage's steps on the chunk."""
        code, stage, scope = self.code, self.code.stage, self.scope
        names = {name for given in stage.gives.values() for name in given}
        names |= {stage.output} if stage.output is not None else set()
        inputs = {name: scope.inputs[name] for name in stage.inputs}
        root = type(code.model).__name__
        draws = code.survey.draws if self.training else code.survey.eval_draws

        def before(step: Step) -> None:
            # Dropout masks depend on the number of the draw. It must be that of the whole model's forward,
            # whichever stages come before on other ranks.
            scope.forward.draws = draws[step.name]
            scope.forward.path[:] = [step.within or root]

        # The forward pass is left at once, because what it holds must not outlive the chunk.
        with (
            self._running(),
            scope.running(
                self.epoch, training=self.training, checked=self.checked, named=self.named
            ) as forward_pass,
            code.cast(),
            code.save_activations() if self.training else nullcontext(),
            watched(code.foreign if self.checked else {}, "a hook of a layer"),
        ):
            found = code.graph.run(
                code.model,
                {**inputs, **self.values},
                training=self.training,
                steps=stage.steps,
                before=before,
                keep=names,
            )
            refuse_some_rows(scope, found, "a stage")
            # Deferred sums are computed here: the next stage receives values, not expressions.
            self.outs = {name: rewrite_rules.computed(value) for name, value in found.items()}
        self.token = forward_pass.token

    def _running(self) -> AbstractContextManager[None]:
        return self.code.current.using(self.scope)

    def backward(self) -> None:
        """Run backward from the gradients of later stages, the loss and the token."""
        # One backward call from all roots. Several calls would need the graph twice where roots share it.
        pairs = [(self.outs[name], gradient) for name, gradient in self.gradients.items()]
        roots: list[tuple[Tensor, Tensor | None]] = [pair for pair in pairs if pair[0].requires_grad]
        roots += self.roots
        if self.token is not None and self.token.requires_grad:
            roots.append((self.token, None))  # [Note: token] in halo.exchange
        if roots:
            with self._running():
                torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        # Frees the chunk's graph as soon as its backward is done; `values` stay for `gradient`.
        self.outs, self.gradients, self.roots, self.token = {}, {}, [], None

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a value that an earlier stage sent; zeros if it has none."""
        leaf = self.values[name]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
