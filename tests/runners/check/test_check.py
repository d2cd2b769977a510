"""Checking a runner: which batches, what is left as it was, what is refused, and what the report says."""

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, CACHE_LOC, TOKENS, DecodeRunner, EagerRunner, Inputs, copied, errors, staged
from slotgraph.extend import once
from slotgraph.runners.check.checks import CheckReport, batches_of
from slotgraph.runners.check.trial import Finding
from slotgraph.runners.engine.hooks import Watcher
from tests.runners.check.test_planted import OURS, found_by, passed, runner_of, sound, tables_on
from tests.runners.models import PlainInputs, assert_right, plain_runner, plain_step, random_batch

if TYPE_CHECKING:
    from slotgraph.backends import Backend


def test_a_finding_of_drawn_batches_says_that_they_were_drawn() -> None:
    """A live row that reads what padded rows write is drawn, where a page 0 is nobody's: the report says what to do."""

    class Reading(Inputs):  # padded rows write row 0
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
        pages: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=8)

    cache = torch.zeros(9, dtype=torch.int64)

    def step(view: Any) -> torch.Tensor:
        cache[view.places] = view.ids + 1
        return cache[view.pages] * 2

    runner = runner_of(step, "cpu-capture", Reading)
    assert "values={'slot': (1, 9)}, or give batches of your own" in slotgraph.check(runner).notes[-1]
    passed(runner, values={"pages": (1, 8)})


@settings(max_examples=20)
@given(buckets=st.sets(st.integers(1, 12), min_size=1, max_size=4), rounds=st.integers(1, 3), seed=st.integers(0, 99))
def test_batches_reach_every_bucket(buckets: set[int], rounds: int, seed: int) -> None:
    """Each bucket is filled, has its longest tail and its shortest, and `rounds` more; the same whenever made."""
    runner = plain_runner("cpu", buckets=sorted(buckets))
    taken: dict[int | None, list[int]] = {}
    for make in batches_of(runner, None, rounds=rounds, seed=seed):
        one = make()
        taken.setdefault(runner.decide(one.batch).bucket, []).append(len(one.batch["weights"]))
        assert torch.equal(one.batch["ids"], make().batch["ids"])
    below = 0
    for bucket in sorted(buckets):
        assert {bucket, below + 1, max(bucket - 1, below + 1)} <= set(taken[bucket])
        assert len(taken[bucket]) == min(3, bucket - below) + rounds
        below = bucket


def test_nothing_is_left_behind(backend: "Backend") -> None:
    """After a check outputs are right, the cache holds what it did, and watchers were told of nothing."""
    runner = runner_of(sound, backend)
    cache = tables_on(backend.device)[1]
    cache.normal_()
    before, watcher = cache.clone(), mock.Mock(spec=Watcher)
    runner.watch.add(watcher)
    passed(runner)
    assert not watcher.method_calls
    assert runner.watch.watchers == (watcher,)
    assert torch.equal(cache, before)
    plain, device = plain_runner(backend), backend.device
    passed(plain, lambda rows, draw: random_batch(rows, draw.initial_seed(), device))
    for rows in (3, 8, 1, 5):
        assert_right(plain(random_batch(rows, rows, device)).cpu(), random_batch(rows, rows))


def test_given_batches(cpu: str) -> None:
    """A list of batches, some with side arguments; those that no graph takes are passed over with a note."""
    runner = plain_runner(cpu)
    batches = [random_batch(3, 1), (random_batch(7, 2), {}), random_batch(9, 3), random_batch(10, 4)]
    report = passed(runner, batches)
    assert report.steps["poison"] == 2
    told = "a batch was passed over, which no graph takes: {} rows are more than the largest bucket, 8"
    assert [note for note in report.notes if "passed over" in note] == [told.format(9), told.format(10)]


def test_sources_in_place(backend: "Backend") -> None:
    """Batches whose live rows lie in the slots themselves keep them, though garbage is written all around."""
    runner = plain_runner(backend)
    given, slot = random_batch(3, 4), runner.inputs(4).weights[:3]
    batch = {**random_batch(3, 4, backend.device), "weights": slot.copy_(given["weights"])}
    passed(runner, [batch], only=("poison", "coverage"))
    assert torch.equal(slot.cpu(), given["weights"])
    assert_right(runner(batch).cpu(), given)


def test_refusals(cpu: str) -> None:
    """Unknown checks and slots, no batches, and a runner that is not captured, each in its words."""
    runner = plain_runner(cpu)
    said = "there is no check 'poisson': checks are poison, parity, .*, weights; did you mean 'poison'?"
    for only in ("poisson", ("poisson",)):
        with pytest.raises(errors.ConfigError, match=said):
            slotgraph.check(runner, only=only)
    with pytest.raises(errors.ConfigError, match="read_outside names 'idz', which is not a slot of PlainInputs"):
        slotgraph.check(runner, read_outside=["idz"])
    wrong: dict[str, Any] = {"seed": "a", "values": [1], "state": ["cache"], "batches": {"ids": [1]}}
    for option, value in wrong.items():
        with pytest.raises(errors.ConfigError, match=f"^{option}: expected "):
            slotgraph.check(runner, **{option: value})
    with pytest.raises(errors.ConfigError, match="batches= is empty"):
        slotgraph.check(runner, [])
    with pytest.raises(errors.ReplayError, match=r"not captured: call capture\(\) before check\(\)"):
        slotgraph.check(DecodeRunner(PlainInputs, plain_step, buckets=[2], backend=cpu))


