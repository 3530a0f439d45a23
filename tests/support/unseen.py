"""Modules of many kinds for ``kagome.pipeline``, and each one's plain training to compare with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kagome
from dags import sgd
from kagome.errors import KagomeError

COUNT = 8
LOSS = nn.MSELoss(reduction="none")
Case = tuple[nn.Module, Any, Tensor]
MODELS: dict[str, Callable[[], Case]] = {}


class Made(nn.Module):
    """A forward as a function of the module and its inputs."""

    def __init__(self, call: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.call = call
        for name, value in held.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


class Either(nn.Module):
    """Two inputs, of which one alone may come, under names that graphs do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, a: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        h = 0.0 if a is None else self.one(a)
        return self.out(h if x is None else h + self.other(x).tanh())


def samples(*shape: int) -> Tensor:
    return torch.randn(COUNT, *shape)


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[make.__name__] = make
    return make


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *more, nn.Linear(6, 3))


# A layer of torch's own as the whole model -------------------------------------------------------------


@case
def transformer() -> Case:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return model, (samples(5, 8), samples(4, 8)), samples(4, 8)


@case
def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), samples(5, 8), samples(5, 8)


@case
def bilinear() -> Case:
    return nn.Bilinear(4, 5, 3), (samples(4), samples(5)), samples(3)


@case
def embedding() -> Case:
    return nn.Embedding(10, 3), torch.randint(0, 10, (COUNT,)), samples(3)


# How it is called --------------------------------------------------------------------------------------


@case
def second_of_two() -> Case:
    return Either(), {"x": samples(4)}, samples(3)


@case
def first_of_two() -> Case:
    return Either(), {"a": samples(4)}, samples(3)


@case
def both_in_another_order() -> Case:
    return Either(), {"x": samples(4), "a": samples(4)}, samples(3)


@case
def compiled() -> Case:
    return torch.compile(layers(nn.ReLU()), backend="eager"), samples(4), samples(3)  # type: ignore[return-value]


@case
def compiled_layer() -> Case:
    block = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")
    return layers(block), samples(4), samples(3)  # type: ignore[arg-type]


# What goes between its layers ---------------------------------------------------------------------------


@case
def state_handed_over() -> Case:
    def call(m: Made, x: Tensor) -> Tensor:
        out, state = m.one(x)
        return m.out(m.other(out, state)[0][:, -1])

    one, other = nn.LSTM(4, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)
    return Made(call, one=one, other=other, out=nn.Linear(6, 3)), samples(5, 4), samples(3)


@case
def samples_and_heads_on_one_axis() -> Case:
    def call(m: Made, x: Tensor) -> Tensor:
        heads = m.first(x).view(x.size(0), 5, 2, 3).transpose(1, 2).reshape(-1, 5, 3)
        return m.out(m.mix(heads).view(x.size(0), 2, 5, 3).transpose(1, 2).flatten(2).mean(1))

    held = {"first": nn.Linear(4, 6), "mix": nn.Linear(3, 3), "out": nn.Linear(6, 3)}
    return Made(call, **held), samples(5, 4), samples(3)


@case
def attention_with_its_weights() -> Case:
    def call(m: Made, x: Tensor) -> Tensor:
        found, weights = m.attention(x, x, x)
        return m.out(found.mean(1)) + m.more(weights.flatten(1))

    held = {"attention": nn.MultiheadAttention(8, 2, batch_first=True)}
    return Made(call, **held, out=nn.Linear(8, 3), more=nn.Linear(25, 3)), samples(5, 8), samples(3)


# What it is made of --------------------------------------------------------------------------------------


@case
def a_bias_that_a_norm_takes_away() -> Case:
    convolution, norm = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)
    return nn.Sequential(convolution, norm, nn.Flatten(), nn.Linear(36, 3)), samples(3, 5, 5), samples(3)


@case
def nested_and_in_place() -> Case:
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Sequential(nn.Linear(6, 6), nn.ELU(inplace=True)))
    return layers(inner, nn.Sequential()), samples(4), samples(3)


@case
def tied_frozen_unused() -> Case:
    table, out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    out.weight = table.weight
    frozen = nn.Linear(8, 8).requires_grad_(False)
    call = lambda m, x: m.out(m.frozen(m.table(x)).mean(1))  # noqa: E731
    model = Made(call, table=table, frozen=frozen, out=out, unused=nn.Linear(2, 2))
    return model, torch.randint(0, 10, (COUNT, 5)), samples(10)


