"""Example models: models with branches, to be run and planned as DAGs of stages; sizes are arguments.

Where it sits: tests, benchmarks and users of ``kagome.pipeline`` build models here.

Source: the workloads of GraphPipe, ASPLOS 2025 (a multimodal transformer, DLRM, CANDLE-Uno), and a GNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch_geometric.nn import DenseGraphConv, JumpingKnowledge


class Block(nn.Module):
    """A transformer layer: attention and two linear layers, each with a norm before and a residual after.

    Args:
        width: Columns of the rows.
        heads: Attention heads; they divide the columns.
        dropout: Share dropped of each residual branch.

    Shapes: ``[B, L, width]`` -> the same.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Run the transformer layer on its input."""
        normed = self.norm1(x)
        seen, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + self.drop(seen)
        out: Tensor = x + self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return out


class MultimodalTransformer(nn.Module):
    """A tower of transformer layers for each input, followed by layers over all of them.

    Args:
        widths: Columns of each input; 0 for an input of words.
        width: Columns inside.
        layers: Layers of each tower.
        joint: Layers over all towers.
        heads: Attention heads.
        words: Number of different words.
        classes: Columns of the output.
        dropout: Share dropped in each layer.

    Shapes: inputs ``[B, L_i, widths[i]]``, or ``[B, L_i]`` integers -> ``[B, classes]``.
    """

    def __init__(
        self,
        widths: Sequence[int] = (0, 32, 24),
        *,
        width: int = 64,
        layers: int = 4,
        joint: int = 2,
        heads: int = 4,
        words: int = 1000,
        classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.reads = nn.ModuleList(nn.Linear(w, width) if w else nn.Embedding(words, width) for w in widths)
        self.towers = nn.ModuleList(
            nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers))) for _ in widths
        )
        self.joint = nn.Sequential(*(Block(width, heads, dropout) for _ in range(joint)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        """Return the class scores of each sample."""
        each = zip(self.reads, self.towers, (first, second, third), strict=True)
        # Each tower gives [B, L_i, width]; the sequences are joined along L, and their mean is classified.
        tokens = [tower(read(x)) for read, tower, x in each]
        joined = self.joint(torch.cat(tokens, dim=1))
        out: Tensor = self.head(self.norm(joined).mean(dim=1))
        return out


class DLRM(nn.Module):
    """A deep learning recommendation model: embeddings of categories, and the products of all pairs of them.

    Args:
        dense: Columns of the dense features.
        categories: Number of rows of each embedding table.
        width: Columns of each embedding.
        bottom: Hidden widths of the layers for the dense features.
        top: Hidden widths of the layers after the products.

    Shapes: ``dense [B, dense]``, ``sparse [B, tables]`` integers -> ``[B]``.

    Source: Naumov et al. 2019, Deep Learning Recommendation Model for Personalization and Recommendation.
    """

    def __init__(
        self,
        dense: int = 13,
        categories: Sequence[int] = (1000,) * 8,
        *,
        width: int = 16,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        self.bottom = _layers([dense, *bottom, width], last=True)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in categories)
        count = len(categories) + 1
        # The products of all pairs are a symmetric [count, count]
        # matrix: its lower triangle has each pair once.
        rows, columns = torch.tril_indices(count, count, offset=-1)
        self.pairs = [int(row) * count + int(column) for row, column in zip(rows, columns, strict=True)]
        self.top = _layers([width + len(self.pairs), *top, 1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return a score for each sample."""
        x = self.bottom(dense)
        # [B, count, width], then the chosen products [B, pairs]
        each = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(each, each.transpose(1, 2)).flatten(1)[:, self.pairs]
        out: Tensor = self.top(torch.cat([x, products], dim=1))
        return out.squeeze(1)


