"""All runners x all options: each option is used by a runner, and then taken, or refused with those that use it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import RunnerConfig
from slotgraph.dataflow.errors import ConfigError, SlotGraphError
from tests.runners.every_runner import ARGUMENTS, RUNNERS, make

SUITABLE: dict[str, Any] = {
    "buckets": [2, 6],
    "max_batch": 3,
    "max_tokens": 48,
    "max_waste": 0.5,
    "width": 1,
    "warmups": 2,
    "progress": False,
    "debug": "addresses",
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
FOREIGN = {"bind", "stack", "splits", "phase", "topk", "chained", "one_width", "advances", "relations", "absent"}
"""Arguments that some runners have and others do not."""


def test_every_option_is_looked_at() -> None:
    """No option is left out of these tests, and each is of use to some runner."""
    assert {*RunnerConfig.options()} - {"backend"} == {*SUITABLE} == {*WRONG} == set().union(*USED.values())


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_option_is_used_or_refused(runner: str) -> None:
    """A runner tells a suitable value of an option that it uses; any other option is refused, with who uses it."""
    for option, value in SUITABLE.items():
        if option in USED[runner]:
            assert make(runner, **{option: value}).parts.config.as_data()[option] == value
            continue
        with pytest.raises(ConfigError, match=f"^{runner} does not use option '{option}'") as refused:
            make(runner, **{option: value})
        named = str(refused.value).partition("which is one of ")[2].partition(":")[0].split(", ")
        assert {*named} == {name for name in RUNNERS if option in USED[name]}


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
    with pytest.raises(ConfigError, match=f"{runner}: unknown option '{name}': did you mean '{meant}'") as refused:
        make(runner, **{name: SUITABLE[meant]})
    assert ("does not use that one" in str(refused.value)) == (meant not in USED[runner])


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
