"""Metrics: scores of links, rankings, edges and numbers that are the same on any number of ranks.

Where it sits: a training loop of the user's own calls them with what ``kagome.shard`` returned; ``Trainer``
has its own, in ``objective``. All ranks call them alike, each with its share of the rows; all get the same
number. A rank may have no row. There is no gradient.

====================  =========================================================  ==========================
metric                what each rank gives                                       what is sent
====================  =========================================================  ==========================
hits_at               scores of its positive and of its negative pairs           k scores a rank
mean_reciprocal_rank  the same, negatives by pair                                two numbers
recall_at             own rows of users and items                                the items' rows, in blocks
average_precision     scores and labels of its rows                              the positive rows' scores
r2, mae, rmse         output and targets of its rows                             a few numbers a column
score                 output and labels of its rows, and a Trainer's metric      a few numbers a class
====================  =========================================================  ==========================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.config import Train
from kagome.errors import ModelError
from kagome.graph.structure.labels import Labels, joined, labels_of
from kagome.objective.losses import objective_of
from kagome.objective.metrics import NUMBERS, mean_r2, metric_of
from kagome.sharding.module import ShardedModel

__all__ = ["average_precision", "hits_at", "mae", "mean_reciprocal_rank", "r2", "recall_at", "rmse", "score"]


def hits_at(net: ShardedModel, positive: Tensor, negative: Tensor, k: int) -> float:
    """Return hits@K: the share of positive pairs that score above the K-th best negative pair of all ranks.

    Args:
        net: What :func:`kagome.shard` returned.
        positive: Scores of this rank's positive pairs.
        negative: Scores of this rank's negative pairs.
        k: K. With fewer than K negatives all positives are hits, as in OGB's evaluator.

    Raises:
        ModelError: If there is no positive pair on any rank, a score is NaN, or k is below 1.

    Shapes:
        positive ``[P]``, negative ``[Q]``, of other sizes on each rank.

    Cost:
        At most K numbers from each rank to each other.

    Example:
        >>> import torch, kagome
        >>> from torch_geometric.nn import GCN
        >>> data = kagome.load("digits")
        >>> with kagome.shard(GCN(64, 16, num_layers=2), data) as net:
        ...     kagome.metrics.hits_at(net, torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]), k=1)
        0.5
    """
    channel, name = net._mesh.graph, "kagome.metrics.hits_at"
    _at_least_one(k, name)
    positive, negative = _scores(positive), _scores(negative)
    _refuse_nan(channel, name, positive, negative)
    # The K best of all ranks are among the K best of each.
    best = _joined(channel, negative.topk(min(k, negative.numel())).values, f"{name}: best negatives")
    hits = positive > best.topk(k).values[-1] if best.numel() >= k else torch.ones_like(positive).bool()
    return _mean(channel, hits.double(), name)


def mean_reciprocal_rank(net: ShardedModel, positive: Tensor, negative: Tensor) -> float:
    """Return the mean of one over the rank of each positive pair among its own negatives.

    Of negatives with the same score half count as better, as in OGB's evaluator.

    Args:
        net: What :func:`kagome.shard` returned.
        positive: Scores of this rank's positive pairs.
        negative: Scores of the negatives of each of them.

    Raises:
        ModelError: If there is no positive pair on any rank, a score is NaN, or the sizes differ.

    Shapes:
        positive ``[P]``, negative ``[P, M]``.

    Cost:
        Two numbers.
    """
    channel, name = net._mesh.graph, "kagome.metrics.mean_reciprocal_rank"
    positive, negative = _scores(positive), negative.detach().double()
    if negative.dim() != 2 or negative.size(0) != positive.numel():
        raise ModelError(
            f"negatives of each positive pair, [{positive.numel()}, M]",
            f"shape {list(negative.shape)}",
            where=name,
        )
    _refuse_nan(channel, name, positive, negative)
    own = positive.unsqueeze(1)
    # The mean of the best and the worst place among equal scores.
    rank = ((negative > own).sum(1) + (negative >= own).sum(1)) / 2 + 1
    return _mean(channel, 1 / rank.double(), name)


def average_precision(net: ShardedModel, scores: Tensor, labels: Tensor) -> float:
    """Return the average precision of all ranks' rows, as scikit-learn's ``average_precision_score``.

    Args:
        net: What :func:`kagome.shard` returned.
        scores: A score for each of this rank's rows, of vertices, edges or pairs.
        labels: Whether each is positive: 0 or 1.

    Raises:
        ModelError: If no row on any rank is positive, a score is NaN, or the sizes differ.

    Shapes:
        scores ``[n]``, labels ``[n]``.

    Cost:
        The scores of positive rows from each rank to each other, and as many counts.
    """
    channel, name = net._mesh.graph, "kagome.metrics.average_precision"
    scores, positive = _scores(scores), labels.reshape(-1) > 0
    _refuse_unlike(scores, positive, name)
    _refuse_nan(channel, name, scores)
    # Each positive row counts with the precision at its own score: of all rows that score as much or more,
    # the share of positive ones.
    theirs = _joined(channel, scores[positive], f"{name}: scores of positive rows").sort().values
    mine = scores[~positive].sort().values
    # [positive rows of all ranks]: how many of this rank's other rows score as much or more.
    above = mine.numel() - torch.searchsorted(mine, theirs)
    others = channel.all_reduce(above.double(), action=f"{name}: negatives above")
    hits = (theirs.numel() - torch.searchsorted(theirs, theirs)).double()
    _refuse_none(theirs.numel(), name, "positive row")
    return float((hits / (hits + others)).mean())


def recall_at(
    net: ShardedModel,
    rows: Tensor | tuple[Tensor, Tensor],
    wanted: Tensor,
    k: int,
    *,
    items: Tensor | None = None,
    known: Tensor | None = None,
    sets: tuple[str, str] | None = None,
    block: int = 4096,
) -> float:
    """Return recall@K: for each user, the share of wanted items that are among the K best ones; their mean.

    A score is the product of a user's row with an item's. Each rank ranks all items for its own users. The
    rows of items arrive in blocks, so no rank holds a score for each user and item. Of items with the same
    score the one with the smaller id is better.

    Args:
        net: What :func:`kagome.shard` returned.
        rows: Own rows of all vertices, such as the model's output; with ``sets``, those of users and those of
            items.
        wanted: Pairs of user and item, ids of the whole graph, of each set by itself; the same on all ranks.
            The users are those that occur here.
        k: K.
        items: The ids of all items, the same on all ranks; with ``sets`` it may be left out for all of them.
        known: Pairs of user and item that are left out of the ranking, such as those of the training.
        sets: The vertex sets of users and of items, in a graph of several.
        block: Items, and users, whose scores are held at a time.

    Raises:
        ModelError: If there is no pair, a row is NaN, ``rows`` are not this rank's own, or it is not said
            which vertices are items.

    Shapes:
        rows ``[n, F]``, or twice that, wanted ``[2, P]``, items ``[I]``, known ``[2, Q]``.

    Cost:
        The rows of items from each rank to each other. Memory for ``block * block`` scores, K items a user,
        and all items' rows of one block.
    """
    channel, name = net._mesh.graph, "kagome.metrics.recall_at"
    _at_least_one(k, name)
    of_users, of_items = _own_rows(net, rows, sets, name)
    if items is None:
        if sets is None:
            raise ModelError(
                "the ids of all items", "none", where=name, hint="items=..., or sets=(users, items)"
            )
        items = torch.arange(net._rows.named(sets[1], name).size)
    _refuse_none(wanted.size(1), name, "wanted pair")
    for each in (of_users, of_items) if sets else (of_users,):
        _refuse_nan(channel, name, each.rows)
    # A pair that is listed twice is wanted once.
    wanted = wanted.to(of_users.ids.device).unique(dim=1)
    # Each user is ranked by the rank that owns it; a rank may own none.
    users, ranked = of_users.among(wanted[0]), of_items.among(items)
    best = _best_items(channel, users, ranked, known, k, block, name)
    user, item = _of_users(wanted, users.ids)
    hit = (best[user] == item.unsqueeze(1)).any(1)
    # [hits, wanted items] by user.
    found = torch.zeros(2, users.ids.numel(), dtype=torch.float64, device=hit.device)
    found[0].index_add_(0, user, hit.double())
    found[1].index_add_(0, user, torch.ones_like(hit, dtype=torch.float64))
    return _mean(channel, found[0] / found[1], name)


def mae(net: ShardedModel, out: Tensor, y: Tensor) -> float:
    """Return the mean absolute error of all ranks' rows; columns count alike.

    Args:
        net: What :func:`kagome.shard` returned.
        out: The output for this rank's rows.
        y: Their targets.

    Raises:
        ModelError: If there is no row on any rank, or the sizes differ.

    Shapes:
        out and y ``[n]`` or ``[n, C]``.
    """
    gap, channel = _gap(out, y, "kagome.metrics.mae"), net._mesh.graph
    return _mean(channel, gap.abs(), "kagome.metrics.mae")


def rmse(net: ShardedModel, out: Tensor, y: Tensor) -> float:
    """Return the root of the mean squared error of all ranks' rows, that of each column, and their mean.

    Args:
        net: What :func:`kagome.shard` returned.
        out: The output for this rank's rows.
        y: Their targets.

    Raises:
        ModelError: If there is no row on any rank, or the sizes differ.

    Shapes:
        out and y ``[n]`` or ``[n, C]``.
    """
    name, channel = "kagome.metrics.rmse", net._mesh.graph
    total = _total(channel, _gap(out, y, name).square(), name)
    # The root after the sum over ranks: roots of parts do not add up.
    return float((total[0] / total[1]).sqrt().mean())


def r2(net: ShardedModel, out: Tensor, y: Tensor) -> float:
    """Return R2 of all ranks' rows, as scikit-learn's ``r2_score``: that of each column, and their mean.

    Args:
        net: What :func:`kagome.shard` returned.
        out: The output for this rank's rows.
        y: Their targets.

    Raises:
        ModelError: If there is no row on any rank, or the sizes differ.

    Shapes:
        out and y ``[n]`` or ``[n, C]``.
    """
    name, channel = "kagome.metrics.r2", net._mesh.graph
    lost = _total(channel, _gap(out, y, name).square(), name)[0]
    target = _columns(y)
    mean = _total(channel, target, name)
    # A second pass around the mean: in one pass large targets lose all their digits.
    spread = _total(channel, (target - mean[0] / mean[1]).square(), name)[0]
    return mean_r2(lost, spread)


# By name -----------------------------------------------------------------------------------------


def score(net: ShardedModel, metric: str, out: Tensor, y: Tensor) -> float | None:
    """Return what a ``Trainer`` with ``train.metric`` reports of all ranks' rows.

    Args:
        net: What :func:`kagome.shard` returned.
        metric: ``accuracy``, ``f1_micro``, ``f1_macro``, ``roc_auc``, ``average_precision``, ``mse``,
            ``mae``, ``rmse`` or ``r2``.
        out: The output for this rank's rows: a column a class or label, or one logit of two classes.
        y: Their labels: class ids, several labels of 0 and 1, or numbers. NaN is no label, and -1 no class.

    Returns:
        The score; None without labels, and of one class for ``roc_auc``.

    Raises:
        ModelError: If the output has other rows or columns than the labels, or the score is no number.
        ConfigError: If there is no such metric, or it does not suit the labels.
        DataError: If the labels are no finite numbers.

    Shapes:
        out ``[n]`` or ``[n, C]``, y ``[n]`` or ``[n, C]``.

    Cost:
        For ``roc_auc`` and ``average_precision`` a score and a label a row to rank 0.

    Example:
        >>> import kagome
        >>> from torch_geometric.nn import GCN
        >>> data = kagome.load("digits")
        >>> with kagome.shard(GCN(64, 16, num_layers=2, out_channels=10), data) as net:
        ...     out = net(data.x, data.edge_index)
        ...     0 <= kagome.metrics.score(net, "accuracy", out, net.place(data.y)) <= 1
        True
    """
    name, channel = "kagome.metrics.score", net._mesh.graph
    _refuse_unlike(out.new_empty(out.shape[:1]), y.new_empty(y.shape[:1]), name)
    told: Any = channel.gather_objects((labels_of(y), y.size(0)), name, (Labels,))
    facts, counts = zip(*told, strict=True)
    # The default loss of the labels, or one of numbers, says how columns are read.
    loss, train = "mse" if metric in NUMBERS else None, Train()
    objective = objective_of(loss, joined(facts), train, sum(counts))
    found = metric_of(metric, objective, train)
    found.check(out)
    rows = {"given": torch.ones(y.size(0), dtype=torch.bool, device=y.device)}
    target = objective.target({"y": y}, slice(None))
    return found.scores(out.detach(), target, rows, channel, name)["given"]


# Rankings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnRows:
    """Own rows of some vertices of one set.

    Args:
        ids: Their ids, ascending.
        rows: Their rows.
    """

    ids: Tensor
    rows: Tensor

    def among(self, ids: Tensor) -> _OwnRows:
        """Return those of some vertices."""
        kept = torch.isin(self.ids, ids.to(self.ids.device))
        return _OwnRows(self.ids[kept], self.rows[kept])


def _own_rows(
    net: ShardedModel, rows: Tensor | tuple[Tensor, Tensor], sets: tuple[str, str] | None, name: str
) -> tuple[_OwnRows, _OwnRows]:
    """Return own rows of the vertices among which users are, and of those among which items are.

    Raises:
        ModelError: If they are not this rank's own.
    """
    each = rows if isinstance(rows, tuple) else (rows, rows)
    if isinstance(rows, tuple) != (sets is not None):
        raise ModelError(
            "rows of users and rows of items, with the sets of both; or rows of one set",
            f"{'two' if isinstance(rows, tuple) else 'one'}, and sets={sets!r}",
            where=name,
            hint='recall_at(net, (users, items), wanted, k, sets=("user", "item"))',
        )
    held = [net._rows.named(which, name) for which in sets or (None, None)]
    for value, named in zip(each, held, strict=True):
        if value.dim() != 2 or value.size(0) != named.count:
            raise ModelError(
                f"{named.count:,} own rows of {named.name}, [n, F]", f"shape {list(value.shape)}", where=name
            )
    one, two = (_OwnRows(named.own, value.detach()) for value, named in zip(each, held, strict=True))
    return one, two


def _best_items(
    channel: Channel, users: _OwnRows, items: _OwnRows, known: Tensor | None, k: int, block: int, name: str
) -> Tensor:
    """Return the ids of the K best of all ranks' items for each own user. All ranks call it.

    Shapes:
        ``[users, K]``; -1 where there are fewer items.
    """
    hidden = torch.empty(2, 0, dtype=torch.int64) if known is None else known
    count, mine = users.ids.numel(), items.ids
    user, item = _of_users(hidden.to(mine.device), users.ids)
    best = users.rows.new_full((count, k), float("-inf")), mine.new_full((count, k), -1)
    # All ranks give a piece of each block, and as many pieces as the rank with most items has.
    each = max(1, block // channel.size)
    most = torch.tensor([-(-mine.numel() // each), int(mine.max()) + 1 if mine.numel() else 0])
    turns, size = map(int, channel.all_reduce(most, "max", action=f"{name}: blocks"))
    # The column of each item in the present block; -1 for items of other blocks.
    place = mine.new_full((size,), -1)
    for turn in range(turns):
        now = slice(turn * each, (turn + 1) * each)
        ids = _joined(channel, mine[now], f"{name}: items")
        theirs = _joined(channel, items.rows[now], f"{name}: rows of items")
        place[ids] = torch.arange(ids.numel(), device=ids.device)
        # Where the scores of known pairs are in this block, so that they can be left out.
        at = place[item.clamp(max=place.numel() - 1)]
        at[item >= place.numel()] = -1  # known pairs with what is no item
        for start in range(0, count, block):
            some = slice(start, min(start + block, count))
            # [users of this turn, items of this block]: the only scores that are held.
            scores = users.rows[some] @ theirs.t()
            out = (at >= 0) & (user >= some.start) & (user < some.stop)
            scores[user[out] - some.start, at[out]] = float("-inf")
            merged = _merged((best[0][some], best[1][some]), scores, ids)
            best[0][some], best[1][some] = merged
        place[ids] = -1  # the next block has other items
    # Items that are left out have no place in the ranking, even where no others are left.
    return torch.where(best[0] == float("-inf"), -1, best[1])


def _merged(best: tuple[Tensor, Tensor], scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and ids of the K best of those so far and of a block, in an order without chance."""
    both = torch.cat([best[0], scores], dim=1)
    each = torch.cat([best[1], ids.expand(scores.size(0), -1)], dim=1)
    # Ids ascend first, and a stable sort keeps that order among equal scores: which of them are kept does
    # not depend on how the items are dealt to ranks and blocks.
    by_id = each.argsort(dim=1)
    both, each = both.gather(1, by_id), each.gather(1, by_id)
    order = both.sort(dim=1, descending=True, stable=True).indices[:, : best[0].size(1)]
    return both.gather(1, order), each.gather(1, order)