class Uno(nn.Module):
    """A model like CANDLE-Uno: towers for kinds of features, some shared by two inputs, then residual layers.

    Args:
        features: Columns of each kind of feature.
        inputs: The kind of each input; inputs of one kind share their tower's weights.
        width: Columns inside.
        tower: Layers of a tower.
        layers: Residual layers after the towers.

    Shapes: ``x [B, sum of all inputs' columns]``, ``dose [B, 1]`` -> ``[B]``.

    Source: github.com/ECP-CANDLE/Benchmarks, Pilot1/Uno; the dose has one column and no tower.
    """

    def __init__(
        self,
        features: Sequence[int] = (60, 40, 30),
        inputs: Sequence[int] = (0, 1, 2, 1, 2),
        *,
        width: int = 64,
        tower: int = 3,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(_layers([size, *[width] * tower], last=True) for size in features)
        self.kinds, self.columns = list(inputs), [features[kind] for kind in inputs]
        self.join = nn.Linear(width * len(inputs) + 1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.act, self.out = nn.ReLU(), nn.Linear(width, 1)

    def forward(self, x: Tensor, dose: Tensor) -> Tensor:
        """Return the predicted growth of each sample."""
        # The inputs lie side by side in the columns of ``x``.
        ends = list(accumulate(self.columns, initial=0))
        parts = [x[:, first:last] for first, last in pairwise(ends)]
        towers = [self.towers[kind](part) for kind, part in zip(self.kinds, parts, strict=True)]
        h = self.act(self.join(torch.cat([*towers, dose], dim=1)))
        for layer in self.layers:
            h = h + self.act(layer(h))
        out: Tensor = self.out(h)
        return out.squeeze(1)


class RelationalGNN(nn.Module):
    """A GNN on small dense graphs, one a sample: a convolution for each relation, with all layers joined.

    Args:
        features: Columns of a vertex.
        relations: Number of edge types, whose convolutions run side by side.
        width: Columns inside.
        layers: Layers, all of which JumpingKnowledge joins.
        classes: Columns of the output.

    Shapes: ``x [B, N, features]``, ``adj [B, relations, N, N]`` -> ``[B, classes]``.
    """

    def __init__(
        self, features: int = 16, relations: int = 3, *, width: int = 32, layers: int = 2, classes: int = 5
    ) -> None:
        super().__init__()
        sizes = [features, *[width] * layers]
        self.convs = nn.ModuleList(
            nn.ModuleList(DenseGraphConv(sizes[i], width) for _ in range(relations)) for i in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.jump = JumpingKnowledge("cat")
        self.head = nn.Linear(layers * width, classes)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        """Return the class scores of each graph."""
        kept = []
        for convs, norm in zip(self.convs, self.norms, strict=True):
            assert isinstance(convs, nn.ModuleList)
            # [B, N, width] for each relation, over the same rows
            each = [conv(x, adj[:, relation]) for relation, conv in enumerate(convs)]
            x = norm(torch.stack(each).sum(dim=0)).relu()
            kept.append(x)
        out: Tensor = self.head(self.jump(kept).mean(dim=1))
        return out


@dataclass(frozen=True)
class Example:
    """A model with a batch for it.

    Args:
        build: Makes the model, sized by arguments.
        batch: Makes a batch of the given number of samples for the model's default sizes, and a target.
        loss: Returns one value for each sample.
    """

    build: Callable[..., nn.Module]
    batch: Callable[[int], tuple[dict[str, Tensor], Tensor]]
    loss: Callable[..., Tensor]


def _layers(sizes: Sequence[int], *, last: bool = False) -> nn.Sequential:
    """Return linear layers with ReLU between them, and after the last one if ``last`` is set."""
    parts: list[nn.Module] = []
    for place, (before, after) in enumerate(pairwise(sizes)):
        parts.append(nn.Linear(before, after))
        if last or place < len(sizes) - 2:
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)


def _multimodal(count: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {
        "first": torch.randint(0, 1000, (count, 8)),
        "second": torch.randn(count, 6, 32),
        "third": torch.randn(count, 5, 24),
    }
    return inputs, torch.randint(0, 10, (count,))


def _dlrm(count: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {"dense": torch.randn(count, 13), "sparse": torch.randint(0, 1000, (count, 8))}
    return inputs, torch.randint(0, 2, (count,)).to(torch.get_default_dtype())


def _uno(count: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(count, 200), "dose": torch.rand(count, 1)}, torch.rand(count)


def _relational(count: int) -> tuple[dict[str, Tensor], Tensor]:
    adj = (torch.rand(count, 3, 12, 12) < 0.2).to(torch.get_default_dtype())
    return {"x": torch.randn(count, 12, 16), "adj": adj}, torch.randint(0, 5, (count,))


EXAMPLES = {
    "multimodal": Example(MultimodalTransformer, _multimodal, nn.CrossEntropyLoss(reduction="none")),
    "dlrm": Example(DLRM, _dlrm, nn.BCEWithLogitsLoss(reduction="none")),
    "uno": Example(Uno, _uno, nn.MSELoss(reduction="none")),
    "gnn": Example(RelationalGNN, _relational, nn.CrossEntropyLoss(reduction="none")),
}
"""The models by name, each with batches of random samples and a loss."""
