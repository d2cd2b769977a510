"""Planted bugs: runners with one fault each. Its check finds it, with its slot alone, in the words of the page."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import attrs
import pytest
import torch

import slotgraph
from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, Inputs, computed, copied, errors, keep, output
from slotgraph.backends import cpu
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.packet import BYTE
from slotgraph.dataflow.slots import Copied
from slotgraph.dataflow.transition import Transition
from slotgraph.extend import once, slot
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.check.trial import Finding
from slotgraph.runners.steps.host_work import HostWork
from tests.invariants.device import Device
from tests.runners.models import TABLE, WORDS, decoder, recording

if TYPE_CHECKING:
    from slotgraph.backends import Backend

PAGE: Final = Path(__file__).with_name("README.md")


class Sound(Inputs):  # one slot of each rule
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=WORDS - 1)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=WORDS - 1)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=once(1.0))
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=keep("only live rows are counted"))
    seen: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("an id like any other"), poison="stale", limit=3)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)
    logits: torch.Tensor = output(TOKENS, TABLE.shape[1], dtype=torch.float32)


def sound(view: Any) -> torch.Tensor:
    """A step whose rows are each their own affair; it writes a cache, and reads it again."""
    table, cache = tables_on(view.ids.device)
    scale = torch.where(view.flags, view.weights, -view.weights) / view.temperatures
    hidden = table[view.twice] + table[view.positions] * scale[:, None] + table[view.seen] + view.lens[:, None]
    cache[view.places] = hidden
    view.logits.copy_(cache[view.places] + view.ids[:, None])
    return torch.mul(view.logits, 3)


@functools.cache
def tables_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of words and a cache on a device; moved there in a warm-up, since a captured step could not."""
    return TABLE.to(device), torch.zeros(64, TABLE.shape[1], device=device)


def runner_of(step: Callable[[Any], Any], backend: Any, inputs: type[Inputs] = Sound, **options: Any) -> Any:
    """A captured runner."""
    return decoder(inputs, step, backend=backend, **{"buckets": [2, 4, 8], **options})


def report_of(check: str, runner: Any, batches: Any = None, **options: Any) -> CheckReport:
    """What one check says."""
    return slotgraph.check(runner, batches, only=(check,), progress=False, **options)


def found_by(check: str, runner: Any, batches: Any = None, **options: Any) -> list[Finding]:
    """What it finds."""
    return list(report_of(check, runner, batches, **options).findings)


def passed(runner: Any, batches: Any = None, **options: Any) -> CheckReport:
    """What all checks say, none of which may find anything."""
    report = slotgraph.check(runner, batches, progress=False, **options)
    assert report.ok, str(report)
    return report


@attrs.frozen
class Planted:
    """A bug: what it is called, its slot, and the step, the declaration and the check that it is for.

    fatal: whether it stops a device for good. noted: the note that it is on a device, which may run more than operators
    tell.
    """

    what: str
    slot: str
    step: Callable[[Any], Any] = sound
    inputs: type[Inputs] = Sound
    check: str = attrs.field(default="poison", kw_only=True)
    fatal: bool = False
    noted: str | None = None

    def report(self, backend: Any, **options: Any) -> CheckReport:
        """What its check says of a runner that has it."""
        runner = runner_of(self.step, backend, self.inputs)
        return slotgraph.check(runner, progress=False, rounds=4, **{"only": (self.check,), **options})


def _advances(view: Any) -> Any:  # positions, where a flag says so, which none does while it is captured
    outputs = sound(view)
    view.positions.add_(view.flags.any().long())
    return outputs


def _writes_half(view: Any) -> Any:
    made = sound(view)
    view.half[::2].copy_(made[::2])
    return made


def _half(positions: torch.Tensor, out: torch.Tensor) -> None:
    rows = out.shape[0] // 2
    torch.mul(positions[:rows], 2, out=out[:rows])


class HalfWritten(Sound):  # an output that is written in part
    half: torch.Tensor = output(TOKENS, TABLE.shape[1], dtype=torch.float32)


class HalfComputed(Sound):  # a function that leaves rows out
    halves: torch.Tensor = computed(_half, shape=TOKENS, dtype=torch.int64)


class Unread(Sound):  # a slot that nothing reads
    extra: torch.Tensor = copied(BATCH, 3, dtype=torch.float32, pad=0)


@attrs.frozen(kw_only=True)
class Ruleless(Copied):  # a kind of slot that forgets its tail
    def rule(self) -> None:
        """None."""

    def faults(self) -> Iterator[str]:  # none, it says
        yield from ()