def test_step_that_is_never_the_same() -> None:
    """A step with state that nobody is told of is said to have it, and nothing is said of its slots."""
    calls = itertools.count()
    (found,) = found_by("poison", runner_of(lambda view: sound(view) + next(calls), "cpu"))
    assert found.slot is None
    assert "gives other outputs for the same inputs (live row 0 of the output changed" in found.message
    assert "pass that as state=[...]" in found.message


def test_one_check_by_its_name(cpu: str) -> None:
    """A name by itself is one check, and one that is not for a runner says why."""
    assert passed(plain_runner(cpu), only="poison").steps.keys() == {"poison"}
    eager = EagerRunner(PlainInputs, plain_step, backend=cpu)
    with pytest.raises(errors.ConfigError, match=r"not for this runner: a EagerRunner has no steps\(\)"):
        slotgraph.check(eager, only="transition")


def test_report(cpu: str) -> None:
    """Text, plain data and error of a report that has a finding, and of one that has none."""
    report = OURS[0].report(cpu, only=("poison", "coverage"))
    assert not report.ok
    assert report.of("coverage") == ()
    data = json.loads(json.dumps(report.as_data()))
    assert data["ok"] is False
    assert [one["slot"] for one in data["findings"]] == ["weights"]
    assert data["steps"] == {"poison": 19, "coverage": 19}
    text = str(report).splitlines()
    assert text[0].startswith("DecodeRunner: 1 finding (poison on 19 steps, coverage on 19 steps; ")
    assert text[1].startswith("poison: live row 0 of the output changed")
    assert text[2].startswith("note: slot 'places' was checked")
    with pytest.raises(errors.CheckError, match="1 finding"):
        report.raise_if_failed()
    CheckReport(runner="R", findings=(), steps={}).raise_if_failed()
    assert str(Finding("parity", None, "x")) == "parity: x"


class Advanced(Inputs):  # a slot that a producer stages, and that each step moves on
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=9)
    place: torch.Tensor = staged(TOKENS, dtype=torch.int64, pad=0)


def _advancing(view: Advanced) -> torch.Tensor:
    made = view.ids * 10 + view.place
    view.place.add_(1)
    return made


class Pairs(Inputs):
    pairs: torch.Tensor = copied(BATCH, 4, dtype=torch.float32, pad=0)


class Waves(Inputs):  # complex numbers, of which a tail keeps earlier ones, and another bears what live rows have
    waves: torch.Tensor = copied(TOKENS, dtype=torch.complex64, pad=once(1))
    others: torch.Tensor = copied(TOKENS, dtype=torch.complex64, pad=0, poison="stale")


class Plain:  # what no one knows to be made of fields
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.name, self.own = rows, "rows", self


ODD: dict[str, tuple[type[Inputs], Callable[[Any], Any], dict[str, Any]]] = {
    "advanced": (Advanced, _advancing, {}),
    "column": (Pairs, lambda view: (view.pairs * 2)[:, 1], {}),
    "conj": (Waves, lambda view: (view.waves * view.others).conj(), {}),
    "imag": (Waves, lambda view: (view.waves * view.others).conj().imag, {}),
    "object": (PlainInputs, lambda view: Plain(plain_step(view)), {"output_rows": None}),
}


@pytest.mark.parametrize("kind", ODD)
def test_sound_steps_of_odd_kinds(cpu: str, kind: str) -> None:
    """Slots that steps move on, one row of strided outputs, complex numbers, plain objects."""
    inputs, step, options = ODD[kind]
    passed(runner_of(step, cpu, inputs, **options))


def test_outputs_in_plain_objects(cpu: str) -> None:
    """A tail that reaches a live row is found where that is an attribute of an object, handed out whole."""

    def step(view: PlainInputs) -> Plain:
        return Plain(plain_step(view) + view.weights.sum())

    (found,) = found_by("poison", runner_of(step, cpu, PlainInputs, output_rows=None))
    assert found.slot == "weights"
    assert "live row 0 of the output.rows changed" in found.message


def test_empty_batches(cpu: str) -> None:
    """A step that cannot do without a row is sound, since an empty batch is padded; one row is another matter."""

    def step(view: Pairs) -> torch.Tensor:
        return view.pairs * 2 if len(view.pairs) else view.pairs[1:].amax(0)

    runner = runner_of(step, cpu, Pairs)
    passed(runner, [{"pairs": torch.ones(rows, 4)} for rows in (0, 3)])
