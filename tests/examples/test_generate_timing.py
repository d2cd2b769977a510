"""What the demo's decode steps take: the graph alone, the whole step, and what takes part beside them."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console

from tests.examples.demo import NEEDS, Generate, Module, Result

pytest.importorskip("transformers", reason=NEEDS)

SHORT = ("--max-new-tokens", "6", "--max-batch", "3", "--prefill", "eager")


def test_share_of_the_inputs_is_reported(default: Result) -> None:
    """The largest bucket is timed on a CPU, with one row of padding, and a sentence says what comes of it."""
    _, report, out = default
    measured, [times] = report["measured"], report["measured"]["times"]
    assert (measured["rounds"], measured["device"], measured["note"]) == (3, False, "")
    assert (times["live"], times["bucket"], times["each"], times["compiled"]) == (7, 8, False, None)
    for way in ("replay", "whole", "eager"):
        assert 0 < times[way]["p10"] <= times[way]["median"] <= times[way]["p90"]
    assert times["share"]["median"] < 1
    assert "7 of 8" in out
    assert "a decode step of 7 requests" in " ".join(out.split())
    assert "compiled" not in out


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_as_on_a_device(generate: Generate, serving: Module, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device every bucket is timed, with the host waiting for each step and without, and torch.compile too."""
    measuring = serving("measuring")
    monkeypatch.setattr(measuring, "ON_A_CPU", attrs.evolve(measuring.ON_A_DEVICE, rounds=2, turn=0.0))
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    status, report, out = generate("--backend", backend, *SHORT, "--rounds", "2")
    times = report["measured"]["times"]
    assert status == 0
    assert [(one["live"], one["bucket"], one["each"]) for one in times] == [
        (live, bucket, each) for live, bucket in ((1, 1), (2, 2), (3, 3)) for each in (False, True)
    ]
    assert [one["compiled"] is not None for one in times] == [False] * 4 + [True] * 2
    assert "the host waits for each" in out
    assert 'torch.compile(mode="reduce-overhead")' in " ".join(out.split())


def test_compiled_step_is_compiled_once(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking turns with steps under another attention does not make torch compile anew."""
    compile_, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile_(step, backend="aot_eager", dynamic=False))
    before = counters["stats"]["unique_graphs"]
    status, report, _ = generate(*SHORT, "--rounds", "2", "--compare")
    assert (status, report["measured"]["note"]) == (0, "")
    assert report["measured"]["times"][0]["compiled"]["median"] > 0
    assert counters["stats"]["unique_graphs"] == before + 1


def test_failure_to_compile_is_told(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot compile, one line says why, and the demo passes."""

    def refuse(*_: Any, **__: Any) -> Callable[..., Any]:
        message = "\n  no compiler was found\nand more lines"
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "compile", refuse)
    status, report, out = generate(*SHORT, "--rounds", "1", "--compare")
    assert (status, report["measured"]["times"][0]["compiled"]) == (0, None)
    assert report["measured"]["note"] == "torch.compile was not timed: RuntimeError: no compiler was found"
    assert "no compiler was found." in " ".join(out.split())


def test_graphs_that_torch_skips_are_told(generate: Generate, serving: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of torch.compile without CUDA graphs are not passed off as those of its graphs."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(serving("measuring"), "graphs_skipped", iter([3, 5]).__next__)
    _, report, _ = generate(*SHORT, "--rounds", "1", "--compare")
    assert "without CUDA graphs" in report["measured"]["note"]


@pytest.mark.parametrize("argv", [("--rounds", "0"), ("--max-new-tokens", "1", "--rounds", "2")])
def test_nothing_to_time(generate: Generate, prompts: str, argv: tuple[str, ...]) -> None:
    """Steps are not timed where that is not wanted, or where none decodes."""
    status, report, out = generate("--prompts", prompts, "--max-new-tokens", "4", *argv)
    assert (status, report["measured"]) == (0, None)
    assert "graph alone" not in out


def test_steady_batches(serving: Module) -> None:
    """Requests that are over come back with pages of their own, and fit the bucket that they are meant for."""
    options = serving("options").parse(["--max-new-tokens", "6", "--max-batch", "5", "--buckets", "1,2,3,4,5,6,9"])
    language = serving("model").load_language(options, torch.device("cpu"))
    requests = serving("prompts").read_requests(options, language)
    engine = serving("engine").Engine(language, requests, options)
    with serving("attention").paged(language.model):
        engine.capture()
        assert sum(1 for _ in engine.run()) > 0
    steady = serving("steady").Steady.after(engine, options, requests)
    sizes = steady.sizes()
    assert [(size.live, size.bucket) for size in sizes] == [(1, 1), (3, 3), (5, 5)]
    for size in sizes:
        batches = steady.batches(size)
        assert [engine.decode.decide(batch).bucket for batch in batches] == [size.bucket] * len(batches)
        assert all(len(batch.out_cache_loc.unique()) == size.live for batch in batches)
        assert len({batch.input_ids.data_ptr() for batch in batches}) == len(batches) > 1


def test_turns(serving: Module) -> None:
    """Contestants take turns within what they need around them, and a step before each turn is not timed."""
    timing, heard = serving("timing"), list[str]()

    def contestant(name: str) -> Any:
        @contextmanager
        def around() -> Iterator[None]:
            heard.append(f"{name}<")
            yield
            heard.append(f"{name}>")

        return timing.Contestant(lambda number: heard.append(f"{name}{number}"), around)

    race = timing.Race(rounds=2, steps=2, wait=lambda: heard.append("."), each=True)
    times = race.run([contestant("a"), contestant("b")])
    turn = ["<", "0", ".", "1", ".", "2", ".", ".", ">"]
    expected = [part if part == "." else name + part for name in ("a", "b") for part in turn]
    assert heard == expected * 2
    assert [len(one) for one in times] == [2, 2]


def test_spread_of_one_sample(serving: Module) -> None:
    """One round is a median without a spread."""
    timing = serving("timing")
    assert timing.Spread.of([2.0]) == timing.Spread(median=2.0, p10=2.0, p90=2.0)
    [[one]] = timing.Race(rounds=1, steps=1, wait=int).run([timing.Contestant(abs, nullcontext)])
    assert one > 0


def test_tables_fit_a_terminal(serving: Module) -> None:
    """On a device's terminal of 80 columns no figure is cut, and a share within the noise is not given out as one."""
    measuring, spread = serving("measuring"), serving("timing").Spread
    ways = {name: spread(median=1234.5, p10=1200.0, p90=1300.0) for name in ("replay", "whole", "eager", "compiled")}
    sizes = {"live": 7, "bucket": 8, "steps": 60}
    for lowest, words in ((0.11, "take 12.0% of a decode step of 7 requests, 12.0% where"), (-0.01, "is lost in")):
        share = spread(median=0.12, p10=lowest, p90=0.13)
        times = [measuring.StepTimes(**sizes, each=each, share=share, **ways) for each in (False, True)]
        screen = io.StringIO()
        measured = measuring.Measured(rounds=11, device=True, times=times, note="")
        serving("times").show_times(measured, Console(file=screen, width=80))
        out = screen.getvalue()
        assert words in " ".join(out.split())
        assert "…" not in out
        assert "1234 ±50" in out
        assert "A CPU has no graphs" not in out
