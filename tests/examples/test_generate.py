"""The demo: it passes on every way to run it, and fails on each bug that graph inputs are known for."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from slotgraph import CACHE_LOC, TOKENS, copied, keep

pytest.importorskip("transformers", reason="the demo's models: pip install 'slotgraph[models]'")

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "generate"
QUICK = ("--max-new-tokens", "12", "--arrival-gap", "0")
PROMPTS = ("Hi!", "a sentence of some length, so that it takes more than one page of the cache", "Grüße")
Module = Callable[[str], Any]
Result = tuple[int, dict[str, Any], str]
Generate = Callable[..., Result]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that on a busy machine threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def serving() -> Iterator[Module]:
    """The demo's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"serving.{name}")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def generate(serving: Module, tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """Run the demo in this process: its exit status, its JSON and what it printed."""

    def run(*argv: str, **seams: Any) -> Result:
        file = tmp_path_factory.mktemp("report") / "report.json"
        options = serving("options").parse([*argv, "--json", str(file)])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = serving("program").generate(options, **seams)
        return status, json.loads(file.read_text(encoding="utf-8")), out.getvalue()

    return run


@pytest.fixture(scope="module")
def default(generate: Generate) -> Result:
    """The run of all defaults."""
    return generate()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that save_pretrained() wrote: not the demo's own shape, with tied weights and two ends of text."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        attention_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=[257, 258],
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.3, generator=generator)
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file of a few prompts, so that a run is quick."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    return str(file)


def test_every_token_equals_generate(default: Result) -> None:
    """The default run, under true capture rules, is equal to transformers' own generate() and says what it did."""
    status, report, out = default
    assert (status, report["passed"], report["backend"]) == (0, True, "cpu-capture")
    assert report["comparison"]["difference"] is None
    assert 0 < report["comparison"]["largest"] < report["comparison"]["tolerance"]
    assert report["comparison"]["tokens"] == report["tokens"] == sum(len(text["tokens"]) for text in report["texts"])
    assert report["counted"] == report["decoded"] == sum(bucket["live"] for bucket in report["buckets"])
    assert f"equal to generate(): all {report['tokens']} tokens of 16 requests" in out


def test_backends_make_the_same_tokens(generate: Generate, default: Result) -> None:
    """Without capture, the same texts come out."""
    status, report, _ = generate("--backend", "cpu")
    assert (status, report["backend"]) == (0, "cpu")
    assert report["texts"] == default[1]["texts"]


def test_batches_vary_and_are_padded(default: Result) -> None:
    """Requests come and go, so that every bucket is used, most with a tail, and prompts share steps."""
    report = default[1]
    assert [bucket["bucket"] for bucket in report["buckets"]] == [1, 2, 4, 8]
    assert sum(bucket["padded"] > bucket["live"] for bucket in report["buckets"]) >= 2
    assert 0 < report["padding_waste"] < 0.5
    assert report["prefill_steps"] < report["requests"] == 16
    assert report["decode_steps"] == sum(bucket["steps"] for bucket in report["buckets"])
    assert any(text["began"] > text["arrived"] for text in report["texts"]), "no request ever waited for a row"


def test_texts_vary(default: Result) -> None:
    """A constant output would prove nothing: texts differ, have many distinct tokens and do not go round in circles."""
    texts = [text["tokens"] for text in default[1]["texts"]]
    assert len({tuple(text) for text in texts}) == len(texts)
    assert len({len(text) for text in texts}) > 5, "all requests leave at the same length"
    for text in (text for text in texts if len(text) > 16):
        assert len(set(text)) > len(text) / 2
        assert not any(text[-2 * period : -period] == text[-period:] for period in range(2, 9))


def test_report_accounts_for_time_and_memory(default: Result) -> None:
    """Fill times, throughput and bytes are in the JSON as they are in the table."""
    _, report, out = default
    assert report["fill"]["fills"] == report["decode_steps"]
    assert 0 < report["fill"]["median_us"] <= report["fill"]["p99_us"]
    assert all(report["memory"][part] > 0 for part in ("inputs", "graphs", "outputs", "kv_cache"))
    assert min(report["tokens_per_second"], report["reference_tokens_per_second"], report["capture_seconds"]) > 0
    assert "host time per fill" in out


