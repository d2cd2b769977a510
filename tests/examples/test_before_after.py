"""The engine with two model runners: equal to the byte, right, and different as soon as one of them forgets a tail."""

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph import CACHE_LOC, TOKENS, copied, keep
from tests.examples.demo import Module

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "before_after"
QUICK = ("--sequences", "8", "--max-new-tokens", "20")


@pytest.fixture(scope="module")
def twins() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"twins.{name}")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def options(twins: Module) -> Any:
    """A quick run, with a bucket that is often padded."""
    return twins("options").parse([*QUICK, "--buckets", "1,8"])


def test_runners_are_equal(twins: Module, backend_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, logits and caches are the same bytes on each backend, and what the model says of whole texts."""
    assert twins("program").main([*QUICK, "--backend", backend_name]) == 0
    out = capsys.readouterr().out
    assert f"by either runner, on {backend_name}\nequal: all tokens, and all bytes" in out
    assert "\nright: logits differ" in out
    assert "\n  bucket 8: " in out


def test_batches_beyond_the_largest_bucket(twins: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runners go eagerly where no graph holds the batch, with the same bytes."""
    assert twins("program").main([*QUICK, "--backend", "cpu", "--buckets", "2,3", "--max-batch", "6"]) == 0
    assert "\n  eagerly (too_large): " in capsys.readouterr().out


def test_texts_vary(twins: Module) -> None:
    """The model's texts are no repetitions, in which a wrong place or length would not show."""
    options = twins("options").Options(backend="cpu", sequences=4)
    backend = importlib.import_module("slotgraph.backends").choose("cpu")
    model = twins("model").Model(options.seed)
    _, served = twins("program").serve(options, backend, model, twins("before").HandWritten)
    assert all(len(set(one.generated)) > len(one.generated) // 2 for one in served.sequences)


def test_stale_declaration_is_found(twins: Module, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A slot whose padding keeps the places of an earlier step: exit status 1, and the sequence it has hit."""

    class Stale(twins("after").DecodeInputs):  # type: ignore[misc]  # no package that a checker finds
        """A declaration that someone wrote in good faith."""

        slot_mapping: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=keep("no one reads what padded rows write"))

    after = functools.partial(twins("after").Slotgraph, declaration=Stale)
    assert twins("program").show(options, after=after) == 1
    assert "\nDIFFERENT: sequence " in capsys.readouterr().out


def test_forgotten_line_is_found(twins: Module, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The hand-written runner without one line of its fill: exit status 1, and the texts themselves are wrong."""

    class Forgetful(twins("before").HandWritten):  # type: ignore[misc]  # as above
        def fill(self, batch: Any, rows: int, size: int) -> None:
            tail = self.buffers["slot_mapping"][rows:size]
            stale = tail.clone()
            super().fill(batch, rows, size)
            tail.copy_(stale)

    assert twins("program").show(options, before=Forgetful) == 1
    out = capsys.readouterr().out
    assert "\nDIFFERENT: sequence " in out
    assert "\nWRONG: logits differ" in out


def test_shared_mistake_is_found(
    twins: Module, options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runners are equal and both wrong where the batches are: the model alone tells."""
    numbers = twins("sequences").decode_numbers

    def shifted(*args: Any) -> Any:
        made = numbers(*args)
        return {**made, "positions": [position + 1 for position in made["positions"]]}

    for name in ("before", "after"):
        monkeypatch.setattr(twins(name), "decode_numbers", shifted)
    assert twins("program").show(options) == 1
    out = capsys.readouterr().out
    assert "\nequal: all tokens" in out
    assert "\nWRONG: logits differ" in out


def test_caches_are_compared(twins: Module) -> None:
    """A byte of the caches that differs is found, be all tokens and logits the same."""
    model, options = twins("model").Model(0), twins("options").Options(sequences=2, max_new_tokens=4, buckets=(2,))
    backend = importlib.import_module("slotgraph.backends").choose("cpu")
    one, other = (twins("program").serve(options, backend, model, twins("before").HandWritten)[1] for _ in range(2))
    compare = twins("comparison").compare
    assert compare(model, one, other).passed
    other.cache[1, 2, 3, 1, 5] = -other.cache[1, 2, 3, 1, 5]  # were it 0, -0.0 would do
    assert compare(model, one, other).unequal == "the caches, although all tokens and logits are the same"


def test_lines_with_code_are_counted(twins: Module, tmp_path: Path) -> None:
    """Blanks, comments and docstrings do not count; decorators, and each line of what is spread over several, do."""
    file = tmp_path / "module.py"
    file.write_text(
        '"""Two lines\nof docstring."""\n\nimport os  # and a comment\n\nTEXT = """one\n\nthree"""\n\n\n'
        'class Declared:\n    """Says nothing."""\n\n    first: int = 0\n\n\n'
        "class Made:\n    kept = 1\n\n    @property\n    # in between\n    def whole(\n        self,\n    ) -> int:\n"
        '        """A sentence."""\n\n        return self.kept\n\n\ndef alone() -> None:\n    # why\n    os.sync()\n',
        encoding="utf-8",
    )
    counts = twins("lines").code_lines(file)
    assert counts == {"imports, names": 1 + 3 + 2, "Declared": 2, "whole": 5, "alone": 2}


def test_count_in_the_readme(twins: Module) -> None:
    """The page shows what the program counts today."""
    *table, shared = twins("report").lines()
    text = "\n".join(line.rstrip() for line in table)
    assert text in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert shared.startswith("both use the same ")


def test_what_cannot_run_is_told(twins: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown backend and options out of range end the program with a sentence and status 2."""
    main = twins("program").main
    assert main(["--backend", "no-such"]) == 2
    assert capsys.readouterr().err.startswith("before_after: there is no backend 'no-such'")
    for argv in (["--buckets", "0"], ["--max-new-tokens", "217"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
