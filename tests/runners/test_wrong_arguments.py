"""All runners x all arguments x values of the wrong kind: refused when the runner is made, with the argument's name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    Buckets,
    EagerRunner,
    InputPool,
    Inputs,
    PipelineStage,
    Ranks,
    copied,
)
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, DeclarationError, SlotGraphError
from tests.runners.every_runner import RUNNERS, Fed, batch_of, captured, make, taken, tensors_of

HIDDEN = Axis("HIDDEN", fixed=True)
POOL = InputPool("decode")
PHASE = POOL["decode"]


class Odd:
    """Of no use to anyone."""


def no_list(value: Any) -> bool:
    """An empty list, where names are expected."""
    return isinstance(value, list) and not value


JUNK: list[Any] = [
    3, -1, 0, 2.5, float("nan"), True, "text", b"bytes", "", [], [3], ["text"], [["text"]], {"text"}, {"text": 3},
    {3: 4}, {BATCH: "4"}, {HIDDEN: 2}, None, object(), Odd, Odd(), torch.ones(2), range(2), lambda: None, Fed, print,
    POOL, PHASE, torch.int32, BATCH, TOKENS, BATCH * 2,
]  # fmt: skip
TAKEN: dict[str, Callable[[Any], bool]] = {
    "settings": lambda value: hasattr(value, "window"),
    "sizes": lambda value: value == {},
    "bind": lambda value: value == {},
    "lend": lambda value: value == {},
    "relations": lambda value: value is None or value == {},
    "absent": no_list,
    "carry": no_list,
    "chained": no_list,
    "advances": lambda value: value is None or no_list(value),
    "output_rows": lambda value: value is None or (isinstance(value, Axis) and value in (BATCH, TOKENS)),
    "one_width": lambda value: isinstance(value, bool),
    "phase": lambda value: value is None or value is PHASE,
    "ranks": lambda value: value is None,
    "state": lambda value: value is None or no_list(value),
    "buffers": lambda value: value is None,
    "backend": lambda _: False,
    "stack": lambda value: value is None,
    "splits": lambda value: (
        isinstance(value, set | list) and bool(value) and all(isinstance(one, str) for one in value)
    ),
    "topk": lambda value: type(value) is int and value > 0,
    "steps": lambda value: type(value) is int and value > 0,
    "inputs": lambda value: value is Fed,
    "step": callable,
    "forward": callable,
}
"""What of the junk makes sense."""


def arguments_of(runner: str) -> list[str]:
    """Everything that a runner is constructed with but its options."""
    parameters = inspect.signature(RUNNERS[runner]).parameters
    return [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]


@pytest.mark.parametrize("runner", RUNNERS)
def test_junk_is_refused(runner: str) -> None:
    """Nothing of a wrong kind is taken, and what is refused is so by an error of the library, in words."""
    wrong = []
    for argument in arguments_of(runner):
        key = "step" if argument == "forward" or (argument == "steps" and runner != "DraftRunner") else argument
        for value in JUNK:
            said = taken(functools.partial(make, runner, **{key: value}))
            sense = TAKEN[argument](value)  # though it may not go with the runner's other arguments
            right = (RUNNERS[runner], SlotGraphError) if sense else SlotGraphError
            if not isinstance(said, right) or not (sense or argument in str(said)):
                wrong.append(f"{argument}={value!r}: {said!r}")
    assert wrong == []


CLEAR: list[tuple[dict[str, Any], str]] = [
    ({"absent": ["hidden"]}, "absent: expected a list of patterns"),
    ({"absent": "hidden"}, "absent: expected a list of patterns"),
    ({"absent": {"hidden"}}, "absent: expected a list of patterns"),
    ({"absent": [{"hiden"}]}, "absent names 'hiden', which is no optional slot of .*: did you mean 'hidden'"),
    ({"absent": [{"tokens"}]}, "absent names 'tokens', which is no optional slot of .*: optional are hidden"),
    ({"carry": "tokens"}, "carry: expected names of slots in a list or tuple, got 'tokens'"),
    ({"carry": ["token"]}, "carry names 'token', which is no slot"),
    ({"sizes": {HIDDEN: "4"}}, "sizes of HIDDEN: expected a whole number, at least 0, got '4'"),
    ({"sizes": {HIDDEN: -4}}, "sizes of HIDDEN: expected a whole number, at least 0, got -4"),
    ({"sizes": {HIDDEN: None}}, "sizes of HIDDEN: expected a whole number, at least 0, got None"),
    ({"sizes": {HIDDEN: True}}, "sizes of HIDDEN: expected a whole number, at least 0, got True"),
    ({"sizes": {HIDDEN: 4.0}}, "sizes of HIDDEN: expected a whole number, at least 0, got 4.0"),
    ({"sizes": {"HIDDEN": 4}}, "sizes: expected an Axis as each key, got 'HIDDEN'"),
    ({"lend": {"tokens": 3}}, "lend of slot 'tokens': expected a function of the slot's view, got 3"),
    ({"lend": {"token": print}}, "lend names 'token', which is no slot"),
    ({"bind": {"lens": [1]}}, "slot 'lens': expected a tensor to adopt, got list"),
    ({"bind": {"token": torch.ones(2)}}, "bind names 'token', which is no slot"),
    ({"phase": "decode"}, "phase: expected a phase of a pool"),
    ({"phase": POOL}, "phase: expected a phase of a pool"),
    ({"phase": PHASE.keeping("token")}, "keeping names 'token', which is no slot"),
    ({"ranks": 2}, r"ranks: expected Ranks\(...\), or None, got 2"),
    ({"backend": 3}, "backend: expected a backend's name, a Backend or a class of them, got 3"),
    ({"backend": Backend}, "backend: expected a backend's name"),
    ({"inputs": Inputs}, "inputs: expected a declaration, a subclass of Inputs"),
    ({"settings": {"window": "no"}}, "slot 'window' exists when .* expected true or false, got 'no'"),
    ({"settings": {"window": torch.ones(2)}}, "slot 'window' exists when .* expected true or false, got tensor"),
    ({"output_rows": "TOKENS"}, "output_rows is TOKENS, BATCH or None, got 'TOKENS'"),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pooled", [False, True])
def test_what_is_refused_is_said_clearly(runner: str, *, pooled: bool) -> None:
    """What was expected and what came, when the runner is made: in a pool, too, whose memory is laid out later."""
    known = {*arguments_of(runner), *(() if runner == "EagerRunner" else ("phase", "ranks"))}
    seat = {"phase": InputPool("decode")["decode"]} if pooled and "phase" in known else {}
    for given, says in CLEAR:
        if known.issuperset(given):
            with pytest.raises(SlotGraphError, match=says):
                make(runner, **{**seat, **given})
    if seat:
        for option in ("lowering", "error_mode"):
            with pytest.raises(ConfigError, match=f"{option} 'nonsense': this backend has"):
                make(runner, phase=PHASE, **{option: "nonsense"})


def test_settings_that_a_function_cannot_take() -> None:
    """The slot whose `when` fails is named."""

    class Late(Inputs):
        tokens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        more: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, when=lambda settings: settings.more > 1)

    for settings in (None, 3, {"more": 2}):
        with pytest.raises(DeclarationError, match="slot 'more': its function when= raised AttributeError"):
            EagerRunner(Late, lambda view: view.tokens, backend="cpu", settings=settings)


@pytest.mark.parametrize("runner", ["DecodeRunner", "BreakableRunner"])
def test_patterns_of_slots_that_are_switched_off(runner: str) -> None:
    """A slot that the settings switch off is absent from every batch: a pattern is what else it names."""

    class Both(Fed):
        bias: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, default=None, when="window")

    made = captured(runner, inputs=Both, absent=[{"bias", "hidden"}])
    batch = batch_of(runner, 3, 1)
    assert made.decide(batch).path != "eager"
    assert torch.equal(tensors_of(made(batch))[0], batch["tokens"] * 3)


def loose(value: Any) -> Any:
    """The same, of which type checkers know nothing."""
    return value


ELSEWHERE: list[tuple[Callable[[], Any], str]] = [
    (lambda: loose(Buckets)([]), "buckets are whole numbers"),
    (lambda: loose(Buckets)(3), "buckets are whole numbers of at least 1, at least one of them, got 3"),
    (lambda: loose(Buckets)(["1"]), "buckets are whole numbers"),
    (lambda: loose(Buckets)((2, 2)), "buckets are given once each"),
    (lambda: loose(Buckets)((2, 4), "0.5"), "max_waste is a share"),
    (lambda: loose(choose)(3), "backend: expected a backend's name"),
    (lambda: loose(InputPool)(3), "phases: expected names"),
    (lambda: loose(InputPool)(["draft"]), "phases: expected names"),
    (lambda: loose(InputPool)("draft", anytime="decoy"), "phases: expected names in a list or tuple, got 'decoy'"),
    (lambda: loose(InputPool)("draft", anytime=3), "phases: expected names in a list or tuple, got 3"),
    (lambda: loose(InputPool)("a", "b", overlaps="ab"), "overlaps: expected pairs"),
    (lambda: loose(InputPool)("a", "b", overlaps=3), "overlaps: expected pairs"),
    (lambda: loose(POOL)[3], "this pool has no phase 3"),
    (lambda: loose(PHASE).keeping(3), "keeping: expected names of slots"),
    (lambda: loose(PipelineStage)(3), "runner: expected a runner, got 3"),
    (lambda: loose(PipelineStage)(make("EagerRunner"), proxies=3), "proxies: expected"),
    (lambda: loose(PipelineStage)(make("EagerRunner"), proxies="a b"), "proxies: expected"),
    (lambda: loose(PipelineStage)(make("EagerRunner"), timeout="1"), "timeout: expected seconds"),
    (lambda: loose(Ranks)(timeout=float("nan")), "timeout: expected seconds"),
    (lambda: loose(Ranks)(capture_timeout=True), "capture_timeout: expected seconds"),
    (lambda: loose(Ranks)(timeout=1e300), "timeout: expected seconds"),
    (lambda: loose(Ranks)(shards=1.5), "shards: expected a whole number"),
    (lambda: loose(Ranks)(shards=0), "shards: expected a whole number"),
    (lambda: loose(Ranks)(equal="no"), "equal: expected True or False"),
    (lambda: loose(Ranks)(on=3), "on: expected 'host' or the name"),
    (lambda: loose(Ranks)(on="hots"), "on: expected 'host' or the name"),
]


def test_what_stands_beside_runners() -> None:
    """Buckets, pools, phases, stages of a pipeline and ranks refuse what makes no sense as well."""
    for make_one, says in ELSEWHERE:
        with pytest.raises(ConfigError, match=says):
            make_one()