@case
def called_twice_and_listed() -> Case:
    def call(m: Made, x: Tensor) -> Tensor:
        return m.out(sum(layer(m.first(m.first(x).tanh())) for layer in m.several) * m.scale)

    several = nn.ModuleList([nn.Linear(4, 6) for _ in range(3)])
    held = {"first": nn.Linear(4, 4), "several": several, "out": nn.Linear(6, 3)}
    return Made(call, **held, scale=torch.rand(6)), samples(4), samples(3)


@case
def a_learned_token() -> Case:
    def call(m: Made, x: Tensor) -> Tensor:
        rows = torch.cat([m.token.expand(x.size(0), -1, -1), m.read(x)], 1)
        return m.out(m.layer(rows)[:, 0])

    held = {"token": nn.Parameter(torch.randn(1, 1, 8)), "read": nn.Linear(4, 8), "out": nn.Linear(8, 3)}
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Made(call, **held, layer=layer), samples(5, 4), samples(3)


@case
def integers_of_bytes() -> Case:
    call = lambda m, x: m.out(m.first(x.to(m.first.weight.dtype).flatten(1) / 255))  # noqa: E731
    model = Made(call, first=nn.Linear(12, 6), out=nn.Linear(6, 3))
    return model, torch.randint(0, 255, (COUNT, 3, 2, 2), dtype=torch.uint8), samples(3)


@case
def sparse_gradients() -> Case:
    call = lambda m, x: m.out(m.table(x).mean(1))  # noqa: E731
    model = Made(call, table=nn.Embedding(9, 6, sparse=True), out=nn.Linear(6, 3))
    return model, torch.randint(0, 9, (COUNT, 4)), samples(3)


@case
def hooks_on_weights() -> Case:
    model, copy = layers(nn.Tanh()), {}
    model[0].weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    model[2].weight.register_hook(lambda grad: grad / grad.norm())

    def step(weight: Tensor) -> None:  # an optimizer of its own, within the backward
        copy["steps"] = copy.get("steps", 0) + 1
        weight.data -= 0.1 * copy["steps"] * weight.grad.clamp(-1e-3, 1e-3)
        weight.grad = None

    model[2].bias.register_post_accumulate_grad_hook(step)
    return model, samples(4), samples(3)


# Trained ------------------------------------------------------------------------------------------------


def built(name: str) -> Case:
    torch.manual_seed(5)
    return MODELS[name]()


def piped(channel: Any, names: list[str], schedule: Any = "auto", updates: int = 2) -> dict[str, Any]:
    """Each model trained on this rank, or what refused it."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    try:
        for name in names:
            model, batch, target = built(name)
            try:
                with warnings.catch_warnings(), contextlib.redirect_stderr(None):
                    warnings.simplefilter("ignore")
                    pipe = kagome.pipeline(
                        model, batch, loss=LOSS, optimizer=sgd, schedule=schedule, channel=channel
                    )
                    losses = [pipe.step(batch, target) for _ in range(updates)]
                    gradients = {key: copied(value) for key, value in pipe.gradients().items()}
                    state = {key: value.clone() for key, value in pipe.state_dict().items()}
                    found[name] = losses, gradients, pipe.predict(batch), state
            except KagomeError as error:
                found[name] = str(error)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def plain(name: str, updates: int = 2) -> Any:
    """The same updates without Kagome."""
    torch.set_default_dtype(torch.float64)
    try:
        model, batch, target = built(name)
        model = getattr(model, "_orig_mod", model)
        optimizer, losses = sgd(model.parameters()), []

        def out() -> Tensor:
            given = batch if isinstance(batch, dict) else {}
            places = () if given else batch if isinstance(batch, tuple) else (batch,)
            return model(*places, **given)

        for _ in range(updates):
            optimizer.zero_grad()
            value = LOSS(out(), target).flatten(1).mean(1).mean()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        model.eval()
        with torch.no_grad():
            scores = out()
        gradients = {key: copied(weight.grad) for key, weight in model.named_parameters()}
        return losses, gradients, scores, model.state_dict()
    finally:
        torch.set_default_dtype(torch.float32)


def copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to_dense().clone()
