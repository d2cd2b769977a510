"""The example programs: each says that all is equal where it is, and finds every bug that is planted in it."""

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, CACHE_LOC, computed, copied
from slotgraph.backends import load
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.fill.tails import CleanTails
from slotgraph.speculative import WIDTH
from tests.examples.demo import EXAMPLES, NEEDS, module, stale
from tests.programs import python

MODELS = ("windows", "speculating", "states", "paging", "batching")  # packages that take transformers
SHORT = {
    "twins": ["--sequences", "8", "--max-new-tokens", "20"],
    "engine": ["--requests", "40", "--tokens", "30"],
    "windows": ["--requests", "4", "--max-new-tokens", "16", "--buckets", "1,4"],
    "speculating": ["--requests", "8", "--max-new-tokens", "24"],
    "states": ["--requests", "8", "--max-new-tokens", "16"],
    "images": ["--images", "24", "--rounds", "1"],
    "paging": ["--requests", "8", "--max-new-tokens", "24", "--pages", "20"],
    "batching": ["--requests", "6", "--max-new-tokens", "10", "--hidden", "64"],
    "cycles": [],
    "spans": ["--layers", "1", "--hidden", "8"],
}
TREE = ["--requests", "4", "--max-new-tokens", "12", "--buckets", "2,3", "--topk"]
LAUNCH = ["--one-launch", "--chunk", "2"]
GENERATED = "generate() chose the same tokens"
SAME_TOKENS = "equal: transformers chose the same tokens for all 6 requests"
EQUAL: list[tuple[str, list[str], list[str]]] = [
    ("twins", [], ["equal: all tokens, and all bytes", "\nright: logits differ", "\n  bucket 8: "]),
    ("twins", ["--buckets", "2,3", "--max-batch", "6"], ["\n  eagerly (too_large): ", "equal: all tokens"]),
    ("engine", [], ["all equal to those without graphs"]),
    ("windows", [], [GENERATED, "look-ups         0 of a layer's places"]),
    ("windows", ["--window", "7", "--buckets", "3"], [GENERATED]),
    ("windows", ["--window", "2", "--seed", "5"], [GENERATED]),
    ("windows", ["--translate"], [GENERATED]),
    ("speculating", ["--time"], [GENERATED, "tree             3 wide, 4 deep; 10 nodes are verified", "\ninputs  "]),
    ("speculating", ["--lookup"], [GENERATED, "its draft is prompt lookup", "tree             1 wide, 9 deep"]),
    *(
        ("speculating", [*TREE, str(wide), "--steps", str(deep), "--draft-tokens", str(nodes)], [GENERATED])
        for wide, deep, nodes in ((1, 3, 4), (2, 1, 3), (2, 2, 1), (4, 3, 37))
    ),
    ("speculating", ["--one-launch"], [GENERATED, ", 1.00 a cycle\n", "a smaller model"]),
    ("speculating", ["--one-launch", "--lookup", "--ahead", "2"], [GENERATED, "its draft is prompt lookup"]),
    ("speculating", ["--one-launch", "--chunk", "4", "--ahead", "0", "--buckets", "2,3"], [GENERATED, ", 0."]),
    *(
        ("speculating", [*TREE, str(wide), "--steps", str(deep), "--draft-tokens", str(nodes), *LAUNCH], [GENERATED])
        for wide, deep, nodes in ((1, 3, 4), (2, 2, 1), (4, 3, 37))
    ),
    *(
        ("states", ["--model", family, "--buckets", "1,2,5"], [GENERATED, ", 3 buckets captured", ", 0 eagerly\n"])
        for family in ("bamba", "jamba", "falcon-h1")
    ),
    (
        "images",
        [],
        ["equal to the model on each image alone", "refused   1 of 2 more: slot 'corner': row", "\nDecodeRunner"],
    ),
    ("paging", [], [GENERATED]),
    ("paging", ["--buckets", "3", "--prefill-buckets", "128"], [GENERATED]),
    ("paging", ["--ahead", "2", "--pages", "12"], [GENERATED]),
    ("paging", ["--chunk", "3"], [GENERATED]),
    ("batching", [], [SAME_TOKENS, "\ncode lines of inputs and graphs: transformers "]),
    ("batching", ["--model", "gemma3", "--tokens", "6,64", "--keys", "1100"], [SAME_TOKENS]),
    ("images", ["--most", "3"], ["equal to the model on each image alone", "\nbucket 3 "]),
]