class ForgottenTail(Sound):  # a slot of that kind
    extra: torch.Tensor = slot(Ruleless(shape=(TOKENS,), dtype=torch.int64, limit=3))


OURS: list[Planted] = [
    Planted(
        "floats of padded rows reach live ones: the largest weight of a bucket",
        "weights",
        lambda view: sound(view) * view.weights.amax(),
    ),
    Planted(
        "whole numbers of padded rows do: ranks among all ids",
        "ids",
        lambda view: sound(view) + (view.ids[None, :] < view.ids[:, None]).sum(1, keepdim=True),
    ),
    Planted("truth values do: any flag of the bucket", "flags", lambda view: sound(view) + view.flags.any()),
    Planted("a tail that is kept, for nobody reads it, is read", "lens", lambda view: sound(view) + view.lens.sum()),
    Planted(
        "such a tail indexes a table",
        "lens",
        lambda view: sound(view) + tables_on(view.ids.device)[0][view.lens.long()],
        fatal=True,
    ),
    Planted(
        "what earlier steps left, in a tail that is set once, is read",
        "temperatures",
        lambda view: sound(view) + view.temperatures.amin(),
    ),
    Planted("the step writes a slot that it was to read, where a flag says so", "positions", _advances),
    Planted(
        "an output is added to what the step before left there",
        "logits",
        lambda view: view.logits.clone() + sound(view),
    ),
    Planted("an output is written in part", "half", _writes_half, HalfWritten, check="coverage"),
    Planted(
        "a function with `out` leaves rows as they were",
        "halves",
        lambda view: sound(view) + view.halves[:, None],
        HalfComputed,
        check="coverage",
    ),
    Planted("a kind of slot forgets its tail", "extra", lambda view: sound(view) + view.extra[:, None], ForgottenTail),
    Planted(
        "a slot is filled in each step, and nothing reads it",
        "extra",
        inputs=Unread,
        check="coverage",
        noted="no operator of the step reads slot 'extra': a kernel that is launched by itself may",
    ),
]
"""Bugs that poison and coverage find."""
CAPTURES: Final = "cpu-capture"


class Counted(Sound):  # with a count of padded rows, where one of live rows is due
    count: torch.Tensor = computed(lambda step: step.padded(TOKENS), shape=1, dtype=torch.int64)


class Hosted(Inputs):  # lengths in the host's memory, which the graph copies to the device
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")


class Advancing(Sound):  # slots that advance: by operators, by a number, to what the step wrote, not at all
    positions: torch.Tensor = copied(
        TOKENS, dtype=torch.int64, pad=0, limit=9, then=lambda positions, flags: torch.where(flags, 0, positions + 1)
    )
    lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=keep("only live rows are counted"), then=lambda lens: lens + 1
    )
    scores: torch.Tensor = copied(TOKENS, TABLE.shape[1], dtype=torch.float32, pad=-1, then=lambda logits: logits)


class AdvancingByPadding(Advancing):  # to the largest of the bucket
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, then=lambda lens: lens + lens.amax())


class AdvancingFromOne(Advancing):  # which no initial value is
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, then=lambda lens: 60 // lens)


def advancing(view: Any) -> torch.Tensor:
    """The step of slots that advance."""
    return torch.add(sound(view), view.scores)


def _padding_in_a_rule() -> CheckReport:
    return report_of("transition", runner_of(advancing, CAPTURES, AdvancingByPadding))


def _rule_that_raises() -> CheckReport:
    return report_of("transition", runner_of(advancing, CAPTURES, AdvancingFromOne, lowering="foreach"))


def _advanced_tail() -> CheckReport:
    advance = cpu._advance

    def whole(row: list[int], rows: int, *, moves: bool, tail: bool) -> None:
        is_positions = row[8] and row[7] & BYTE == torch.int64.itemsize
        advance(row, rows and row[4] if is_positions else rows, moves=moves, tail=tail)

    with mock.patch.object(cpu, "_advance", whole):
        return report_of("transition", runner_of(advancing, CAPTURES, Advancing, lowering="in_graph"))


class AdvancingByAll(Advancing):  # with rules and functions that reduce over rows
    shares: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    sums: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda sums, shares: sums + shares.sum())
    hosted: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    most: torch.Tensor = computed(lambda hosted: int(hosted.sum()), shape=1, dtype=torch.int64)


class AdvancingInTurn(AdvancingByAll):  # by a rule that reads what another one makes
    after: torch.Tensor = copied(1, dtype=torch.int64, then=lambda sums: sums.sum().reshape(1))


