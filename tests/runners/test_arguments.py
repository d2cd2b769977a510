"""All runners x all that they are given: options, arguments, and what comes beside a batch."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, copied
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import BatchError, ConfigError, DeclarationError, SlotGraphError
from slotgraph.dataflow.sources import Source
from slotgraph.extend import side
from slotgraph.pool import InputPool
from slotgraph.ranks import PipelineStage, Ranks
from tests.runners.every_runner import ARGUMENTS, RUNNERS, WIDE, Fed, batch_of, captured, make, taken, tensors_of

SUITABLE: dict[str, Any] = {
    "buckets": [2, 6],
    "max_batch": 3,
    "max_tokens": 48,
    "max_waste": 0.5,
    "width": 1,
    "warmups": 2,
    "progress": False,
    "debug": ["addresses"],
    "no_copy": True,
    "sharing": False,
    "graphs": False,
    "lowering": "foreach",
    "lazy": True,
    "error_mode": "relaxed",
}


WRONG: dict[str, list[Any]] = {
    "buckets": [[], (), "24", 4, 2.5, [2, 2], [0], [-1], [1.5], ["2"], [True], [None], {2: 1}],
    "max_batch": ["3", 2.5, None, True, 0, -1],
    "max_tokens": ["3", 2.5, None, True, 0, -1],
    "max_waste": ["0.5", None, True, -0.1, 1.1, float("nan")],
    "width": ["1", 1.0, None, True, 0, -1],
    "warmups": ["1", 1.0, None, True, -1],
    "progress": ["no", 1, None],
    "debug": ["poisn", 1, ["streams", 1]],
    "no_copy": ["yes", 1],
    "sharing": ["yes", 0],
    "graphs": ["no", 1, None],
    "lowering": ["nonsense", 3, None, ["foreach"]],
    "lazy": ["no", 0, None],
    "error_mode": ["nonsense", 3, ["global"]],
}


CAPTURING = {
    "buckets", "max_batch", "max_waste", "warmups", "progress", "debug", "sharing", "graphs", "lowering", "lazy",
    "error_mode",
}  # fmt: skip


USED: dict[str, set[str]] = {
    "EagerRunner": {"no_copy"},
    "DecodeRunner": {*CAPTURING, "width"},
    "PrefillRunner": {*CAPTURING, "max_tokens"},
    "BreakableRunner": {*CAPTURING, "max_tokens"},
    "DraftRunner": CAPTURING,
    "DraftExtendRunner": {*CAPTURING, "width"},
    "MultiLayerDraftExtendRunner": {*CAPTURING, "width"},
}


FOREIGN = {"bind", "stack", "splits", "phase", "topk", "chained", "one_width", "relations", "absent"}
"""Arguments that some runners have and others do not."""


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_option_is_used_or_refused(runner: str) -> None:
    """A runner tells a suitable value of an option that it uses; any other option is refused."""
    for option, value in SUITABLE.items():
        if option in USED[runner]:
            assert make(runner, **{option: value}).parts.config.as_data()[option] == value
            continue
        with pytest.raises(ConfigError, match=f"^{runner} does not use option '{option}': leave it out"):
            make(runner, **{option: value})


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_wrong_value_is_refused(runner: str) -> None:
    """A value of the wrong kind or out of bounds is refused when the runner is made, with the option's name."""
    for option in USED[runner]:
        for value in WRONG[option]:
            with pytest.raises(ConfigError, match=option):
                make(runner, **{option: value})
    for option, known in (("lowering", "foreach"), ("error_mode", "thread_local")):
        if option in USED[runner]:
            with pytest.raises(ConfigError, match=f"{option} 'nonsense': this backend has .*{known}"):
                make(runner, **{option: "nonsense"})


@given(runner=st.sampled_from([*RUNNERS]), data=st.data())
def test_a_misspelt_option_is_refused_with_the_nearest(runner: str, data: st.DataObject) -> None:
    """One letter is left out, doubled or changed: the option that was meant is named, whoever uses it."""
    meant = data.draw(st.sampled_from([*SUITABLE]))
    place = data.draw(st.integers(0, len(meant) - 1))
    middle = data.draw(st.sampled_from(["", meant[place] * 2, "q"]))
    name = meant[:place] + middle + meant[place + 1 :]
    if name in {*SUITABLE, *FOREIGN}:
        return
    with pytest.raises(ConfigError, match=f"{runner}: unknown option '{name}': did you mean '{meant}'"):
        make(runner, **{name: SUITABLE[meant]})


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_argument_of_another_runner_is_refused(runner: str) -> None:
    """An argument that only others have is refused as an option is; what is like none is told all that are known."""
    own = {*make(runner).parts.config.as_data(), *ARGUMENTS.get(runner, {})}
    for name in FOREIGN - own:
        try:
            make(runner, **{name: object()})
        except SlotGraphError as error:
            assert name in str(error)  # noqa: PT017 - it may be refused as a value, where the runner has the argument
        else:
            pytest.fail(f"{runner} took {name}=object()")
    with pytest.raises(ConfigError, match=f"^{runner}: unknown option 'zzzz': known are .*backend"):
        make(runner, zzzz=1)


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
    for wrong, says in CLEAR:
        if known.issuperset(wrong):
            with pytest.raises(SlotGraphError, match=says):
                make(runner, **{**seat, **wrong})
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


WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda runner, batch, **beside: runner(batch, **beside),
    "fill": lambda runner, batch, **beside: runner.fill(batch, **beside),
    "decide": lambda runner, batch, **beside: runner.decide(batch, **beside),
    "agree_ahead": lambda runner, batch, **beside: runner.agree_ahead(batch, **beside),
    "idle": lambda runner, _, **beside: runner.idle(**beside),
    "stage": lambda runner, batch, **beside: PipelineStage(runner)(batch, **beside),
}


@pytest.fixture(scope="module")
def runners() -> dict[str, Any]:
    """One of each, captured."""
    return {name: captured(name) for name in RUNNERS}


@pytest.mark.parametrize("way", WAYS)
@given(name=st.sampled_from([*RUNNERS]), data=st.data())
def test_an_unknown_side_argument_is_refused(way: str, runners: dict[str, Any], name: str, data: st.DataObject) -> None:
    """It is named with the nearest known one; the view that was filled last is still good, and so are later steps."""
    runner, requests = runners[name], data.draw(st.integers(1, 6))
    batch, seed = batch_of(name, requests, requests), data.draw(st.integers(0, 9))
    meant = data.draw(st.sampled_from(["proxies", "window_lens"]))
    place = data.draw(st.integers(0, len(meant) - 1))
    unknown = meant[:place] + data.draw(st.sampled_from(["", "q", "__"])) + meant[place + 1 :]
    right = tensors_of(runner(batch))
    view = runner.fill(batch)
    other, value = batch_of(name, 2, seed), data.draw(st.sampled_from([None, 8, {"hidden": torch.ones(2, WIDE)}]))
    known = {} if way != "fill" or data.draw(st.booleans()) else {"proxies": None}
    with pytest.raises(BatchError, match=f"no slot reads the side argument '{unknown}': did you mean '{meant}'"):
        WAYS[way](runner, other, **{unknown: value}, **known)
    assert all(map(torch.equal, tensors_of(runner.replay(view)), right))
    with pytest.raises(BatchError, match="'bucket': the side arguments that its slots read are: 'proxies', 'window_l"):
        WAYS[way](runner, other, bucket=8)


@pytest.mark.parametrize("way", WAYS)
def test_known_side_arguments_are_taken(way: str, runners: dict[str, Any]) -> None:
    """Those of slots, of one that the settings switch off, too: engines give all that they have."""
    beside = {"proxies": None, "window_lens": torch.ones(3, dtype=torch.int64)}
    for name in RUNNERS:
        WAYS[way](runners[name], batch_of(name, 3, 5), **beside)


def test_side_arguments_are_read() -> None:
    """Beside the right name they are read, with slots that are on and off."""
    for name in ("EagerRunner", "DecodeRunner", "BreakableRunner"):
        runner, batch = captured(name), batch_of(name, 3, 2)
        hidden = torch.randint(1, 9, (3, WIDE)).float()
        expected = batch["tokens"] * 3 + hidden.sum(1).long()
        assert torch.equal(runner(batch, proxies={"hidden": hidden}, window_lens=None), expected)


class Anything(Source):
    """A source of a user's own class, which reads a side argument that only it knows."""

    def read(self, batch: Any, side: Any) -> Any:
        """Whatever is given as `more`."""
        del batch
        return side.get("more")


def test_sources_of_users_may_read_anything() -> None:
    """Where a source does not tell what it reads, nothing is known to be unknown."""

    class More(Inputs):
        tokens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, source=Anything())
        hidden: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, source=side("extra"), default=None)

    runner = EagerRunner(More, lambda view: view.tokens * 2, backend="cpu")
    assert runner({}, more=torch.tensor([3, 4]), something=1).tolist() == [6, 8]


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_there_is_one_of_cannot_be_copied(copied_by: Callable[[Any], Any], runners: dict[str, Any]) -> None:
    """A copy of a runner would share its buffers; inside of a container, too. The runner is as it was."""
    alone = make("EagerRunner")
    for one in (*runners.values(), alone, InputPool("a", "b"), PipelineStage(alone)):
        with pytest.raises(SlotGraphError, match=f"a {type(one).__name__} cannot be copied or pickled"):
            copied_by(one)
        if copied_by is not copy.copy:
            with pytest.raises(SlotGraphError, match="cannot be copied or pickled"):
                copied_by({"runner": [one]})
    batch = batch_of("DecodeRunner", 3, 4)
    assert torch.equal(runners["DecodeRunner"](batch), batch["tokens"] * 3)