def test_command_reads_standard_input() -> None:
    """`python docs/examples/generate --prompts -` takes a prompt a line, skips blank ones, and exits with 0."""
    done = subprocess.run(  # noqa: S603 - this interpreter and this project's own program
        [sys.executable, FOLDER, "--prompts", "-", "--max-new-tokens", "4", "--backend", "cpu"],
        input="Hi!\n\nGrüße\r\n",
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "of 2 requests" in done.stdout
    assert "Grüße" in done.stdout


def test_checkpoint_without_a_tokenizer(generate: Generate, checkpoint: Path, prompts: str) -> None:
    """`--model` takes a folder of save_pretrained(); without a tokenizer, bytes are tokens."""
    status, report, _ = generate("--model", str(checkpoint), "--prompts", prompts, "--max-new-tokens", "24")
    assert (status, report["model"]) == (0, "checkpoint")
    assert [text["prompt_tokens"] for text in report["texts"]] == [1 + len(prompt.encode()) for prompt in PROMPTS]


def test_checkpoint_with_its_tokenizer(generate: Generate, checkpoint: Path, prompts: str) -> None:
    """A checkpoint's own tokenizer is used where it has one."""
    tokenizers, transformers = map(importlib.import_module, ("tokenizers", "transformers"))
    words = {word: number for number, word in enumerate(["?", "a", "sentence", "of", "some", "length", "Hi", "cache"])}
    unknown = {"unk_token": "?"}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **unknown).save_pretrained(checkpoint)
    status, report, _ = generate("--model", str(checkpoint), "--prompts", prompts, "--max-new-tokens", "24")
    assert status == 0
    assert report["texts"][0]["prompt_tokens"] == 2  # "Hi", "!"


def test_batches_beyond_the_largest_bucket_run_eagerly(generate: Generate) -> None:
    """Steps that no bucket takes are equal too, and counted."""
    status, report, _ = generate("--buckets", "1,3", "--max-new-tokens", "16")
    assert status == 0
    assert 0 < report["eager_steps"] < report["decode_steps"]


def test_pages_are_shared_out_again(generate: Generate) -> None:
    """The smallest pages and batches that wait for rows change nothing."""
    status, report, _ = generate("--page-size", "3", "--max-batch", "3", "--arrival-gap", "0", "--max-new-tokens", "16")
    assert (status, report["buckets"][-1]["bucket"]) == (0, 3)


def shifted(batch: Any) -> Any:
    """Every decode position is one too far."""
    return attrs.evolve(batch, positions=batch.positions + 1)


def swapped(batch: Any) -> Any:
    """Each request's keys and values go to where another one's belong."""
    return attrs.evolve(batch, out_cache_loc=batch.out_cache_loc.roll(1))


def late(batch: Any) -> Any:
    """Keys and values go one row beyond their place, and attention reads an empty one."""
    return attrs.evolve(batch, out_cache_loc=batch.out_cache_loc + 1)


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize("plant", [shifted, swapped, late])
def test_wrong_batches_are_found(generate: Generate, plant: Callable[[Any], Any], backend: str) -> None:
    """A shifted position and a wrong cache location: exit status 1, with the first difference named."""
    status, report, out = generate(*("--backend", backend, *QUICK), prepare=plant)
    _assert_named(status, report, out)
    assert report["comparison"]["apart"] > 8


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_stale_tail_is_found(generate: Generate, serving: Module, backend: str) -> None:
    """Padded rows whose cache locations are those of an earlier step overwrite a live request's keys and values."""

    class Stale(serving("inputs").DecodeInputs):  # type: ignore[misc]  # the demo is no package that a checker finds
        """A declaration that someone wrote in good faith."""

        out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=keep("no one reads what padded rows write"))

    status, report, out = generate("--backend", backend, declaration=Stale)
    _assert_named(status, report, out)
    assert report["comparison"]["apart"] > 0


def _assert_named(status: int, report: dict[str, Any], out: str) -> None:
    """The exit status is 1, and request, token, step and logits of the first difference are told."""
    difference = report["comparison"]["difference"]
    assert (status, report["passed"]) == (1, False)
    assert difference["logits"] > report["comparison"]["tolerance"]
    assert not difference["near_tie"]
    where = f"request {difference['request']}, generated token {difference['token']}, engine step {difference['step']}"
    assert f"DIFFERENT from generate(): {where}:" in " ".join(out.split())


def test_wrong_count_is_found(generate: Generate, serving: Module) -> None:
    """A computed slot that counts padded rows as live ones fails the run, although every token is right."""
    slotgraph = importlib.import_module("slotgraph")

    def padded_tokens(step: Any) -> int:
        count: int = step.padded(TOKENS)
        return count

    class Miscounted(serving("inputs").DecodeInputs):  # type: ignore[misc]  # as above
        """Counts the bucket's rows."""

        num_token_non_padded: torch.Tensor = slotgraph.computed(padded_tokens, shape=1, dtype=torch.int32)

    status, report, out = generate(*QUICK, "--max-batch", "3", "--buckets", "2,4", declaration=Miscounted)
    assert (status, report["comparison"]["difference"]) == (1, None)
    assert "WRONG COUNT" in out


