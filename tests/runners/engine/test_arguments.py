"""All runners x all that they are given: options, files of them, arguments, and what comes beside a batch."""

import copy
import inspect
import itertools
import json
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, copied
from slotgraph.backends import Backend, choose
from slotgraph.config import RunnerConfig
from slotgraph.dataflow.errors import BatchError, ConfigError, SlotGraphError
from slotgraph.dataflow.sources import Source
from slotgraph.pool import InputPool
from slotgraph.ranks import PipelineStage, Ranks
from slotgraph.runners.engine.config import keywords_of
from tests.runners.kinds import ARGUMENTS, RUNNERS, WIDE, Fed, Step, batch_of, captured, make, tensors_of
from tests.strategies import declaration_of

OPTIONS: dict[str, tuple[Any, list[Any]]] = {
    "buckets": ([2, 6], [[], (), "24", 4, 2.5, [2, 2], [0], [-1], [1.5], ["2"], [True], [None], {2: 1}]),
    "max_batch": (3, ["3", 2.5, None, True, 0, -1]),
    "max_tokens": (48, ["3", 2.5, None, True, 0, -1]),
    "max_waste": (0.5, ["0.5", None, True, -0.1, 1.1, float("nan")]),
    "width": (1, ["1", 1.0, None, True, 0, -1]),
    "warmups": (2, ["1", 1.0, None, True, -1]),
    "progress": (False, ["no", 1, None]),
    "debug": (["addresses"], ["poisn", 1, ["poison", 1]]),
    "no_copy": (True, ["yes", 1]),
    "sharing": (False, ["yes", 0]),
    "graphs": (False, ["no", 1, None]),
    "lowering": ("foreach", ["nonsense", 3, None, ["foreach"]]),
    "lazy": (True, ["no", 0, None]),
    "error_mode": ("relaxed", ["nonsense", 3, ["global"]]),
    "outputs": ("copy", ["nonsense", 3, None, True, ["copy"]]),
}
"""By option, a suitable value and wrong ones."""
CAPTURING = {*OPTIONS} - {"width", "max_tokens", "no_copy"}
USED: dict[str, set[str]] = {
    "EagerRunner": {"no_copy"},
    "DecodeRunner": {*CAPTURING, "width"},
    "GraphRunner": CAPTURING - {"max_batch"},
    "PrefillRunner": {*CAPTURING, "max_tokens"},
    "BreakableRunner": {*CAPTURING, "max_tokens"},
    "DraftRunner": CAPTURING,
    "DraftExtendRunner": {*CAPTURING, "width"},
    "MultiLayerDraftExtendRunner": {*CAPTURING, "width"},
}
FOREIGN = {"bind", "keep_bound", "stack", "splits", "phase", "topk", "chained", "one_width", "relations", "absent"}
"""Arguments that some runners have and others do not."""


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_option_is_used_or_refused(runner: str) -> None:
    """A runner tells a suitable value of an option that it uses, and refuses a wrong one, and any other option."""
    for option, (value, wrong) in OPTIONS.items():
        if option not in USED[runner]:
            with pytest.raises(ConfigError, match=f"^{runner} does not use option '{option}': leave it out"):
                make(runner, **{option: value})
            continue
        grid = [{"BATCH": 2, "TOKENS": 2}, {"BATCH": 4, "TOKENS": 4}]
        right = grid if (runner, option) == ("GraphRunner", "buckets") else value
        assert make(runner, **{option: right}).config.as_data()[option] == right
        for one in wrong:
            with pytest.raises(ConfigError, match=option):
                make(runner, **{option: one})


