"""The demo passes on every way to run it, says what it did, and finds each bug that graph inputs are known for."""

import functools
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console

from slotgraph import BATCH, CACHE_LOC, TOKENS, attention, computed
from tests.examples.demo import (
    FOLDER,
    NEEDS,
    PROMPTS,
    QUICK,
    SMALL,
    Generate,
    Result,
    module,
    save_llama,
    shifted,
    stale,
)
from tests.programs import python

pytest.importorskip("transformers", reason=NEEDS)

LENGTHS = (40, 17, 8, 3, 70, 30, 2, 5)
FEW = ("--arrival-gap", "0", "--max-new-tokens", "6", "--max-prefill-tokens", "64")
SHORT = ("--max-new-tokens", "6", "--max-batch", "3", "--prefill", "eager", "--rounds", "2")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of prompts of many lengths; one is longer than any bucket."""
    file: Path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    text = "In a hole in the ground there lived a graph, and it remembered all its addresses, every one of them"
    file.write_text("\n".join(text[number:][:length] for number, length in enumerate(LENGTHS)), encoding="utf-8")
    return str(file)


def test_every_token_equals_generate(default: Result) -> None:
    """The default run, under true capture rules, is equal to transformers' own generate() and says what it did."""
    status, report, out = default
    assert (status, report["passed"], report["backend"]) == (0, True, "cpu-capture")
    assert report["comparison"]["difference"] is None
    assert 0 < report["comparison"]["largest"] < report["comparison"]["bounds"]["logits"] == 1e-3
    assert report["comparison"]["tokens"] == report["tokens"] == sum(len(text["tokens"]) for text in report["texts"])
    assert report["counted"] == report["decoded"] == sum(bucket["live"] for bucket in report["buckets"])
    assert f"equal to generate(): all {report['tokens']} tokens of 16 requests" in out


def test_the_default_run_is_worth_something(default: Result) -> None:
    """Every bucket is used, most with a tail; requests wait and share prefills; texts differ and do not go round."""
    report = default[1]
    assert [bucket["bucket"] for bucket in report["buckets"]] == [1, 2, 4, 8]
    assert sum(bucket["padded"] > bucket["live"] for bucket in report["buckets"]) >= 2
    assert report["prefill"]["paths"] == {"breakable": report["prefill"]["steps"]}
    assert report["prefill"]["steps"] < report["requests"] == 16
    assert any(text["began"] > text["arrived"] for text in report["texts"]), "no request ever waited for a row"
    texts = [text["tokens"] for text in report["texts"]]
    assert len({tuple(text) for text in texts}) == len(texts)
    assert all(len(set(text)) > len(text) / 2 for text in texts if len(text) > 16)


def test_times_and_memory_are_told(default: Result) -> None:
    """Fills, whole steps, throughput and bytes are in the JSON, and a sentence says what comes of them."""
    _, report, out = default
    assert report["fill"]["fills"] == report["decode_steps"]
    assert 0 < report["fill"]["median_us"] <= report["fill"]["p99_us"]
    assert all(report["memory"][part] > 0 for part in ("inputs", "graphs", "outputs", "kv_cache"))
    [times] = report["measured"]["times"]
    assert (times["live"], times["bucket"], report["measured"]["rounds"]) == (7, 8, 3)
    assert all(0 < times[way]["p10"] <= times[way]["median"] for way in ("replay", "whole", "eager"))
    flat = " ".join(out.split())
    assert "host time of a fill" in flat
    assert "a decode step of 7 requests" in flat
    assert f"A prefill step of {report['prefill_times']['requests']} requests" in flat


def test_the_first_lines_say_why_and_the_last_ones_what_came_of_it(default: Result) -> None:
    """What fills take beside those by hand is among the first ten lines; equality and speed are the last ones."""
    _, report, out = default
    lines, times = out.splitlines(), report["fills"]["at_once"]
    assert report["fills"]["live"] == 7
    assert all(0 < times[way]["p10"] <= times[way]["median"] for way in ("by_hand", "runner", "ratio"))
    first, last = (" ".join(" ".join(some).split()) for some in (lines[:10], lines[-6:]))
    assert first.startswith("16 prompts share decode steps of seeded Llama, seed 0: graphs for 1, 2, 4 or 8 rows")
    assert f"slotgraph fills the inputs of 7 requests in {times['runner']['median']:.1f} us of the host" in first
    assert f"by hand that takes {times['ratio']['median']:.2f} times as long" in first
    assert f"tokens a second, this program {report['tokens_per_second']:.1f}" in last
    assert f"equal to generate(): all {report['tokens']} tokens of 16 requests largest difference of a logit" in last
    assert max(map(len, lines)) <= 80