def test_live_rows_never_read_the_dummy_page(serving: Module) -> None:
    """Page 0 holds nonsense from the first step to the last, and all tokens and logits are equal."""
    options = serving("options").parse(["--max-new-tokens", "12", "--backend", "cpu"])
    language = serving("model").load_language(options, torch.device("cpu"))
    requests = serving("prompts").read_requests(options, language)
    answers = list(serving("reference").reference_answers(language, requests))
    engine = serving("engine").Engine(language, requests, options)
    with serving("attention").paged(language.model):
        engine.capture()
        for _ in engine.run():
            engine.steps.cache.keys[:, 0] = 1e4
            engine.steps.cache.values[:, 0] = -1e4
    assert serving("comparison").compare(requests, answers, options.logits_tolerance).difference is None


def test_requests_wait_for_pages(serving: Module) -> None:
    """A request is admitted only when all pages that it may need are free; no page has two owners; all come back."""
    allocator = serving("cache").PageAllocator(6)
    ends = {"prompt": "", "prompt_ids": [1] * 8, "limit": 1}
    requests = [serving("request").Request(number=number, arrival=0, **ends) for number in range(4)]
    scheduler = serving("scheduler").Scheduler(requests, allocator, 4, 8)
    assert [request.number for request in scheduler.admit(0)] == [0, 1]
    assert sorted(requests[0].pages + requests[1].pages) == sorted({*requests[0].pages, *requests[1].pages})
    assert 0 not in requests[0].pages + requests[1].pages
    assert scheduler.admit(1) == []
    requests[0].add(7, torch.zeros(1), 1)
    assert scheduler.retire(frozenset()) == [requests[0]]
    assert [request.number for request in scheduler.admit(2)] == [2]
    assert allocator.free == 1


@pytest.mark.parametrize(
    ("got", "expected", "token", "near_tie"),
    [([5, 6], [5, 7], 1, True), ([5], [5, 7], 1, False), ([5, 6, 7], [5, 6], 2, False), ([5, 6], [5, 6], None, False)],
)
def test_comparison_names_the_first_difference(
    serving: Module, got: list[int], expected: list[int], token: int | None, *, near_tie: bool
) -> None:
    """Another token, a text that ends too early or too late; another token by equal logits is called a near-tie."""
    request = serving("request").Request(number=3, prompt="", prompt_ids=[1], arrival=0, limit=9)
    for step, one in enumerate(got):
        request.add(one, torch.arange(9.0), step)
    answer = serving("reference").Answer(expected, torch.arange(9.0).expand(len(expected), 9))
    difference = serving("comparison").compare([request], [answer], 0.1).difference
    found = None if difference is None else (difference.token, difference.near_tie)
    assert found == (None if token is None else (token, near_tie))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "abacus"], "abacus"),
        (["--model", "no-such-folder"], "no config.json"),
        (["--prompts", "no-such-file"], "no such file"),
        (["--json", "no-such-folder/report.json"], "no folder"),
        (["--max-new-tokens", "1000"], "lower --max-new-tokens"),
    ],
)
def test_bad_options_say_what_to_change(
    serving: Module, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    """What cannot be run exits with 2 and a sentence, without a traceback."""
    assert serving("program").main(argv) == 2
    assert message in capsys.readouterr().err


def test_no_prompts(serving: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty standard input is refused."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n"))
    assert serving("program").main(["--prompts", "-"]) == 2
    assert "no prompts" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--buckets", "0"], ["--max-batch", "-1"], ["--dtype", "int8"], ["--unheard-of"]])
def test_misspelt_options(serving: Module, argv: list[str]) -> None:
    """The command line refuses what it cannot read with the usual status."""
    with pytest.raises(SystemExit) as refusal:
        serving("options").parse(argv)
    assert refusal.value.code == 2


def test_other_families_are_refused(serving: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose attention or positions the engine does not know is refused before anything is built."""
    transformers = importlib.import_module("transformers")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    configs = [transformers.MistralConfig(sliding_window=64), transformers.LlamaConfig(rope_parameters=rope)]
    for config, word in zip(configs, ("sliding_window", "dynamic"), strict=True):
        config.save_pretrained(tmp_path)
        assert serving("program").main(["--model", str(tmp_path)]) == 2
        assert word in capsys.readouterr().err


def test_help_tells_the_exit_status(serving: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` explains itself to someone who has never seen the program."""
    with pytest.raises(SystemExit) as leave:
        serving("options").parse(["--help"])
    out = capsys.readouterr().out
    assert leave.value.code == 0
    assert all(word in out for word in ("exit status", "--model FOLDER", "standard input", "generate()"))