@given(runner=st.sampled_from([*RUNNERS]), data=st.data())
def test_a_misspelt_option_is_refused_with_the_nearest(runner: str, data: st.DataObject) -> None:
    """One letter is left out, doubled or changed: the option that was meant is named, whoever uses it."""
    meant = data.draw(st.sampled_from([*OPTIONS]))
    place = data.draw(st.integers(0, len(meant) - 1))
    middle = data.draw(st.sampled_from(["", meant[place] * 2, "q"]))
    name = meant[:place] + middle + meant[place + 1 :]
    if name in {*OPTIONS, *FOREIGN}:
        return
    with pytest.raises(ConfigError, match=f"{runner}: unknown option '{name}': did you mean '{meant}'"):
        make(runner, **{name: OPTIONS[meant][0]})


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_argument_of_another_runner_is_refused(runner: str) -> None:
    """An argument that only others have is refused as an option is; what is like none is told all that are known."""
    own = {*make(runner).config.as_data(), *ARGUMENTS.get(runner, {})}
    for name in FOREIGN - own:
        try:
            make(runner, **{name: object()})
        except SlotGraphError as error:
            assert name in str(error)
        else:
            pytest.fail(f"{runner} took {name}=object()")
    with pytest.raises(ConfigError, match=f"^{runner}: unknown option 'zzzz': known are .*backend"):
        make(runner, zzzz=1)


HIDDEN = Axis("HIDDEN", fixed=True)
POOL = InputPool("decode")
PHASE = POOL["decode"]
JUNK: list[Any] = [
    3, -1, 0, 2.5, float("nan"), True, "text", b"bytes", "", [], [3], ["text"], [["text"]], {"text"}, {"text": 3},
    {3: 4}, {BATCH: "4"}, {HIDDEN: 2}, None, object(), Exception, torch.ones(2), range(2), lambda: None, Fed, print,
    POOL, PHASE, torch.int32, BATCH, TOKENS, BATCH * 2,
]  # fmt: skip
TAKEN: dict[str, Callable[[Any], bool]] = {
    "settings": lambda value: hasattr(value, "window"),
    **dict.fromkeys(("sizes", "bind"), lambda value: value == {}),
    "relations": lambda value: value is None or value == {},
    "cost": lambda value: value is None,
    **dict.fromkeys(("absent", "chained", "variants"), lambda value: isinstance(value, list) and not value),
    "output_rows": lambda value: value is None or (isinstance(value, Axis) and value in (BATCH, TOKENS)),
    **dict.fromkeys(("one_width", "keep_bound"), lambda value: isinstance(value, bool)),
    "phase": lambda value: value is None or value is PHASE,
    **dict.fromkeys(("ranks", "config", "buffers", "stack", "done"), lambda value: value is None),
    "state": lambda value: value is None or (isinstance(value, list) and not value),
    "backend": lambda _: False,
    "splits": lambda value: isinstance(value, set | list) and bool(value) and all(isinstance(v, str) for v in value),
    **dict.fromkeys(("topk", "steps"), lambda value: type(value) is int and value > 0),
    "inputs": lambda value: value is Fed,
    **dict.fromkeys(("step", "forward"), callable),
    "width": lambda value: type(value) is int and value > 0,
    "chunks": lambda value: isinstance(value, list) and all(type(one) is int and one > 0 for one in value),
}
"""What of the junk makes sense."""


def arguments_of(runner: str) -> list[str]:
    """Everything that a runner is constructed with but its options."""
    options = {*RunnerConfig.options()} - {"backend", "width"}
    return [name for name in inspect.signature(RUNNERS[runner]).parameters if name not in options]


