"""What a pipeline of a DAG refuses, in words that say what, where and what to try; and a rank that fails."""

from __future__ import annotations

import contextlib
import io
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kagome
from dags import plan_of, sgd, task, trained
from kagome.comm.channel import Channel
from kagome.errors import CommError, ConfigError, DataError, ModelError, PlanError, ScheduleError
from kagome.pipelining.dag import auto_plan
from unseen import Made

LOSS = nn.MSELoss(reduction="none")


class Small(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.between = between
        if isinstance(between, str):
            self.register_buffer("count", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if isinstance(self.between, str):
            self.count += 1.0
        else:
            h = self.between(h)
        return self.last(h)


class Pair(Small):
    """Gives two tensors."""

    def __init__(self, between: Any, named: bool = False) -> None:
        super().__init__(between)
        self.named = named

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return {"out": self.last(h), "hidden": h} if self.named else (self.last(h), h)


class Open(nn.Module):
    """Takes inputs that have no names."""

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


class Contrastive(nn.Linear):
    """Compares all samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(F.linear(x, self.weight), dim=-1)
        return (h @ h.T) * 10.0


DROPPING = nn.GRU(4, 2, num_layers=2, dropout=0.5, batch_first=True)


def written(h: Tensor) -> Tensor:
    h[:, 0] = 0.0
    return h


def half(m: Made, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.a(x)


def made(model: nn.Module, sample: Any = None, **options: Any) -> Any:
    sample = torch.randn(8, 4) if sample is None else sample
    return kagome.pipeline(model, sample, **{"loss": LOSS, "channel": Channel(None, "cpu"), **options})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Small(lambda h: h - h.mean(0)),
            r"'mean', which gives a sample values that differ by .* of the largest",
        ),
        (Small(lambda h: h * torch.softmax(h, 0)), "'softmax', which gives a sample"),
        (Small(lambda h: h + torch.randn_like(h)), "'randn_like', which gives a sample"),
        (Small(nn.BatchNorm1d(6)), r"'between', a BatchNorm1d(.|\n)*batch_norm=\"micro-batch\""),
        (Small("counts"), "stops it|changes the buffers"),
        (Small(lambda h: h + h.relu_()), r"changes 'first' in|'relu_', which changes 'first', read by"),
        (Small(written), "'setitem', which changes 'first'(.|\n)*a new tensor in its place: torch.where"),
        (Small(lambda h: h.tanh() if isinstance(h, Tensor) else h), "in training(.|\n)*is last, after first"),
        (Small(lambda h: operator.iadd(h, h.detach()) + h), "in training(.|\n)*is last, after first"),
        (Small(nn.AlphaDropout(0.5)), "alpha_dropout, which has none"),
        (Pair(nn.ReLU()), "one tensor with samples along axis 0; got a tuple of 2 values"),
        (Pair(nn.ReLU(), named=True), "got a dict of 'out', 'hidden'"),
        (
            Contrastive(4, 6),
            r"'mul', which gives a tensor of shape \[4, 4\], in which samples have no axis of their own",
        ),
        (Small(lambda h: h * 2 if h.sum() > 0 else h), r"put these lines into a module of its own"),
        (Small(lambda h: h @ torch.ones(3, 3)), "'matmul', which raised RuntimeError"),
        (
            Small(lambda h: h + h[5:].sum()),
            "'sum_1', which gives a sample values that differ",
        ),  # of 8 samples
        (
            Small(nn.utils.spectral_norm(nn.Linear(6, 6))),
            r"a forward that changes the buffers \['between.weight_u'",
        ),
        (Made(lambda m, x: m.a(x).squeeze(), a=nn.Linear(4, 1)), r"1 of them \[\](.|\n)*squeeze\(-1\)"),
        (
            Made(lambda m, x: m.a(x[x[:, 0] > 0]), a=nn.Linear(4, 1)),
            "gives|'fixed'|for any number of samples",
        ),
        (
            Made(lambda m, x: m.g(x[:, None])[0][:, 0], g=DROPPING),
            "'g', a GRU that drops within its kernel",
        ),
        (
            Made(lambda m, x: (m.a(x),), a=nn.Linear(4, 2)),
            "tuple of 1 value(.|\n)*without the tuple around it",
        ),
        (Made(lambda m, x: {"y": m.a(x)}, a=nn.Linear(4, 2)), "dict of 'y'(.|\n)*without the dict around it"),
        (Made(lambda m, x: None), "a value of type NoneType(.|\n)*a tensor that forward computes"),
        (Made(half, a=nn.Linear(4, 2)), "a torch.autocast of its own(.|\n)*around kagome.pipeline, step and"),
        (nn.LSTM(4, 2, batch_first=True), r"several tensors in one value(.|\n)*self.layer\(x\)\[0\]"),
        (nn.Sequential(), "got its input 'input'"),
    ],
)
def test_models_whose_samples_are_not_independent(model, text):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=text):
        made(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.randn(3, 4), "y": torch.randn(3, 4)}, r"\['y'\] as well"),
        ({}, r"a batch without \['x'\]"),
        ((torch.randn(3, 4), torch.randn(3, 4)), "a batch of 1 inputs by place for forward(.|\n)*; got 2"),
        ({"x": [1.0, 2.0]}, "got a list"),
        (torch.tensor(1.0), "without axes as 'x'"),
        (torch.randn(1, 4), "2 samples or more"),
    ],
)
def test_batches_that_do_not_fit(batch, text):
    with pytest.raises(DataError, match=text):
        made(Small(nn.ReLU()), batch)


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (plan_of(8, ("first", 1, 2), ("between last", 1, 2)), PlanError, "in 2 stages; got 1"),
        (plan_of(8, ("first between", 1, 2)), PlanError, r"got \['last'\] in none"),
        (plan_of(8, ("first between last more", 1, 2)), PlanError, "'more'"),
        (plan_of(8, ("first between last", 1, 3)), ScheduleError, "whole number of micro-batches"),
        (plan_of(8, ("first between last", 1, 0)), PlanError, "a sample for each of its devices"),
        (plan_of(16, ("first between last", 1, 2)), PlanError, "a plan for batch=8 samples; got one for 16"),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit(plan, error, text):
    with pytest.raises(error, match=text):
        made(Small(nn.ReLU()), plan=plan, batch=8)


def test_what_a_step_is_given(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_of(8, ("first between last", 1, 4)).to_json())
    pipe = made(Small(nn.ReLU()), plan=path)
    assert pipe.program == "0F0 0B0 0F1 0B1\n"
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    assert pipe.step((x,), y) == pytest.approx(float(pipe.evaluate(x, y)), rel=2e-2)
    assert pipe.predict(x[:5]).shape == (5, 2)
    pipe.load_state_dict({key: value * 0 for key, value in pipe.state_dict().items()})
    assert not pipe.predict(x).any()
    assert len(pipe.all_spans()) == 1
    for batch, target, error, text in (
        (x[:6], y[:6], DataError, "8 samples, as in the plan; got 6"),
        (x.double(), y, DataError, "torch.float64"),
        (torch.randn(8, 3), y, DataError, r"\[3\]"),
        (x * float("nan"), y, ModelError, "finite"),
    ):
        with pytest.raises(error, match=text):
            pipe.step(batch, target)
    with pytest.raises(ConfigError, match="a value a sample"):
        made(Small(nn.ReLU()), loss=F.mse_loss).step(x, y)
    with pytest.raises(ConfigError, match="callable"):
        made(Small(nn.ReLU()), optimizer=torch.optim.SGD([y.requires_grad_()], 0.1))
    with pytest.raises(PlanError, match="devices=4"):
        made(Small(nn.ReLU()), devices=4)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (torch.tanh, ModelError, "got a builtin_function_or_method"),
        (nn.ModuleList([nn.Linear(4, 2)]), ModelError, "a ModuleList without a forward"),
        (nn.Linear(4, 2, device="meta"), ModelError, r"got weight, a meta tensor(.|\n)*to_empty"),
        (torch.jit.script(nn.Sequential(nn.Linear(4, 2))), ModelError, "give the module that was scripted"),
        (Open(), DataError, r"0 inputs by place for forward\(\*xs\)(.|\n)*name each input in forward's"),
    ],
)  # fmt: skip
def test_what_is_no_model_to_cut(model, error, text):
    with pytest.raises(error, match=text):
        made(model)


def test_gradients_of_samples_add_up():
    """Frequencies are those of a whole batch; a backward may mix samples though the forward does not."""
    table, ids = nn.Embedding(3, 4, scale_grad_by_freq=True), torch.tensor([0, 0, 1, 0, 2, 1, 0, 0])
    with pytest.raises(ModelError, match=r"a gradient of 'table.weight' over 4 samples that is not the sum"):
        made(Made(lambda m, x: m.out(m.table(x)), table=table, out=nn.Linear(4, 2)), ids)


def test_what_crosses_has_samples(ranks):
    plan = plan_of(8, ("first", 1, 2), ("last", 1, 2))
    text = (
        r"'flatten', which gives a tensor of shape \[8, 6\], in which samples have no(.|\n)*'first' and what"
    )
    with pytest.raises(ModelError, match=text):
        ranks(2, folded, plan)


class Folded(Small):
    """Two rows a sample between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.unsqueeze(1).expand(-1, 2, -1)).flatten(0, 1)
        return self.last(h).unflatten(0, (-1, 2)).sum(1)


def folded(channel: Channel, plan: Any) -> list[tuple[str, ...]]:
    pipe = made(Folded(nn.ReLU()), plan=plan, channel=channel)
    return [stage.operators for stage in pipe.plan.stages]


@pytest.mark.parametrize("plan", [None, "auto"])
def test_no_plan_of_ours_cuts_what_cannot_cross(ranks, plan):
    assert ranks(2, folded, plan)[0] == [("first", "last")]


class Picky(nn.Linear):
    """Fails where it is measured, on rank 0 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(F.linear(x, self.weight))


class Cubed(torch.autograd.Function):
    """A user's function whose backward fails: the error is to reach every rank in its own words."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise NotImplementedError("no backward yet")


def picky(channel: Channel) -> str:
    with pytest.raises(ModelError) as caught:
        made(Picky(4, 2), channel=channel)
    return str(caught.value)


def test_what_rank_0_fails_with_is_said_by_all(ranks):
    one, other = ranks(2, picky)
    assert one == other
    assert "NotImplementedError: no backward yet" in one


def failed_search(channel: Channel) -> str:
    def fails(*_args: Any, **_rest: Any) -> Any:
        raise ZeroDivisionError("no cost")

    before, auto_plan.measured = auto_plan.measured, fails
    try:
        with pytest.raises(ModelError) as caught:
            made(Small(nn.ReLU()), plan="auto", channel=channel)
    finally:
        auto_plan.measured = before
    return str(caught.value)


def test_any_error_of_the_search_is_said_by_all(ranks):
    """Only Kagome's own errors were: with another one rank 0 ended alone, and the others waited for it."""
    for text in ranks(2, failed_search):
        assert "ZeroDivisionError: no cost" in text


def test_the_memory_of_a_host_is_shared_by_its_own_ranks(monkeypatch):
    """It was divided by the number of all ranks."""
    monkeypatch.setattr(auto_plan, "available_bytes", lambda: 8.0)

    def told(free: Any) -> Any:
        others = [("a", 8.0), ("a", free), ("b", 7.0), ("b", 6.0)]
        return SimpleNamespace(device=torch.device("cpu"), size=4, gather_objects=lambda *_: others)

    assert auto_plan._memory(told(8.0)) == 3.0
    assert auto_plan._memory(told(2.0)) == 1.0
    assert auto_plan._memory(told(None)) == 3.0


def test_predict_leaves_each_layer_in_its_mode():
    model, x = Small(nn.Dropout(0.5)), torch.randn(8, 4)
    with made(model, x) as pipe:
        for training in (True, False):
            model.train(training)
            model.between.train(not training)
            pipe.predict(x)
            assert model.training is training
            assert model.between.training is not training


def norms(channel: Channel) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, x = Small(nn.BatchNorm1d(6)), torch.randn(8, 4)
    plan = plan_of(8, ("first between", 2, 8), ("last", 1, 4))
    pipe = made(model, x, plan=plan, channel=channel, batch_norm="micro-batch", optimizer=sgd)
    pipe.step(x, torch.randn(8, 2))
    own = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    whole = {key: value.clone() for key, value in pipe.state_dict().items() if "running" in key}
    assert channel.rank == 2 or all(torch.equal(own[key], whole[key]) for key in own)
    return whole


def test_batch_norms_have_two_samples():
    model, x, y = Small(nn.BatchNorm1d(6)), torch.randn(8, 4), torch.randn(8, 2)
    pipe = made(model, x, plan="auto", batch_norm="micro-batch")
    assert all(stage.micro_batch >= 2 for stage in pipe.plan.stages)
    pipe.step(x, y)
    plan = plan_of(8, ("first between last", 1, 1))
    with pytest.raises(PlanError, match="got 1 for 'between': micro-batches of 1 on 1 devices"):
        made(model, x, plan=plan, batch_norm="micro-batch")


def planned_norms(channel: Channel, plan: Any, count: int) -> list[tuple[int, int]]:
    torch.manual_seed(0)  # one batch on all ranks
    model, x = Small(nn.BatchNorm1d(6)), torch.randn(count, 4)
    pipe = made(model, x, plan=plan, channel=channel, batch_norm="micro-batch", optimizer=sgd)
    pipe.step(x, torch.randn(count, 2))
    return [(s.micro_batch, s.devices) for s in pipe.plan.stages if "between" in s.operators]


@pytest.mark.parametrize(("world", "plan", "count"), [(2, None, 4), (2, "auto", 4), (4, "auto", 4)])
def test_no_plan_of_ours_gives_a_batch_norm_one_sample(ranks, world, plan, count):
    for found in ranks(world, planned_norms, plan, count):
        assert all(size // devices >= 2 for size, devices in found)


def test_a_batch_that_no_plan_fits():
    for plan in (None, "auto"):
        with pytest.raises(PlanError, match=r"2 samples (at|or more)(.|\n)*a larger batch"):
            made(Small(nn.BatchNorm1d(6)), plan=plan, batch=1, batch_norm="micro-batch")


def test_batch_norms_of_micro_batches(ranks):
    found = ranks(3, norms)
    assert all(torch.equal(found[0][key], rank[key]) for rank in found for key in rank)
    assert found[0]["between.running_mean"].abs().max() > 0


def failing(channel: Channel) -> str:
    """Rank 1's loss fails; rank 0 waits for its gradients."""
    model, inputs, target, _ = task("gnn", 8)

    def broken(out: Tensor, y: Tensor) -> Tensor:
        raise FloatingPointError("rank 1 fails")

    stages = ("convs.0 norms.0", 1, 2), ("convs.1 norms.1 jump head", 1, 2)
    pipe = kagome.pipeline(model, inputs, loss=broken, plan=plan_of(8, *stages), channel=channel)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            pipe.step(inputs, target)
    except (ConfigError, CommError) as error:
        error.add_note(said.getvalue())
        raise
    return "went on"


def test_a_rank_that_fails_ends_all(ranks):
    with pytest.raises(ConfigError, match="FloatingPointError: rank 1 fails") as caught:
        ranks(2, failing)
    notes = "\n".join(caught.value.__notes__)
    assert "kagome: rank 1 stopped here in update 1:\n1RECV_F0 1F0 " in notes
    assert "'0RECV_B0, update 1'" in notes
    assert "CommError" in notes


def differing(channel: Channel) -> None:
    trained(
        channel, "gnn", plan_of(8, ("convs.0", 1, 2), ("norms convs.1 jump head", 1, 2 + 2 * channel.rank))
    )


def test_ranks_with_different_plans(ranks):
    with pytest.raises(PlanError, match="got different ones on ranks 0 and 1"):
        ranks(2, differing)