def _late_tails() -> CheckReport:
    """Host functions that are called before the tails of host slots are reset, in the step of an edit."""
    reset, packed = HostWork.reset_tails, HostWork.packed_values

    def values_first(work: HostWork, fields: Any) -> dict[str, bytes]:
        found = packed(work, fields)
        reset(work, resized=True)
        return found

    late = mock.patch.object(HostWork, "reset_tails", return_value=None)
    with late, mock.patch.object(HostWork, "packed_values", values_first):
        return report_of("transition", runner_of(advancing, CAPTURES, AdvancingByAll, lowering="in_graph"))


def _rules_over_the_largest_bucket() -> CheckReport:
    """Rules that are run over all rows of the largest bucket, in the step of an edit."""
    made: Callable[..., HostWork] = HostWork.of
    runner = runner_of(advancing, CAPTURES, AdvancingByAll, lowering="in_graph")

    def whole(bucket: Any, live: Any, sides: Any, lanes: Any, carried: Any) -> HostWork:
        largest = runner.graphs.get(max(runner.sizes), frozenset())
        of_all = largest.filling.bucket.transitions["device"].of(bucket.step(live).live_sizes, lanes)
        return attrs.evolve(made(bucket, live, sides, lanes, carried), rules=[of_all])

    with mock.patch.object(HostWork, "of", whole):
        return report_of("transition", runner)


def _padded_rows_of_new_values() -> CheckReport:
    """Rules that see what others made of padded rows."""
    made = Transition.__init__

    def bare(transition: Any, *given: Any) -> None:
        made(transition, *given)
        transition._made = {}

    with mock.patch.object(Transition, "__init__", bare):
        return report_of("transition", runner_of(advancing, CAPTURES, AdvancingInTurn))


def _frozen_number() -> CheckReport:
    host = {"scale": 2.0}
    runner = runner_of(lambda view: sound(view) * host["scale"], CAPTURES)
    host["scale"] = 3.0
    return report_of("parity", runner)


def _dropout() -> CheckReport:
    dropout = torch.nn.Dropout(0.4)
    return report_of("poison", runner_of(lambda view: dropout(sound(view)), CAPTURES))


def _changed_weight() -> CheckReport:
    weight = torch.nn.Parameter(torch.rand(4), requires_grad=False)
    return report_of("weights", runner_of(lambda view: sound(view) * weight.mul_(0.5), CAPTURES))


def _frozen_sum() -> CheckReport:
    weight = torch.nn.Parameter(torch.rand(4), requires_grad=False)
    array = weight.numpy()  # which shares its memory
    return report_of("weights", runner_of(lambda view: sound(view) * weight * float(array.sum()), CAPTURES))


def _sum_made_once() -> CheckReport:
    weight, made = torch.nn.Parameter(torch.rand(4), requires_grad=False), dict[str, float]()

    def step(view: Any) -> torch.Tensor:
        if not made:
            made["sum"] = float(weight.sum())
        return sound(view) * weight * made["sum"]

    return report_of("weights", runner_of(step, CAPTURES))


def _exchanged_tensor() -> CheckReport:
    held = {"bias": torch.ones(4)}
    runner = runner_of(lambda view: sound(view) + held["bias"], CAPTURES)
    held["bias"] = torch.zeros(4)
    return report_of("addresses", runner)


def _moved_slot() -> CheckReport:
    runner = runner_of(sound, CAPTURES)
    buffer = runner.graphs.buffers["weights"]
    buffer.tensor = buffer.tensor.clone()
    return report_of("addresses", runner)


def _broken_ring() -> CheckReport:
    backend = Device("mark")
    runner = runner_of(sound, backend, buckets=[4, 8], lowering="in_graph")
    with backend.later():
        return report_of("races", runner, state=[])