@pytest.mark.parametrize("runner", RUNNERS)
def test_signatures_have_every_keyword(runner: str) -> None:
    """With its default, as `help` and completion show it, and the docstring names it. A runner has that of a call."""
    kind: Any = RUNNERS[runner]
    signature = inspect.signature(kind)
    assert not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    config, own = RunnerConfig(), {"keep_bound": False, "output_rows": ...}
    own |= {"sizes": {}, "bind": {}, "relations": {}, "absent": (), "variants": (), "chunks": ()}
    for name in keywords_of(kind) - {"chained"}:
        default = signature.parameters[name].default
        assert default is inspect.Parameter.empty or default == getattr(config, name, own.get(name)), name
    assert [name for name in keywords_of(kind) if not re.search(rf"\b{name}\b", inspect.getdoc(kind) or "")] == []
    assert [*inspect.signature(make(runner)).parameters] == ["batch", "side"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_junk_is_refused(runner: str) -> None:
    """Nothing of a wrong kind is taken, and what is refused is so by an error of the library, in words."""
    wrong = []
    for argument in arguments_of(runner):
        key = "step" if argument == "forward" or (argument == "steps" and runner != "DraftRunner") else argument
        for value in JUNK:
            try:
                said = make(runner, **{key: value})
            except Exception as error:  # noqa: BLE001 - which kind it is, is the question
                said = error
            sense = TAKEN[argument](value)  # though it may not go with the runner's other arguments
            right = (RUNNERS[runner], SlotGraphError) if sense else SlotGraphError
            if not isinstance(said, right) or not (sense or argument in str(said)):
                wrong.append(f"{argument}={value!r}: {said!r}")
    assert wrong == []


CLEAR: list[tuple[dict[str, Any], str]] = [
    *(({"absent": wrong}, "absent: expected a list of patterns") for wrong in (["hidden"], "hidden", {"hidden"})),
    ({"absent": [{"hiden"}]}, "absent names 'hiden', which is not an optional slot of .*: did you mean 'hidden'"),
    ({"absent": [{"tokens"}]}, "absent names 'tokens', which is not an optional slot of .*: optional are hidden"),
    *(({"sizes": {HIDDEN: n}}, f"sizes of HIDDEN: .* at least 0, got {n!r}") for n in ("4", -4, None, True, 4.0)),
    ({"sizes": {"HIDDEN": 4}}, "sizes: expected a mapping of axes .* got 'HIDDEN' of type str"),
    ({"bind": {"lens": [1]}}, "slot 'lens': expected a tensor to adopt, got list"),
    ({"bind": {"token": torch.ones(2)}}, "bind names 'token', which is not a slot"),
    *(({"phase": wrong}, "phase: expected a phase of a pool") for wrong in ("decode", POOL)),
    ({"phase": PHASE.keeping("token")}, "keeping names 'token', which is not a slot"),
    ({"ranks": 2}, r"ranks: expected Ranks\(...\), or None, got 2"),
    ({"backend": 3}, "backend: expected a backend's name, a Backend or a class of them, got 3"),
    ({"backend": Backend}, "backend: expected a backend's name"),
    ({"inputs": Inputs}, "inputs: expected a declaration, a subclass of Inputs"),
    ({"settings": {"window": "no"}}, "slot 'window' exists when .* expected true or false, got 'no'"),
    ({"settings": {"window": torch.ones(2)}}, "slot 'window' exists when .* expected true or false, got tensor"),
    ({"output_rows": "TOKENS"}, "output_rows is (TOKENS, BATCH|BATCH, TOKENS) or None, got 'TOKENS'"),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pooled", [False, True])
def test_what_is_refused_is_said_clearly(runner: str, *, pooled: bool) -> None:
    """What was expected and what came, when the runner is made: in a pool, too, whose memory is laid out later."""
    kind: Any = RUNNERS[runner]
    known = {*arguments_of(runner), *keywords_of(kind)}
    seat = {"phase": InputPool("decode")["decode"]} if pooled and "phase" in known else {}
    for wrong, says in CLEAR:
        if known.issuperset(wrong):
            with pytest.raises(SlotGraphError, match=says):
                make(runner, **{**seat, **wrong})
    for option, have in (("lowering", "foreach"), ("error_mode", "thread_local")) if "phase" in known else ():
        with pytest.raises(ConfigError, match=f"{option} 'nonsense': this backend has .*{have}"):
            make(runner, **seat, **{option: "nonsense"})


LOOSE: Any = SimpleNamespace(pool=InputPool, stage=PipelineStage, ranks=Ranks)
ELSEWHERE: list[tuple[Callable[..., Any], Any, dict[str, Any], str]] = [
    (choose, 3, {}, "backend: expected a backend's name"),
    *((LOOSE.pool, names, {}, "phases: expected names") for names in (3, ["draft"])),
    *((LOOSE.pool, "a", {"anytime": n}, f"phases: expected names in a list or tuple, got {n!r}") for n in ("b", 3)),
    *((LOOSE.pool, "a", {"overlaps": pairs}, "overlaps: expected pairs") for pairs in ("ab", 3)),
    (POOL.__getitem__, 3, {}, "this pool has no phase 3"),
    (PHASE.keeping, 3, {}, "keeping: expected names of slots"),
    (LOOSE.stage, 3, {}, "runner: expected a runner, got 3"),
    *((LOOSE.stage, make("EagerRunner"), {"proxies": proxies}, "proxies: expected") for proxies in (3, "a b")),
    (LOOSE.stage, make("EagerRunner"), {"timeout": "1"}, "timeout: expected seconds"),
]
RANKS: list[tuple[str, Any, str]] = [
    *(("timeout", wrong, "expected seconds") for wrong in (float("nan"), 1e300)),
    *(("capture_timeout", True, "expected seconds"), ("equal", "no", "expected True or False")),
    *(("shards", wrong, "expected a whole number") for wrong in (1.5, 0)),
]


def test_pools_phases_and_ranks_refuse_what_makes_no_sense() -> None:
    """Buckets, pools, phases, stages of a pipeline and ranks refuse what makes no sense as well."""
    for make_one, first, options, says in ELSEWHERE:
        with pytest.raises(ConfigError, match=says):
            make_one(first, **options)
    for option, wrong, says in RANKS:
        with pytest.raises(ConfigError, match=f"{option}: {says}"):
            LOOSE.ranks(**{option: wrong})


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


def test_known_side_arguments_are_read(runners: dict[str, Any]) -> None:
    """Those of slots, of one that the settings switch off, too: engines give all that they have."""
    for name, way in itertools.product(RUNNERS, WAYS.values()):
        way(runners[name], batch_of(name, 3, 5), proxies=None, window_lens=torch.ones(3, dtype=torch.int64))
    for name in ("EagerRunner", "DecodeRunner", "BreakableRunner"):
        batch, hidden = batch_of(name, 3, 2), torch.randint(1, 9, (3, WIDE)).float()
        expected = batch["tokens"] * 3 + hidden.sum(1).long()
        assert torch.equal(runners[name](batch, proxies={"hidden": hidden}, window_lens=None), expected)


class Anything(Source):
    def read(self, batch: Any, side: Any) -> Any:
        del batch
        return side.get("more")


def test_sources_of_users_may_read_anything() -> None:
    """Where a source does not tell what it reads, nothing is known to be unknown."""
    more = declaration_of({"tokens": copied(TOKENS, dtype=torch.int64, pad=0, source=Anything())})
    runner = EagerRunner(more, lambda view: vars(view)["tokens"] * 2, backend="cpu")
    assert runner({}, more=torch.tensor([3, 4]), something=1).tolist() == [6, 8]


def test_what_there_is_one_of_cannot_be_copied(runners: dict[str, Any]) -> None:
    """A copy of a runner would share its buffers; inside of a container, too. The runner is as it was."""
    ones = (*runners.values(), InputPool("a", "b"), PipelineStage(make("EagerRunner")))
    for one, copied_by in itertools.product(ones, (copy.copy, copy.deepcopy, pickle.dumps)):
        for held in (one, {"runner": [one]}) if copied_by is not copy.copy else (one,):
            with pytest.raises(SlotGraphError, match=f"a {type(one).__name__} cannot be copied or pickled"):
                copied_by(held)
    batch = batch_of("DecodeRunner", 3, 4)
    assert torch.equal(runners["DecodeRunner"](batch), batch["tokens"] * 3)


@given(options=st.sets(st.sampled_from([*OPTIONS])))
def test_a_file_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, options: set[str]) -> None:
    """What a file names is read back, default or not; what it leaves out is no keyword, so that any runner takes it."""
    data = {option: OPTIONS[option][0] for option in options}
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())  # which JSON writes alike
    for suffix, text in ((".json", json.dumps(data)), (".toml", toml)):
        file = tmp_path_factory.getbasetemp() / f"round_trip{suffix}"
        file.write_text(text, encoding="utf-8")
        for path in (file, str(file)):
            assert RunnerConfig.load(path) == RunnerConfig.of(data)
            assert RunnerConfig.load(path).as_data() == data
    with nullcontext() if options <= {"no_copy"} else pytest.raises(ConfigError, match="EagerRunner does not use"):
        make("EagerRunner", **RunnerConfig.of(data).as_data())


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_configuration_serves_all_runners(runner: str) -> None:
    """A runner takes from it what it uses, and ignores the rest; a keyword wins; anything else is refused."""
    good = {name: value for name, (value, _) in OPTIONS.items()}
    shared, given = RunnerConfig.of({**good, "backend": "cpu-capture"}), ARGUMENTS.get(runner, {})
    kind: Any = RUNNERS[runner]
    arguments = {"settings": {"window": False}, "inputs": Fed, "step": Step(), **given, "config": shared}
    made = kind(arguments.pop("inputs"), arguments.pop("step"), **arguments)
    own = {name: value for name, value in good.items() if name in USED[runner]}
    own |= {name: value for name, value in given.items() if name in own}
    assert made.stage.backend.name == "cpu-capture"
    taken = {name: value for name, value in made.config.as_data().items() if (runner, name) != ("DraftRunner", "width")}
    assert taken == {**own, "backend": "cpu-capture"}
    winning = {name: getattr(RunnerConfig(), name) for name in own.keys() - given.keys() - {"buckets"}}
    won = make(runner, config=shared, backend="cpu", **winning)
    assert won.stage.backend.name == "cpu"
    assert {name: getattr(won.config, name) for name in winning} == winning
    for wrong in ({"backend": "cpu"}, "runner.toml", RunnerConfig, 3):
        with pytest.raises(ConfigError, match=r"config: expected a RunnerConfig, such as .*, or None, got"):
            make(runner, config=wrong)


