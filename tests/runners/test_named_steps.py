"""Steps that name slots: functions and modules get them by name, in every runner; others get the view, as ever."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slotgraph import (
    TOKENS,
    BreakableRunner,
    DecodeRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    check,
    copied,
    explain,
    record,
)
from slotgraph.errors import ConfigError
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import replay_file
from tests.runners.models import ready


class Named(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    embeds: torch.Tensor | None = copied(TOKENS, dtype=torch.float32, pad=0, default=None)
    windows: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, when="window")
    mode: str = "decode"


OFF = {"window": False}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, dtype=torch.float32)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, embeds: Any = None, windows: Any = 7, cache: Any = None
    ) -> torch.Tensor:
        """A row a token. What is absent or switched off is None; what names no slot has its default."""
        assert windows is None
        assert cache in (None, "bound")
        inner: torch.Tensor = self.inner(torch.stack([input_ids, positions], 1).float())
        return torch.sin(inner) if embeds is None else torch.sin(inner) + embeds[:, None]


torch.manual_seed(3)
MODEL = Model()


def by_view(view: Named) -> torch.Tensor:
    """The step that takes the view."""
    made: torch.Tensor = MODEL(view.input_ids, view.positions, view.embeds, view.windows)
    return made


def by_name(input_ids: torch.Tensor, positions: torch.Tensor, embeds: Any, *, windows: Any) -> torch.Tensor:
    """The step that takes slots."""
    made: torch.Tensor = MODEL(input_ids, positions, embeds, windows)
    return made


@functools.wraps(by_name)
def adapted(view: Named) -> torch.Tensor:
    """A function of the view that names what it wraps, which takes slots."""
    return by_view(view)


@functools.wraps(by_name)
def passed_on(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A decorator's function, which takes what it wraps takes."""
    return by_name(*args, **kwargs)