def _of_users(pairs: Tensor, users: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of users, and items, of the pairs of these users; users ascend."""
    pairs = pairs[:, torch.isin(pairs[0], users)]
    return torch.searchsorted(users, pairs[0].contiguous()), pairs[1]


# Sums and refusals -------------------------------------------------------------------------------


def _scores(values: Tensor) -> Tensor:
    return values.detach().double().reshape(-1)


def _columns(values: Tensor) -> Tensor:
    values = values.detach().double()
    return values.unsqueeze(1) if values.dim() == 1 else values.flatten(1)


def _gap(out: Tensor, y: Tensor, name: str) -> Tensor:
    _refuse_unlike(out, y, name)
    return _columns(out) - _columns(y)


def _joined(channel: Channel, rows: Tensor, action: str) -> Tensor:
    """Return the rows of all ranks, in rank order, on every rank."""
    found = channel.gather_rows(rows, action=action)
    assert found is not None
    return torch.cat(found).to(rows.device)


def _total(channel: Channel, values: Tensor, name: str) -> Tensor:
    """Return the sum and the number of rows of all ranks, by column.

    Raises:
        ModelError: If there are none.

    Shapes:
        ``[n, C]`` -> ``[2, C]``.
    """
    # Sums and counts of one message; their quotient after the sum over ranks is the mean of all rows.
    state = torch.stack([values.sum(0), torch.full_like(values.sum(0), values.size(0))])
    total = channel.all_reduce(state, action=name)
    _refuse_none(int(total[1].max()), name, "row")
    return total


def _mean(channel: Channel, values: Tensor, name: str) -> float:
    total = _total(channel, _columns(values), name)
    return float((total[0] / total[1]).mean())


def _refuse_none(count: int, name: str, what: str) -> None:
    if not count:
        raise ModelError(f"a {what} or more", "none on any rank", where=name)


def _refuse_unlike(one: Tensor, other: Tensor, name: str) -> None:
    if one.shape != other.shape:
        raise ModelError(
            "two tensors of one shape",
            f"{list(one.shape)} and {list(other.shape)}",
            where=name,
            hint="net.place(y) for this rank's rows of targets",
        )


def _refuse_nan(channel: Channel, name: str, *values: Tensor) -> None:
    """Refuse NaN on any rank, on all ranks together: no order has a place for it."""
    own = sum(int(value.isnan().sum()) for value in values)
    count = int(channel.all_reduce(torch.tensor([float(own)]), action=f"{name}: NaN"))
    if count:
        raise ModelError("scores that are numbers", f"{count:,} NaN", where=name)


def _at_least_one(k: int, name: str) -> None:
    if k < 1:
        raise ModelError("k of 1 or more", f"{k}", where=name)
