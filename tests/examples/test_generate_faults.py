"""The demo fails on each bug that graph inputs are known for, in every precision."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from slotgraph import CACHE_LOC, TOKENS, computed, copied, keep
from tests.examples.demo import DTYPES, NEEDS, QUICK, Generate, Module

pytest.importorskip("transformers", reason=NEEDS)


def shifted(batch: Any) -> Any:
    """Every decode position is one too far."""
    return attrs.evolve(batch, positions=batch.positions + 1)


def swapped(batch: Any) -> Any:
    """Each request's keys and values go to where another one's belong."""
    return attrs.evolve(batch, out_cache_loc=batch.out_cache_loc.roll(1))


def late(batch: Any) -> Any:
    """Keys and values go one row beyond their place, and attention reads an empty one."""
    return attrs.evolve(batch, out_cache_loc=batch.out_cache_loc + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize("plant", [shifted, swapped, late])
def test_wrong_batches_are_found(generate: Generate, plant: Callable[[Any], Any], backend: str, dtype: str) -> None:
    """A shifted position and a wrong cache location: exit status 1, with the first difference named."""
    status, report, out = generate(*("--backend", backend, "--dtype", dtype, *QUICK), prepare=plant)
    _assert_named(status, report, out)
    assert report["comparison"]["apart"] > 8
    assert report["measured"] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_stale_tail_is_found(generate: Generate, serving: Module, backend: str, dtype: str) -> None:
    """Padded rows whose cache locations are those of an earlier step overwrite a live request's keys and values."""

    class Stale(serving("inputs").DecodeInputs):  # type: ignore[misc]  # the demo is no package that a checker finds
        """A declaration that someone wrote in good faith."""

        out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=keep("no one reads what padded rows write"))

    status, report, out = generate("--backend", backend, "--dtype", dtype, declaration=Stale)
    _assert_named(status, report, out)
    assert report["comparison"]["apart"] > 0


def _assert_named(status: int, report: dict[str, Any], out: str) -> None:
    """The exit status is 1, and request, token, step and logits of the first difference are told."""
    difference = report["comparison"]["difference"]
    assert (status, report["passed"]) == (1, False)
    assert difference["logits"] > report["comparison"]["bounds"]["logits"]
    assert not difference["near_tie"]
    where = f"request {difference['request']}, generated token {difference['token']}, engine step {difference['step']}"
    assert f"DIFFERENT from generate(): {where}:" in " ".join(out.split())


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_count_is_found(generate: Generate, serving: Module, dtype: str) -> None:
    """A computed slot that counts padded rows as live ones fails the run, although every token is right."""

    def padded_tokens(step: Any) -> int:
        count: int = step.padded(TOKENS)
        return count

    class Miscounted(serving("inputs").DecodeInputs):  # type: ignore[misc]  # as above
        """Counts the bucket's rows."""

        num_token_non_padded: torch.Tensor = computed(padded_tokens, shape=1, dtype=torch.int32)

    few = ("--max-batch", "3", "--buckets", "2,4", "--dtype", dtype)
    status, report, out = generate(*QUICK, *few, declaration=Miscounted)
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
    bounds = serving("bounds").bounds_for(options, language, requests, answers)
    assert serving("comparison").compare(requests, answers, bounds).difference is None