def test_both_are_served_in_two_pairs_of_runs(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers' batching was measured, both run twice, and the last lines have both ratios."""
    speeds = iter([10.0, 5.0])
    monkeypatch.setattr(module("serving.program"), "continuous_batching", lambda *_: (next(speeds), ""))
    _, report, out = generate("--rounds", "2", *QUICK)
    assert [theirs for _, theirs in report["pairs"]] == [10.0, 5.0]
    ratios = " and ".join(f"{ours / theirs:.2f}" for ours, theirs in report["pairs"])
    assert f"In pairs of runs this program makes {ratios} times as many" in " ".join(out.split())
    assert "transformers' continuous batching 10.0 and 5.0" in " ".join(out.split())


@pytest.mark.parametrize("ahead", [(), ("--ahead", "1")], ids=["sync", "ahead"])
def test_forgotten_resets_make_another_text(ahead: tuple[str, ...]) -> None:
    """Without two resets a text ends differently, which the first lines show; alone in its bucket none does."""
    by_hand, tables = module("serving.by_hand"), module("serving.tables")
    options = module("serving.options").parse([*SMALL, *QUICK[:4], "--prefill", "eager", *ahead])
    language = module("serving.model").load_language(options, torch.device("cpu"))
    requests = module("serving.request").read_requests(options, language)
    by_hand.run_all(module("serving.engine").Engine(language, requests, options), language)
    found = by_hand.forget(language, requests, options)
    [prompt] = [one for one in requests if one.prompt == found.prompt]
    assert found.text == language.tokens.decode(prompt.generated) != found.instead
    sink = io.StringIO()
    tables.show_reasons({"forgotten": found, "fills": None}, Console(file=sink, width=80))
    shown = sink.getvalue()
    assert "no input without a rule for its padding" in shown
    assert len({line[13:] for line in shown.splitlines()[1:3]}) == 2
    assert by_hand.forget(language, requests[:1], options) == by_hand.Forgotten()


def test_fills_by_hand_leave_the_same_bytes(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared before they are timed: what leaves other bytes is not timed."""
    hand, fill = module("serving.by_hand").HandFilled, module("serving.by_hand").HandFilled.fill

    def shifted_fill(self: Any, batch: Any) -> None:
        fill(self, shifted(batch))

    monkeypatch.setattr(hand, "fill", shifted_fill)
    with pytest.raises(RuntimeError, match=r"positions is .*, and by hand "):
        generate("--rounds", "2", *QUICK)


@pytest.mark.parametrize(
    "argv",
    [
        ("--backend", "cpu"),
        ("--dtype", "bfloat16"),
        ("--dtype", "float16"),
        ("--buckets", "1,3", "--max-new-tokens", "16"),
        ("--page-size", "3", "--max-batch", "3", "--arrival-gap", "0", "--max-new-tokens", "16"),
        ("--max-new-tokens", "1"),
        ("--temperature", "0.8", "--top-p", "0.9"),
        ("--temperature", "1.2", "--dtype", "bfloat16", "--seed", "3"),
    ],
    ids=" ".join,
)
def test_other_ways_are_equal_too(generate: Generate, default: Result, argv: tuple[str, ...]) -> None:
    """Without capture, in low precision by its bounds, beyond the largest bucket, with small pages, and drawn."""
    status, report, _ = generate(*argv)
    comparison = report["comparison"]
    assert (status, comparison["difference"], comparison["apart"]) == (0, None, 0)
    assert comparison["largest"] <= comparison["bounds"]["logits"]
    assert (report["eager_steps"] > 0) == ("--buckets" in argv)
    if "cpu" in argv:
        assert report["texts"] == default[1]["texts"]


@pytest.mark.parametrize("path", ["breakable", "piecewise", "eager"])
def test_each_prefill_path_is_equal(generate: Generate, lines: str, backend_name: str, path: str) -> None:
    """Requests share prefill steps by each path; what is too long for the graphs runs eagerly; all tokens are equal."""
    status, report, out = generate("--backend", backend_name, "--prefill", path, "--prompts", lines, *FEW)
    prefill = report["prefill"]
    assert (status, report["comparison"]["difference"], prefill["asked"]) == (0, None, path)
    assert (prefill["most"], prefill["tokens"]) == (3, sum(LENGTHS) + len(LENGTHS))
    assert prefill["steps"] == sum(prefill["paths"].values()) < len(LENGTHS)
    if path == "eager":
        assert (prefill["buckets"], list(prefill["reasons"])) == ([], ["always_eager"])
    else:
        assert prefill["paths"] == {path: prefill["steps"] - 1, "eager": 1}
        assert prefill["reasons"] == {"too_large": "71 tokens are more than the largest bucket, 64"}
        assert all(use["path"] == path and use["live"] <= use["padded"] for use in prefill["buckets"])
        assert "1 eager, too_large" in " ".join(out.split())


def test_command_reads_standard_input() -> None:
    """`python docs/examples/generate --prompts -` takes a prompt a line, skips blank ones, and exits with 0."""
    words = ("--model", "random", "--prompts", "-", "--max-new-tokens", "4", "--backend", "cpu", "--rounds", "2")
    done = python(FOLDER, *words, input="Hi!\n\nGrüße\r\n")
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("of 2 requests", "whole step", "Grüße"))


def test_the_model_may_be_a_folder_of_a_checkpoint(generate: Generate, tmp_path: Path, prompts: str) -> None:
    """`--model` takes a folder of save_pretrained(), with its own tokenizer, or without one: bytes are tokens then."""
    odd = {"vocab_size": 300, "num_key_value_heads": 1, "head_dim": 32, "eos_token_id": [257, 258]}
    checkpoint = save_llama(tmp_path / "checkpoint", **odd)  # not the demo's own shape, with two ends of text
    argv = ("--model", str(checkpoint), "--prompts", prompts, "--max-new-tokens", "24")
    status, report, _ = generate(*argv)
    assert (status, report["model"]) == (0, "checkpoint")
    assert [text["prompt_tokens"] for text in report["texts"]] == [1 + len(prompt.encode()) for prompt in PROMPTS]
    tokenizers, transformers = map(importlib.import_module, ("tokenizers", "transformers"))
    words = {word: number for number, word in enumerate(["?", "a", "sentence", "of", "some", "length", "Hi", "cache"])}
    unknown = {"unk_token": "?"}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **unknown).save_pretrained(checkpoint)
    status, report, _ = generate(*argv)
    assert (status, report["texts"][0]["prompt_tokens"]) == (0, 2)  # "Hi", "!"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_on_a_device_every_bucket_is_timed(generate: Generate, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device every bucket is timed, with the host waiting for each step and without, and torch.compile too."""
    measuring = module("serving.measuring")
    monkeypatch.setattr(measuring, "ON_A_CPU", attrs.evolve(measuring.ON_A_DEVICE, rounds=2, turn=0.0))
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    status, report, out = generate("--backend", backend, *SHORT)
    times = report["measured"]["times"]
    assert status == 0
    assert [(one["live"], one["bucket"], one["each"]) for one in times] == [
        (live, bucket, each) for live, bucket in ((1, 1), (2, 2), (3, 3)) for each in (False, True)
    ]
    compared = ["DecodeRunner, step", "DecodeRunner, torch.compile(step)", "reduce-overhead alone"]
    del compared[1 : 2 if backend == "cpu-capture" else 1]
    assert [list(one["ways"]) for one in times] == [[]] * 4 + [compared] * 2
    assert ("cannot record compiled kernels" in " ".join(out.split())) == (backend == "cpu-capture")
    assert 'torch.compile(mode="reduce-overhead")' in " ".join(out.split())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch of itself, where it compiles
def test_a_compiled_step_makes_equal_tokens(generate: Generate, prompts: str) -> None:
    """`--compile` captures torch.compile(step), tokens stay equal, and a backend that cannot hold it is refused."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    drawn = ("--temperature", "0.9", "--top-p", "0.95")
    small = ("--prompts", prompts, "--buckets", "2", "--max-batch", "2", *drawn, *QUICK)
    status, report, _ = generate("--compile", "--backend", "cpu", *small)
    assert (status, report["comparison"]["difference"], report["eager_steps"]) == (0, None, 0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert report["texts"] == generate("--backend", "cpu", *small)[1]["texts"]
    ahead = generate("--compile", "--backend", "cpu", *small, "--ahead", "1")[1]
    assert [text["tokens"] for text in ahead["texts"]] == [text["tokens"] for text in report["texts"]]
    with pytest.raises(module("serving.options").OptionsError, match="--backend cpu or cuda"):
        generate("--compile", *small)


PREPARED: dict[str, Callable[[Any], Any]] = {
    "position one too far": shifted,
    "pages of another request": lambda batch: attrs.evolve(batch, page_table=batch.page_table.roll(1, 0)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", [*PREPARED, "places", "tail", "prompts"])
def test_what_is_planted_is_found(generate: Generate, lines: str, backend_name: str, plant: str, dtype: str) -> None:
    """Wrong batches and stale tails: exit status 1, with request, token, step and logits of the first difference."""
    argv: tuple[str, ...] = ("--backend", backend_name, "--dtype", dtype)
    inputs = module("serving.inputs")
    if plant == "tail":
        seams = {"declaration": stale_tables(inputs)}
    elif plant == "places":
        argv += QUICK
        seams = {"declaration": misplaced(inputs)}
    elif plant == "prompts":
        argv += ("--prompts", lines, *FEW)
        seams = {"prompts": stale(inputs.PrefillInputs, CACHE_LOC, "out_cache_loc")}
    else:
        argv += QUICK
        seams = {"prepare": PREPARED[plant]}
    status, report, out = generate(*argv, **seams)
    difference = report["comparison"]["difference"]
    assert (status, report["passed"]) == (1, False)
    assert report["comparison"]["apart"] > 0
    assert difference["logits"] > report["comparison"]["bounds"]["logits"]
    where = f"request {difference['request']}, generated token {difference['token']}, engine step {difference['step']}"
    assert f"DIFFERENT from generate(): {where}:" in " ".join(out.split())


def stale_tables(inputs: Any) -> Any:
    """A declaration whose padded rows write to pages of an earlier step."""
    return stale(inputs.DecodeInputs, torch.int32, "page_table", axes=(BATCH, attention.PAGES))


def misplaced(inputs: Any) -> Any:
    """A declaration whose new tokens go to the place of the token before."""

    def early(page_table: torch.Tensor, positions: torch.Tensor, page_size: torch.Tensor, out: torch.Tensor) -> None:
        inputs.place(page_table, (positions - 1).clamp(min=0), page_size, out)

    class Misplaced(inputs.DecodeInputs):  # type: ignore[misc] # no package that a checker finds
        out_cache_loc: torch.Tensor = computed(early, shape=TOKENS, dtype=CACHE_LOC)

    return Misplaced


def test_runs_without_a_comparison_make_the_same_texts(generate: Generate, default: Result) -> None:
    """`--no-verify` makes the same texts, and steps hand out tokens alone."""
    status, report, out = generate("--no-verify")
    assert (status, report["comparison"], report["texts"]) == (0, None, default[1]["texts"])
    assert report["memory"]["outputs"] < default[1]["memory"]["outputs"] / 50
    assert "not compared with generate(), by --no-verify" in out


@pytest.mark.parametrize("argv", [(), ("--no-verify",)], ids=" ".join)
def test_wrong_count_is_found(generate: Generate, argv: tuple[str, ...]) -> None:
    """A computed slot that counts padded rows fails the run, although every token is right."""

    class Miscounted(module("serving.inputs").DecodeInputs):  # type: ignore[misc] # no package that a checker finds
        num_token_non_padded: torch.Tensor = computed(lambda step: step.padded(TOKENS), shape=1, dtype=torch.int32)

    status, report, out = generate(*QUICK, *argv, "--max-batch", "3", "--buckets", "2,4", declaration=Miscounted)
    assert (status, (report["comparison"] or {"difference": None})["difference"]) == (1, None)
    assert "WRONG COUNT" in out


DRAWN = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "11")
PAGES = ("--page-size", "3", "--max-batch", "5", "--max-new-tokens", "40", "--prefill", "eager")


@pytest.fixture(scope="module")
def synchronous(generate: Generate) -> Callable[..., Any]:
    """The report of a run whose host reads each step's tokens first, which is compared with generate()."""
    return functools.cache(lambda *argv: generate(*argv, "--sync")[1])


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("argv", [PAGES, (*PAGES, *DRAWN)], ids=["greedy", "drawn"])
def test_steps_ahead_make_the_same_tokens(
    generate: Generate, synchronous: Callable[..., Any], argv: tuple[str, ...], ahead: int, backend: str
) -> None:
    """Requests join, take pages and end in the middle of their texts; buckets change; some wait for a row."""
    status, report, _ = generate(*argv, "--backend", backend, "--ahead", str(ahead), "--no-verify")
    expected = synchronous(*argv)
    assert expected["passed"]
    assert (status, [text["tokens"] for text in report["texts"]]) == (0, [one["tokens"] for one in expected["texts"]])
    assert report["counted"] == report["decoded"] == sum(bucket["live"] for bucket in report["buckets"])
    assert report["decode_steps"] == sum(bucket["steps"] for bucket in report["buckets"])
    assert len({bucket["bucket"] for bucket in report["buckets"]}) == 4
    surplus = report["decoded"] - expected["decoded"]
    assert (surplus == 0) == (ahead == 0)
    assert surplus <= ahead * report["requests"]
    lengths = [len(text["tokens"]) for text in report["texts"]]
    assert min(lengths) < max(lengths) == 40, "no text ended in the middle"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize(("ahead", "chunk"), [(0, 4), (1, 4), (1, 3), (2, 8)])
@pytest.mark.parametrize("argv", [PAGES, (*PAGES, *DRAWN)], ids=["greedy", "drawn"])
def test_several_steps_in_one_launch_make_the_same_tokens(
    generate: Generate, synchronous: Callable[..., Any], argv: tuple[str, ...], ahead: int, chunk: int, backend: str
) -> None:
    """Requests end within a chunk, which stores nothing behind their last tokens; others join and take pages."""
    given = ("--backend", backend, "--ahead", str(ahead), "--chunk", str(chunk), "--no-verify")
    status, report, _ = generate(*argv, *given)
    expected = synchronous(*argv)
    assert (status, [text["tokens"] for text in report["texts"]]) == (0, [one["tokens"] for one in expected["texts"]])
    assert report["counted"] == report["decoded"] == sum(bucket["live"] for bucket in report["buckets"])
    assert report["decode_steps"] == sum(bucket["steps"] for bucket in report["buckets"])
    lengths = [len(text["tokens"]) for text in report["texts"]]
    assert min(lengths) < max(lengths) == 40, "no text ended in the middle"


@pytest.mark.parametrize(
    "argv",
    [
        ("--dtype", "bfloat16"),
        ("--chunk", "4", "--page-size", "3"),
        ("--chunk", "3", "--max-new-tokens", "2"),
        ("--max-new-tokens", "1", "--max-prefill-tokens", "64"),
        ("--buckets", "1,3", "--max-new-tokens", "16"),
        ("--arrival-gap", "9", "--max-new-tokens", "5", "--prefill", "piecewise"),
    ],
    ids=" ".join,
)
def test_steps_ahead_equal_generate(generate: Generate, argv: tuple[str, ...]) -> None:
    """In low precision, where a prompt's token is the last, where no bucket holds all, and where pauses are long."""
    status, report, _ = generate(*argv, "--ahead", "2")
    assert (status, report["comparison"]["difference"], report["eager_steps"]) == (0, None, 0)


@pytest.mark.parametrize("plant", [*PREPARED, "places", "tail"])
def test_what_is_planted_ahead_is_found(generate: Generate, backend_name: str, plant: str) -> None:
    """Wrong rows of requests that join are wrong in all steps to come."""
    inputs = module("serving.inputs")
    declarations = {"places": misplaced, "tail": stale_tables}
    seams = {"prepare": PREPARED[plant]} if plant in PREPARED else {"declaration": declarations[plant](inputs)}
    argv = ("--backend", backend_name, "--ahead", "1", *(QUICK if plant != "tail" else ()))
    status, report, _ = generate(*argv, **seams)
    assert (status, report["passed"]) == (1, False)
    assert report["comparison"]["apart"] > 0