def needs(package: str) -> None:
    """Skip a test of a program whose libraries are not here."""
    if package in MODELS:
        pytest.importorskip("transformers", reason=NEEDS)
    if package == "states":
        pytest.importorskip("transformers", minversion="5.23", reason="its caches hand out states from there on")
    if package == "batching":
        pytest.importorskip("transformers", minversion="5.23", reason="its continuous batching has these classes then")
    if package == "spans":
        pytest.importorskip("matplotlib", reason="drawings: pip install 'slotgraph[plot]'")


def run(capsys: pytest.CaptureFixture[str], package: str, *argv: str) -> tuple[int, str]:
    """Run a program as on a command line: its exit status, and what it printed."""
    needs(package)
    status = module(f"{package}.program").main([*SHORT[package], *argv])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(("package", "argv", "says"), EQUAL, ids=[" ".join([one, *argv]) for one, argv, _ in EQUAL])
def test_captured_steps_give_what_the_model_gives(
    package: str, argv: list[str], says: list[str], backend_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Captured steps give what the model gives without them, on each backend; the program says so, and can end."""
    threads = {*threading.enumerate()}
    status, out = run(capsys, package, "--backend", backend_name, *argv)
    assert status == 0
    assert [one for one in threading.enumerate() if one not in threads and not one.daemon] == []
    assert [words for words in says if words not in out] == []


def test_prompt_lookup_wins_tokens_on_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A text that repeats its prompt takes a fraction of the verifies that it has tokens."""
    needs("speculating")
    status = module("speculating.program").main(["--model", "smollm2", "--requests", "4", "--buckets", "1,4"])
    out, err = capsys.readouterr()
    if "is not installed" in err:
        pytest.skip(err)
    assert status == 0, err
    assert float(out.partition("acceptance")[2].split()[0]) > 2


def test_a_request_that_ends_on_the_device_alone_is_told() -> None:
    """Without the error the loop waits for its tokens and never ends."""
    needs("speculating")

    class EndsAtOnce(module("speculating.inputs").TreeCycleInputs):  # type: ignore[misc] # as above
        done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda ended: ended | True)

    program = module("speculating.program")
    with pytest.raises(RuntimeError, match="request 0 has ended on the device after"):
        program.serve(program.parse(["--requests", "2", "--buckets", "2", "--one-launch"]), cycle=EndsAtOnce)


@pytest.mark.parametrize("argv", [[], LAUNCH], ids=["three launches", "one launch"])
def test_end_tokens_end_texts_of_speculation(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also among tokens that one verify wins: those behind it are not handed out."""
    needs("speculating")
    program = module("speculating.program")
    load, ends = program.load, frozenset(range(0, 256, 16))

    def ending(*args: Any) -> Any:
        language, draft = load(*args)
        return attrs.evolve(language, eos=ends), draft

    monkeypatch.setattr(program, "load", ending)
    assert program.main(["--requests", "6", "--buckets", "3", *argv]) == 0
    out = capsys.readouterr().out
    lengths = [int(found) for found in re.findall(r" (\d+) tokens: ", out)]
    assert len(lengths) == 6
    assert min(lengths) < 24  # without ends each text has half of --max-new-tokens at least


@pytest.mark.parametrize("argv", [["--chunk", "2"], ["--ahead", "0"], ["--one-launch", "--time"]], ids=" ".join)
def test_options_of_no_use_to_speculation_are_told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Cycles of three launches have no chunks, and cycles of one have no batch to time."""
    needs("speculating")
    assert module("speculating.program").main(argv) == 2
    assert "--one-launch" in capsys.readouterr().err


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=4), st.integers(1, 9))
def test_look_ups_on_the_device_find_what_those_on_the_host_find(texts: list[list[int]], count: int) -> None:
    """For many texts at once, behind which anything may be."""
    needs("speculating")
    lookups = module("speculating.lookup")
    padded = torch.tensor([text + [one % 3 for one in range(15 - len(text))] for text in texts])
    lengths = torch.tensor([*map(len, texts)])
    found = lookups.lookup_on_device(padded, lengths, count).tolist()
    assert found == [lookups.lookup(text, count) for text in texts]