class Engine:
    def step(self, positions: torch.Tensor, input_ids: torch.Tensor, embeds: Any) -> torch.Tensor:
        """A method, whose parameters are in another order."""
        return by_name(input_ids, positions, embeds, windows=None)

    @functools.wraps(step)
    def decorated(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A method that a decorator made."""
        return self.step(*args, **kwargs)

    def __call__(self, *, embeds: Any, positions: torch.Tensor, mode: str, input_ids: torch.Tensor) -> torch.Tensor:
        """A callable object, with keywords alone, and a field."""
        assert mode == "decode"
        return by_name(input_ids, positions, embeds, windows=None)


def with_other(input_ids: torch.Tensor, other: str, positions: torch.Tensor, embeds: Any) -> torch.Tensor:
    """A step with an argument of its own."""
    assert other == "bound"
    return by_name(input_ids, positions, embeds, windows=None)


def viewed(view: Named, positions: int = 7) -> torch.Tensor:
    """A function of the view with another parameter that happens to be called as a slot."""
    assert positions == 7
    return by_view(view)


def all_optional(input_ids: Any = None, positions: Any = None, embeds: Any = None, windows: Any = 3) -> torch.Tensor:
    """What Hugging Face's models look like: each parameter has a default."""
    return by_name(input_ids, positions, embeds, windows=windows)


STEPS: dict[str, Callable[..., Any]] = {
    "a module": MODEL,
    "a function": by_name,
    "a bound forward": MODEL.forward,
    "a method": Engine().step,
    "a decorated method": Engine().decorated,
    "a callable": Engine(),
    "a partial": functools.partial(with_other, other="bound"),
    "a partial of a module": functools.partial(MODEL, cache="bound"),
    "a decorated function": passed_on,
    "a compiled function": torch.compile(by_name, backend="eager"),
    "a compiled module": torch.compile(MODEL, backend="eager"),
    "optional ones": all_optional,
    "of the view": by_view,
    "of the view, with a default": viewed,
    "of the view, wrapping one of slots": adapted,
    "of the view, positional": lambda positions, /: by_view(positions),
    "of anything": lambda *args, **_: by_view(*args),
}

KINDS: dict[str, Callable[..., Any]] = {
    "eager": lambda step, **given: EagerRunner(Named, step, **given),
    "decode": lambda step, **given: DecodeRunner(Named, step, buckets=[4], absent=[{"embeds"}], **given),
    "breakable": lambda step, **given: BreakableRunner(Named, step, buckets=[4], absent=[{"embeds"}], **given),
    "prefill": lambda step, **given: PrefillRunner(
        Named, step, splits=[torch.sin], buckets=[4], absent=[{"embeds"}], **given
    ),
}


def runner_of(kind: str, step: Any, backend: str = "cpu-capture", **given: Any) -> Any:
    """A runner that is ready to run."""
    made = KINDS[kind](step, backend=backend, settings=OFF, **given)
    return made if kind == "eager" else ready(made)


def batches() -> list[dict[str, Any]]:
    """One with the optional slot, and one without it."""
    ids = {"input_ids": torch.tensor([3, 1, 2]), "positions": torch.tensor([5, 6, 7])}
    return [{**ids, "embeds": torch.tensor([0.5, 0.25, 2.0])}, ids]


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize("step", STEPS)
def test_each_kind_of_step(step: str, backend: str) -> None:
    """Captured or eager, with optional slots there or absent, it returns what the step of the view returns."""
    eager, decode = (runner_of(kind, STEPS[step], backend) for kind in ("eager", "decode"))
    for batch in batches():
        expected = EagerRunner(Named, by_view, settings=OFF, backend="cpu")(batch)
        torch.testing.assert_close(eager(batch), expected)
        torch.testing.assert_close(decode(batch), expected)
        assert decode.decide(batch).path == "graph"


@pytest.mark.parametrize(("kind", "stack"), [("breakable", None), ("breakable", "inner"), ("prefill", None)])
def test_stacks(kind: str, stack: str | None) -> None:
    """A step of which a part is captured, or all of it between operators, gets its slots by name, too."""
    runner = runner_of(kind, MODEL, stack=stack)
    for batch in batches():
        torch.testing.assert_close(runner(batch), EagerRunner(Named, by_view, settings=OFF, backend="cpu")(batch))
        assert runner.decide(batch).bucket == 4


def test_tools(tmp_path: Path) -> None:
    """Checks, debug modes, explanations, recordings and other options work on such a step as on any."""
    runner = runner_of("decode", MODEL, debug=["generations", "addresses", "keys", "poison", "parity"])
    with record(runner, tmp_path / "steps.safetensors") as recording:
        for batch in batches():
            runner(batch)
        recording.save()
    assert check(runner, rounds=2, seed=0).ok
    assert "input_ids" in str(explain(runner))
    report = replay_file(RecordedFile.read(tmp_path / "steps.safetensors"), runner_of("decode", by_view))
    assert [step.outcome for step in report.steps] == ["equal", "equal"]
    again = ready(runner.remade(buckets=[8]))
    torch.testing.assert_close(again(batches()[0]), runner(batches()[0]))


def test_what_is_bound_stays_bound() -> None:
    """functools.partial may give a parameter that is called as a slot another value."""
    runner = EagerRunner(Named, functools.partial(all_optional, positions=torch.zeros(3)), settings=OFF, backend="cpu")
    batch, _ = batches()
    torch.testing.assert_close(
        runner(batch), by_name(batch["input_ids"], torch.zeros(3), batch["embeds"], windows=None)
    )


def misspelled(input_idz: Any, positions: Any) -> None:
    """Its first parameter is no slot."""


def view_and_slot(view: Any, positions: Any) -> None:
    """The view is nothing that a step may ask for beside slots."""


def with_settings(input_ids: Any, settings: Any) -> None:
    """Settings are none of the view's."""


MISTAKES: list[tuple[Any, str]] = [
    (
        misspelled,
        "the step asks for 'input_idz', which is neither a slot nor a field of Named: .*; did you mean 'input_",
    ),
    (
        view_and_slot,
        "the step asks for 'view', which is neither a slot nor a field of Named: a step takes the view alone",
    ),
    (with_settings, "the step asks for 'settings', .*bind other arguments by functools.partial"),
    (functools.partial(with_other, embeds=None), "the step asks for 'other'"),
]


@pytest.mark.parametrize(("step", "says"), MISTAKES)
@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(kind: str, step: Any, says: str) -> None:
    """A required parameter that names nothing of the view, beside others that do, is refused with its name."""
    with pytest.raises(ConfigError, match=re.compile(says)):
        KINDS[kind](step, settings=OFF, backend="cpu")
