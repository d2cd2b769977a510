"""The hybrid of state space and attention: equal to its own generate(), and different as soon as padding is stale."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph import BATCH, copied, keep
from tests.examples.demo import NEEDS, Module

pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("transformers", minversion="5.23", reason="its caches hand out states from transformers 5.23 on")

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "state_space"
FAMILIES = ("bamba", "jamba", "falcon-h1")
QUICK = ("--requests", "8", "--max-new-tokens", "16")


@pytest.fixture(scope="module")
def states() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"states.{name}")
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(
    states: Module, family: str, backend_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request's tokens are what the model makes of its prompt alone, over rows that several have owned."""
    assert states("program").main([*QUICK, "--model", family, "--backend", backend_name, "--buckets", "1,2,5"]) == 0
    out = capsys.readouterr().out
    assert "equality         every token is the one that generate() chose" in out
    assert f"backend          {backend_name}, 3 buckets captured" in out
    assert "  bucket 5        " in out
    assert ", 0 eagerly\n" in out


def stale(inputs: Any) -> type[Any]:
    """Padded rows advance the state of whoever stood there in an earlier step."""

    class Stale(inputs):  # type: ignore[misc]  # no package that a checker finds
        """A declaration that someone wrote in good faith."""

        req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("no one reads what padded rows do"))

    return Stale


def no_dummy(inputs: Any) -> type[Any]:
    """Padded rows advance the state of a row that requests own."""

    class NoDummy(inputs):  # type: ignore[misc]  # as above
        """Another one."""

        req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)

    return NoDummy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plant", [stale, no_dummy])
def test_wrong_padding_is_found(states: Module, plant: Any, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Padding that names a live row: exit status 1, with the first difference named."""
    options = states("options").parse([*QUICK, "--model", family, "--buckets", "8"])
    assert states("program").serve(options, plant(states("inputs").DecodeInputs)) == 1
    assert "\nDIFFERENT from generate(): request " in capsys.readouterr().out


def test_dummy_row_is_never_read(states: Module) -> None:
    """Row 0 holds nothing but nan when requests come, and all tokens and logits are equal."""
    options = states("options").parse([*QUICK, "--backend", "cpu"])
    backend = importlib.import_module("slotgraph.backends").choose("cpu")
    model = states("models").seeded("bamba", options.seed, backend.device)
    requests = states("requests").make_requests(options.requests, options.max_new_tokens, options.seed)
    engine = states("engine").Engine(model, requests, (8,), backend)
    engine.capture()
    for layer in engine.model.pools.layers:
        for pool in (layer.conv, layer.state, layer.keys, layer.values):
            if pool is not None:
                pool[0] = torch.nan
    engine.run()
    answers = [states("comparison").ask(model, request) for request in requests]
    comparison = states("comparison").compare(requests, answers)
    assert comparison.difference is None
    assert comparison.tokens == sum(request.limit for request in requests)
    assert comparison.distinct > 64


def test_step_cache_moves_rows(states: Module, backend: Any) -> None:
    """States come from the rows that a step names and go back there; all other rows stay as they were."""
    layer = states("pools").Layer(*(torch.rand(6, 3, 4, 2, device=backend.device) for _ in range(4)))
    before = [layer.conv.clone(), layer.state.clone(), layer.keys.clone(), layer.values.clone()]
    rows, positions = (torch.tensor(numbers, device=backend.device) for numbers in ([4, 2, 0, 0], [1, 3, 0, 0]))
    cache = states("cache").StepCache(states("pools").Pools([layer], 4), rows, positions)
    conv, state = cache.get_conv_state(0), cache.get_recurrent_state(0, state_idx=0)
    assert torch.equal(conv, before[0][rows])
    conv.add_(1)
    state.mul_(2)
    keys, values = torch.rand(2, 4, 3, 1, 2, device=backend.device)
    seen = cache.update(keys, values, 0)
    cache.put_back()
    assert torch.equal(layer.conv[[4, 2]], before[0][[4, 2]] + 1)
    assert torch.equal(layer.state[[4, 2]], before[1][[4, 2]] * 2)
    assert torch.equal(torch.stack([layer.keys[4, :, 1], layer.keys[2, :, 3]]), keys[:2, :, 0])
    assert all(torch.equal(now, pool[rows]) for now, pool in zip(seen, (layer.keys, layer.values), strict=True))
    pools = (layer.conv, layer.state, layer.keys, layer.values)
    assert all(torch.equal(now[[1, 3, 5]], then[[1, 3, 5]]) for now, then in zip(pools, before, strict=True))


def test_what_cannot_run_is_told(
    states: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown backend, an option out of range and an old transformers end the program with status 2."""
    main = states("program").main
    assert main(["--backend", "no-such"]) == 2
    monkeypatch.delattr("transformers.Cache.get_conv_state")
    assert main([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("state_space: there is no backend 'no-such'")
    assert said[1].startswith("state_space: transformers' caches must hand out states")
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "mamba"])
    assert stopped.value.code == 2