@pytest.mark.parametrize("package", sorted({*SHORT} - {"engine"}))
def test_what_cannot_run_is_told(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend, or a cycle, that is not there ends the program with a sentence and status 2; so do odd options."""
    needs(package)
    wrong = ["--layout", "none"] if package == "cycles" else ["--backend", "no-such"]
    main = module(f"{package}.program").main
    assert main(wrong) == 2
    assert re.search(r"\bno (backend|cycle) '(no-such|none)'", capsys.readouterr().err)
    with pytest.raises(SystemExit) as stopped:
        main(["--unheard-of"])
    assert stopped.value.code == 2


def unmasked(base: Any) -> Any:
    """A mask that hides nothing of a tree."""

    class Unmasked(base):  # type: ignore[misc] # no package that a checker finds
        tree_mask: torch.Tensor = computed(
            lambda parents: (parents[:, :, None] > -2).expand(-1, -1, parents.shape[1]),
            shape=(BATCH, WIDTH, WIDTH),
            dtype=torch.bool,
        )

    return Unmasked


def one_by_one(base: Any) -> Any:
    """A cycle whose roots advance by one token, whatever was won."""

    class OneByOne(base):  # type: ignore[misc] # as above
        positions: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)

    return OneByOne


def forgetful(base: Any) -> Any:
    """A runner by hand that leaves out one line of its fill."""

    class Forgetful(base):  # type: ignore[misc] # as above
        def fill(self, batch: Any, rows: int, size: int) -> None:
            tail = self.buffers["slot_mapping"][rows:size]
            stale = tail.clone()
            super().fill(batch, rows, size)
            tail.copy_(stale)

    return Forgetful


def faulty(part: str, **behaviour: Any) -> Any:
    """The paged loop with a class of it, a runner or a scheduler, in which these methods do something else."""
    ours = module("paging.program").OURS
    return attrs.evolve(ours, **{part: type("Faulty", (getattr(ours, part),), behaviour)})


def still_found(scheduler: Any, **settings: Any) -> None:
    """A scheduler whose pages can be found by what they held before they were handed out again."""
    module("paging.scheduler").Scheduler.__init__(scheduler, **settings)
    pages = scheduler.pages

    def append(request: Any) -> int:
        page: int = pages.free.popleft()
        request.pages.append(page)
        pages.users[page] = 1
        return page

    pages.append = append


def other_pages(scheduler: Any, lacking: Any) -> Any:
    """Pages for requests that lack some, in whose place page 0 is appended, which belongs to padded rows."""
    grown, preempted = module("paging.scheduler").Scheduler.grow(scheduler, lacking)
    return {request: [0] * len(pages) for request, pages in grown.items()}, preempted


PLANTED: dict[str, tuple[str, str, list[str], str, Callable[[], Any]]] = {
    "a stale tail, beside a runner by hand": (
        *("twins", "show", ["--buckets", "1,8"], "after"),
        lambda: functools.partial(
            module("twins.after").Slotgraph,
            declaration=stale(module("twins.after").DecodeInputs, CACHE_LOC, "slot_mapping"),
        ),
    ),
    "a forgotten line by hand": (
        *("twins", "show", ["--buckets", "1,8"], "before"),
        lambda: forgetful(module("twins.before").HandWritten),
    ),
    "wrong places": (
        *("windows", "serve", [], "prepare"),
        lambda: lambda batch: {**batch, "out_cache_loc_swa": np.roll(batch["out_cache_loc_swa"], -1).tolist()},
    ),
    "stale places": (
        *("windows", "serve", ["--buckets", "8"], "declaration"),
        lambda: stale(module("windows.inputs").DecodeInputs, torch.int32, "out_cache_loc_swa"),
    ),
    "no mask": (
        *("speculating", "serve", ["--buckets", "6"], "verify"),
        lambda: unmasked(module("speculating.inputs").VerifyInputs),
    ),
    "a root that does not advance by what was won": (
        *("speculating", "serve", ["--one-launch"], "cycle"),
        lambda: one_by_one(module("speculating.inputs").TreeCycleInputs),
    ),
    "stale rows of a tree": (
        *("speculating", "serve", ["--buckets", "6"], "verify"),
        lambda: stale(module("speculating.inputs").VerifyInputs, torch.int64, "out_cache_loc", "positions"),
    ),
    **{
        f"stale rows of {family}": (
            *("states", "serve", ["--model", family, "--buckets", "8"], "declaration"),
            lambda: stale(module("states.inputs").DecodeInputs, torch.int64, "req_pool_indices", axes=(BATCH,)),
        )
        for family in ("bamba", "jamba", "falcon-h1")
    },
    "other pages are appended": (
        *("paging", "serve", [], "ours"),
        lambda: faulty("scheduler", grow=other_pages),
    ),
    "pages that hold something else by now": (
        *("paging", "serve", [], "ours"),
        lambda: faulty("scheduler", __init__=still_found),
    ),
    "all pages at one place": (
        *("batching", "serve", ["--tokens", "64"], "declare"),
        lambda: (
            lambda kinds, dtype: module("batching.inputs").inputs_for(
                {kind: attrs.evolve(layers, stride=0) for kind, layers in kinds.items()}, dtype
            )
        ),
    ),
    "stale rows of an index": (
        *("images", "serve", [], "declaration"),
        lambda: stale(module("images.inputs").ImageInputs, torch.int64, "index_row", axes=(BATCH,)),
    ),
}


def test_rows_are_reserved_for_the_most_that_cycles_can_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles that the host has not read yet may have won the most; with fewer rows they write where no text is kept."""
    needs("speculating")
    engine = module("speculating.launch").LaunchEngine
    reserve = engine._reserve
    monkeypatch.setattr(module("speculating.launch"), "BLOCK", 1)
    small = ["--requests", "3", "--max-new-tokens", "16", "--buckets", "3"]
    argv = [*small, *LAUNCH, "--topk", "1", "--draft-tokens", "5"]
    assert module("speculating.program").main(argv) == 0

    def few(engine: Any, requests: Any, read: int, last: int) -> Any:
        return reserve(engine, requests, read, min(read, last))

    monkeypatch.setattr(engine, "_reserve", few)
    assert module("speculating.program").main(argv) == 1
    assert "\nDIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the first difference is named; or the request that has ended on the device alone."""
    package, act, argv, seam, plant = PLANTED[name]
    needs(package)
    options = module(f"{package}.program").parse([*SHORT[package], *argv])
    try:
        assert getattr(module(f"{package}.program"), act)(options, **{seam: plant()}) == 1
    except RuntimeError as error:
        assert "has ended on the device after" in str(error)
        return
    assert "\nDIFFERENT" in "\n" + capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch of itself, where it compiles
def test_a_compiled_model_is_timed_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """`--compile` gives the table of images another line."""
    status, out = run(capsys, "images", "--backend", "cpu", "--compile")
    assert status == 0
    assert "\ntorch.compile(model) " in out


def test_a_queue_answers_each_client_once() -> None:
    """Leaving a service answers what is queued; an error that is no batch's fault reaches all clients of its batch."""
    made, service = module("images.program").make_images(5), module("images.service").Service
    sizes = []

    def step(batch: Any) -> Any:
        sizes.append(len(batch["corner"]))
        if 5 in batch["index_row"]:
            raise RuntimeError("no memory")
        return torch.tensor(batch["index_row"]), torch.ones(sizes[-1])

    queue = service(step, 3, 0.0)
    futures = [queue.submit(image) for image in made]
    with queue:
        pass
    assert [future.result() for future in futures[:3]] == [(row, 1.0) for row in (1, 2, 3)]
    assert [str(future.exception()) for future in futures[3:]] == ["no memory"] * 2
    assert sizes == [3, 2]


def test_the_model_finds_a_mistake_that_both_runners_share(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are equal and both wrong where the batches are: the model alone tells."""
    numbers = module("twins.sequences").decode_numbers

    def shifted(*args: Any) -> Any:
        made = numbers(*args)
        return {**made, "positions": [position + 1 for position in made["positions"]]}

    for name in ("before", "after"):
        monkeypatch.setattr(module(f"twins.{name}"), "decode_numbers", shifted)
    status, out = run(capsys, "twins")
    assert status == 1
    assert "\nequal: all tokens" in out
    assert "\nWRONG: logits differ" in out


def test_the_page_shows_the_lines_of_today() -> None:
    """The page of two runners and the picture of both show the lines of code of today."""
    *table, _ = module("twins.report").lines()
    text = "\n".join(line.rstrip() for line in table)
    assert text in (EXAMPLES / "before_after" / "README.md").read_text(encoding="utf-8")
    assert (EXAMPLES.parent / "pictures/beside.svg").read_text(encoding="utf-8") == module("twins.beside").picture()


def figures(out: str, name: str) -> list[int]:
    """The first number of each line of a report that begins with a name."""
    return [int(number) for number in re.findall(rf"^ *{name} +(\d+)", out, re.MULTILINE)]


def test_few_pages_preempt_and_prompts_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Both loops preempt where pages are few, share beginnings, and choose the same tokens as with many pages."""
    status, out = run(capsys, "paging", "--by-hand", "--rounds", "2")
    assert status == 0
    assert GENERATED in out
    for name in ("preemptions", "shared"):
        assert [number > 0 for number in figures(out, name)] == [True, True], name
    status, out = run(capsys, "paging", "--pages", "200")
    assert status == 0
    assert figures(out, "preemptions") == [0]
    assert module("paging.program").main([*SHORT["paging"], "--pages", "4"]) == 2
    assert "raise --pages" in capsys.readouterr().err


def test_the_page_of_the_paged_loop_shows_the_lines_of_today() -> None:
    """The page of the paged loop shows the lines of code of today."""
    needs("paging")
    text = "\n".join(module("paging.lines").table())
    assert text in (EXAMPLES / "paged_loop" / "README.md").read_text(encoding="utf-8")


def test_pages_show_the_lines_of_continuous_batching_today() -> None:
    """The program's page shows the code lines of today, and the page on engines those of both programs."""
    needs("batching")
    page, engines = (EXAMPLES.parent / name for name in ("examples/continuous_batching/README.md", "engines.md"))
    (line,) = module("batching.lines").table()
    if f"transformers {version('transformers')}:" in page.read_text(encoding="utf-8"):  # others have other lines
        assert line in page.read_text(encoding="utf-8")
        assert re.findall(r"\d+", line) == code_lines(engines, "continuous_batching")
    *_, both = module("paging.lines").table()
    assert re.findall(r"\d+", both)[::-1] == code_lines(engines, "paged_loop")


def code_lines(page: Path, program: str) -> list[str]:
    """The lines before and after in the row of a program, in the page's first table."""
    (row,) = re.findall(rf"^\| \[{program}\].*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return re.findall(r" (\d+) ", row)


def test_a_page_is_shared_by_all_that_lies_before_it() -> None:
    """The same tokens behind other ones are another page; a page in use goes to nobody, a free one can be found."""
    request, pages = module("paging.request"), module("paging.pages").Pages(9)
    size = request.PAGE
    first, second = ([number] * size + [7] * size + [1] for number in (1, 2))
    one, same, other = (request.Request(number=0, prompt_ids=ids, limit=1) for ids in (first, first, second))
    for each, shared in ((one, 0), (same, 2), (other, 2)):
        assert pages.admit(each, len(each) + 1)
        assert pages.shared == shared
    assert one.pages[:2] == same.pages[:2]
    assert not {*one.pages} & {*other.pages}
    both, mine = list(one.pages), list(same.pages)
    pages.release(one)
    assert [pages.users[page] for page in mine] == [1, 1, 1]
    pages.release(same)
    assert pages.find(first) == both[:2]
    assert not pages.admit(request.Request(number=1, prompt_ids=[3] * 6 * size, limit=1), 6 * size)
    assert pages.admit(request.Request(number=2, prompt_ids=[4] * 5 * size, limit=1), 5 * size)
    assert pages.find(first) == []


def test_stale_padding_of_an_engines_own_graphs_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without resets, padded rows write pages of requests that are running: the comparison notices."""
    monkeypatch.setattr(CleanTails, "begin", lambda *_: None)
    status, out = run(capsys, "engine", "--backend", "cpu-capture", "--requests", "24", "--tokens", "64")
    assert status == 1
    assert "NOT equal" in out


def test_a_table_that_no_one_keeps_up_spoils_the_slow_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spoils the slow path of a sliding window, and leaves the straight one alone."""
    needs("windows")
    monkeypatch.setattr(module("windows.pools").WindowPool, "place", lambda *_: None)
    assert run(capsys, "windows")[0] == 0
    assert run(capsys, "windows", "--translate")[0] == 1


@pytest.mark.parametrize("arenas", [True, False])
@pytest.mark.parametrize("batch", [8, 512])
def test_shared_memory_is_little_more_than_must_hold_at_once(batch: int, arenas: bool) -> None:
    """Within a tenth of the peak of live bytes, and hardly more than one memory for each name, right or not."""
    scale = module("cycles.members").Scale(batch=batch)
    found = {one.cycle: one for one in module("cycles.program").figures(scale, Capabilities(arenas=arenas))}
    assert len(found) == 6
    for one in found.values():
        assert one.peak <= one.shared <= 1.1 * one.peak, one.cycle
        assert one.shared <= 1.001 * one.blindly, one.cycle
    if arenas and batch == 512:  # what the page says
        one = found["prefills, draft, verify, extend"]
        assert (one.apart - one.shared) // 10**6 == 833


SVG = "{http://www.w3.org/2000/svg}"


def test_a_steps_time_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way has a host row and a device row, each call its number, and the axis its unit; the file is small."""
    file = tmp_path / "pictures" / "timeline.svg"
    status, out = run(capsys, "spans", "--out", str(file), "--backend", "cpu-capture")
    assert status == 0
    words = ["".join(text.itertext()) for text in ET.parse(file).iter(f"{SVG}text")]  # noqa: S314 - our own file
    for way in ("by hand: one copy a slot, then the replay", "slotgraph, foreach", "slotgraph, in_graph"):
        assert words.count(way) == 1
        assert f"{way}: a step took host " in out
    assert [words.count(row) for row in ("host", "device", "the host is the device")] == [3, 3, 3]
    assert any(one.startswith("microseconds since the first call") for one in words)
    assert file.stat().st_size < 100_000


def test_the_trace_of_a_device_shows_the_step() -> None:
    """What a graph brings is the step, but for the fused kernel; what came before the first call is left out."""
    record = module("spans.record")
    trace = [
        {"ph": "X", "cat": cat, "name": name, "ts": 1000.0 + start, "dur": took, "args": {"correlation": number}}
        for cat, name, start, took, number in (
            ("kernel", "an earlier pass", -50.0, 5.0, 1),
            ("user_annotation", record.STEP, 0.0, 17.0, 0),
            ("cpu_op", "aten::copy_", 1.0, 3.0, 0),
            ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 4.0, 1.0, 2),
            ("cuda_runtime", "cudaGraphLaunch", 6.0, 8.0, 3),
            ("kernel", record.FILL, 9.0, 2.0, 3),
            ("kernel", "ampere_gemm", 12.0, 5.0, 3),
        )
    ]
    bars = [(bar.kind, bar.start, bar.stop) for bar in record.bars_of(trace)]
    assert bars == [("call", 0.0, 17.0), ("inputs", 4.0, 5.0), ("inputs", 9.0, 11.0), ("step", 12.0, 17.0)]
    kernel = Path(sys.modules[load("cuda").__module__].__file__ or "").with_name("cuda_kernel.py")
    assert f"def {record.FILL}(" in kernel.read_text(encoding="utf-8")


def test_a_profile_gives_each_step_its_own_work() -> None:
    """A step has the device work of its own launch, and gaps count whether they are drawn or not."""
    ahead = module("spans.ahead")
    trace = [
        {"cat": cat, "name": name, "ts": 100.0 * number + start, "dur": took}
        for number in range(ahead.FIRST + ahead.COUNT + 2)
        for cat, name, start, took in (
            ("kernel", "fill_lanes", 60.0, 60.0),
            ("kernel", "argmax", 122.0, 8.0),  # the next step is launched by then
            ("user_annotation", f"launch {number}", 0.0, 10.0),
        )
    ]
    loop = ahead.loop_of(ahead.spans_of(trace), 1, 100)
    assert (loop.took, loop.idle, loop.within) == (100, 0.32, 0.02)
    shown = [ahead.Span("launch", ahead.FIRST, -60, -50), ahead.Span("step", ahead.FIRST, 0, 70)]
    assert [span for span in loop.spans if span.number == ahead.FIRST] == shown
    runner = ahead.make_runner(load("cpu-capture")(), 256, 16)
    assert min(ahead.drive(runner, number, 6) for number in (0, 1)) > ahead.WORK


def test_the_picture_of_steps_ahead_is_drawn_from_its_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is drawn from the figures beside it; where they cannot be measured, a sentence says why."""
    main, pictures = module("spans.ahead").main, EXAMPLES.parent / "pictures"
    assert main(["draw", str(pictures / "ahead.json")]) == 0
    assert capsys.readouterr().out == (pictures / "ahead.svg").read_text(encoding="utf-8")
    if not torch.cuda.is_available():
        assert main(["measure", str(tmp_path / "ahead.json")]) == 2
        assert capsys.readouterr().err.startswith("spans.ahead: backend 'cuda' cannot run here: ")


MASK = " * pages[:, :, None]"


def suite(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a suite of one's own in a folder, on the CPU alone, in a process of its own."""
    return python("-m", "pytest", folder, "-p", "no:cacheprovider", *arguments)


def test_a_suite_of_ones_own_passes_until_its_mask_is_gone(tmp_path: Path) -> None:
    """It passes as it stands; without its mask the step reads what padded rows wrote, and the slot is named."""
    done = suite(EXAMPLES / "own_suite", "--slotgraph-backends=cpu,cpu-capture", "--benchmark-disable")
    assert done.returncode == 0, done.stdout
    shutil.copytree(EXAMPLES / "own_suite", tmp_path / "suite", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    model = tmp_path / "suite" / "model.py"
    text = model.read_text(encoding="utf-8")
    assert text.count(MASK) == 1
    model.write_text(text.replace(MASK, ""), encoding="utf-8")
    done = suite(tmp_path / "suite", "--slotgraph-backends=cpu-capture", "-k", "checks")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "when the tail of slot 'positions' held" in done.stdout