def _overtaken_copy() -> CheckReport:
    backend = Device()
    runner = runner_of(lambda view: view.ids + view.lens.clone(), backend, Hosted, buckets=[4, 8], lowering="in_graph")
    runner.graphs.filler.hosts.wait = lambda: None

    def batches(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {name: torch.randint(1, 99, (rows,), generator=generator) for name in ("ids", "lens")}

    with backend.later():
        return report_of("races", runner, batches, state=[])


OTHERS: Final[dict[str, Callable[[], CheckReport]]] = {
    "a number of the host's, which the step reads, is frozen in the graph": _frozen_number,
    "a count is the bucket's, where the batch's is due": lambda: report_of(
        "parity", runner_of(lambda view: sound(view) + view.count, CAPTURES, Counted)
    ),
    "a tensor that the step reads is exchanged after capture": _exchanged_tensor,
    "the buffer of a slot is another one than at capture": _moved_slot,
    "host memory is written again while its upload is in flight": _broken_ring,
    "a fill overtakes a copy out of a slot in host memory": _overtaken_copy,
    "a dropout is still on": _dropout,
    "the step changes a weight": _changed_weight,
    "a number that the step makes of a weight is frozen in the graph": _frozen_sum,
    "the step makes a number of a weight in its first run alone": _sum_made_once,
    "a rule makes live rows of padded ones": _padding_in_a_rule,
    "a rule raises on a slot's initial value": _rule_that_raises,
    "the kernel advances rows behind the live ones": _advanced_tail,
    "the host computes from a slot before its tail is reset": _late_tails,
    "rules run over the largest bucket in the step of an edit": _rules_over_the_largest_bucket,
    "a rule sees padded rows of another slot's new value": _padded_rows_of_new_values,
}
"""Bugs that the other checks find."""


def rows_of_page() -> Iterator[str]:
    """The rows of the table of planted bugs."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| planted bug | found by | slot | message |\n")
    yield from (line for line in table.partition("\n\n")[0].splitlines()[1:])


def assert_on_page(what: str, report: CheckReport) -> None:
    """The page has its row: the bug, the check, the slot and the message, but for numbers, in which devices differ."""
    finding = report.findings[0]
    slot, message = f"`{finding.slot}`" if finding.slot else "-", finding.message.replace("|", "\\|")
    (known,) = (row for row in rows_of_page() if row.startswith(f"| {what} | "))
    rows = (f"| {what} | {finding.check} | {slot} | {message} |", known)
    numberless = [re.sub(r"-?\d+(\.\d+)?|nan|-?inf", "#", row) for row in rows]
    assert numberless[0] == numberless[1]


@recording
@pytest.mark.parametrize("bug", OURS, ids=lambda bug: bug.what)
def test_planted_bug_is_found(backend: "Backend", bug: Planted) -> None:
    """Its check finds it, and names its slot alone."""
    if bug.fatal and backend.device.type != "cpu":
        pytest.skip("it would stop the device for all tests to come")
    report = bug.report(backend)
    if bug.noted is not None and backend.device.type != "cpu":
        assert bug.noted in report.notes, str(report)
        return
    assert [finding.slot for finding in report.findings] == [bug.slot], str(report)
    assert_on_page(bug.what, report)


@pytest.mark.parametrize("what", OTHERS)
def test_other_bugs_are_found(what: str) -> None:
    """The other checks find theirs, once."""
    found = OTHERS[what]()
    assert len(found.findings) == 1
    assert_on_page(what, found)


def test_the_page_has_no_other_rows() -> None:
    """Every row of it is planted here, in this order."""
    known = [*(bug.what for bug in OURS), *OTHERS]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows_of_page()] == known


def test_sound_runner_has_no_findings(backend: "Backend") -> None:
    """The same step without a bug passes all checks, with notes on what was held."""
    report = passed(runner_of(sound, backend))
    assert report.notes == ("slot 'places' was checked against its pad=0: it decides where the step writes",)
    assert report.steps == dict.fromkeys(("poison", "parity", "addresses", "coverage", "races", "weights"), 13)


@recording
@pytest.mark.parametrize("lowering", LADDER)
def test_sound_rules_have_no_findings(backend: "Backend", lowering: str) -> None:
    """Slots that advance pass all checks, however that is done, and steps and calls go on as before."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    runner = runner_of(advancing, backend, Advancing, lowering=lowering)
    shapes = {name: slot.shape[1:] for name, slot in Advancing.slotgraph.slots.items() if slot.reads(name) is not None}
    batch: dict[str, Any] = {name: [[1] * 4] * 3 if shape else [1, 2, 3] for name, shape in shapes.items()}
    batch["flags"] = [True, False, True]

    def steps() -> list[Any]:
        found = []
        for step in runner.steps(batch, ahead=1):
            found.append(step.outputs.tolist())
            if len(found) > 3:
                break
        return found

    before = steps()
    report = passed(runner)
    assert report.steps["transition"] == report.steps["poison"] == 13
    assert steps() == before


def test_transitions_that_no_one_runs(cpu: str) -> None:
    """A runner of which no slot advances has no such check; one that steps() refuses is noted."""
    with pytest.raises(errors.ConfigError, match="check 'transition' is not for this runner: no slot has then="):
        report_of("transition", runner_of(sound, cpu))

    class Varied(Advancing):
        extra: torch.Tensor = copied(BATCH, Axis("PAGES"), dtype=torch.int32, pad=0)

    report = report_of("transition", runner_of(advancing, cpu, Varied, sizes={Axis("PAGES"): 3}))
    assert report.ok
    assert "no transition was checked: slot 'extra' varies on PAGES" in report.notes[0]