TABLES: dict[str, Any] = {"project": {"name": "engine"}, "tool": {"slotgraph": {"width": 3}, "x": 5}, "width": 4}


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_table_of_a_file(suffix: str, tmp_path: Path) -> None:
    """The options may be one table among others; a table that is not there is refused by its name, as other junk is."""
    file = tmp_path / f"engine{suffix}"
    toml = 'width = 4\n[project]\nname = "engine"\n[tool]\nx = 5\n[tool.slotgraph]\nwidth = 3\n'
    file.write_text(json.dumps(TABLES) if suffix == ".json" else toml, encoding="utf-8")
    assert RunnerConfig.load(file, table="tool.slotgraph") == RunnerConfig(width=3)
    with pytest.raises(ConfigError, match="unknown option 'project'"):
        RunnerConfig.load(file)
    for table, says in {
        "tool.slotgrap": "has no table 'tool.slotgrap'; did you mean 'slotgraph'",
        "tools": "has no table 'tools'; did you mean 'tool'",
        "tool.slotgraph.": "has no table 'tool.slotgraph.'",
        "tool.x": "'x' of engine.*: expected keys and values, got 5",
        "tool.x.y": "'x' of engine.*: expected keys and values, got 5",
        "project": "unknown option 'name'",
    }.items():
        with pytest.raises(ConfigError, match=says):
            RunnerConfig.load(file, table=table)
    with pytest.raises(ConfigError, match=r"table: expected a name, such as 'tool.slotgraph', got \['tool'\]"):
        RunnerConfig.load(file, table=["tool"])  # type: ignore[arg-type]


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    """All faults are told at once; what a file leaves out is default."""
    with pytest.raises(ConfigError, match=r"(?s)width.*debug"):
        RunnerConfig.of({"width": "2", "debug": 1})
    (tmp_path / "good.toml").write_text('backend = "cpu"\nbuckets = [1, 2, 4]\nmax_waste = 1\n', encoding="utf-8")
    assert RunnerConfig.load(tmp_path / "good.toml") == RunnerConfig(backend="cpu", buckets=(1, 2, 4), max_waste=1)
