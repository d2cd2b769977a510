"""The demo passes on every way to run it, and says what it did."""

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.demo import FOLDER, NEEDS, PROMPTS, Generate, Module, Result

pytest.importorskip("transformers", reason=NEEDS)


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


def test_every_token_equals_generate(default: Result) -> None:
    """The default run, under true capture rules, is equal to transformers' own generate() and says what it did."""
    status, report, out = default
    assert (status, report["passed"], report["backend"]) == (0, True, "cpu-capture")
    assert report["comparison"]["difference"] is None
    assert 0 < report["comparison"]["largest"] < report["comparison"]["bounds"]["logits"] == 1e-3
    assert (report["comparison"]["ties"], report["comparison"]["bounds"]["tie"]) == (0, 0)
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
    assert report["prefill"]["steps"] < report["requests"] == 16
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
        [sys.executable, FOLDER, "--prompts", "-", "--max-new-tokens", "4", "--backend", "cpu", "--rounds", "2"],
        input="Hi!\n\nGrüße\r\n",
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "of 2 requests" in done.stdout
    assert "whole step" in done.stdout
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


@pytest.mark.parametrize(
    "argv",
    [
        ["--buckets", "0"],
        ["--max-batch", "-1"],
        ["--dtype", "int8"],
        ["--rounds", "-1"],
        ["--prefill", "sideways"],
        ["--max-prefill-tokens", "0"],
        ["--unheard-of"],
    ],
)
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
    words = (
        "exit status",
        "--model FOLDER",
        "--prefill {breakable,piecewise,eager}",
        "standard input",
        "generate()",
        "--no-compare",
        "--rounds N",
    )
    assert all(word in out for word in words)
