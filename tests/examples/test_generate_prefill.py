"""The demo's prompts: several requests in one step, by each path, and what becomes of a step that no graph can take."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph import CACHE_LOC, TOKENS, EagerRunner, copied, keep
from tests.examples.demo import NEEDS, Generate, Module, Result

pytest.importorskip("transformers", reason=NEEDS)

LENGTHS = (40, 17, 8, 3, 70, 30, 2, 5)
BUCKETS = {16, 32, 48, 64}
FEW = ("--arrival-gap", "0", "--max-new-tokens", "6", "--max-prefill-tokens", "64")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of prompts of many lengths; one is longer than any bucket."""
    file: Path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    text = "In a hole in the ground there lived a graph, and it remembered all its addresses, every one of them"
    file.write_text("\n".join(text[number:][:length] for number, length in enumerate(LENGTHS)), encoding="utf-8")
    return str(file)


def traces(path: str) -> int:
    """How often torch's tracer has gone through a step so far; it takes a second to ask where nothing is traced."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if path == "piecewise" else 0


@pytest.mark.parametrize("path", ["breakable", "piecewise", "eager"])
def test_each_path_is_equal(generate: Generate, lines: str, backend_name: str, path: str) -> None:
    """Requests share prefill steps by each path; what is too long for the graphs runs eagerly; all tokens are equal."""
    before = traces(path)
    status, report, out = generate("--backend", backend_name, "--prefill", path, "--prompts", lines, *FEW)
    prefill = report["prefill"]
    assert (status, report["comparison"]["difference"], prefill["asked"]) == (0, None, path)
    assert (prefill["most"], prefill["tokens"]) == (3, sum(LENGTHS) + len(LENGTHS))
    assert prefill["steps"] == sum(prefill["paths"].values()) < len(LENGTHS)
    assert traces(path) - before <= 2, "a trace serves all buckets, but for the largest, whose slots are whole buffers"
    if path == "eager":
        assert (prefill["buckets"], list(prefill["reasons"])) == ([], ["always_eager"])
    else:
        assert prefill["paths"] == {path: prefill["steps"] - 1, "eager": 1}
        assert prefill["reasons"] == {"too_large": "71 tokens are more than the largest bucket, 64"}
        assert {use["bucket"] for use in prefill["buckets"]} <= BUCKETS
        assert all(use["path"] == path and use["live"] <= use["padded"] for use in prefill["buckets"])
        assert "eager 1, too_large" in " ".join(out.split())


@pytest.mark.parametrize("path", ["breakable", "eager"])
def test_stale_tail_of_prompts(generate: Generate, serving: Module, backend_name: str, lines: str, path: str) -> None:
    """Padded rows that write where an earlier prefill wrote are found; an eager step has none."""

    class Stale(serving("inputs").PrefillInputs):  # type: ignore[misc]  # the demo is no package that a checker finds
        """A declaration that someone wrote in good faith."""

        out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=keep("no one reads what padded rows write"))

    argv = ("--backend", backend_name, "--prefill", path, "--prompts", lines, *FEW)
    status, report, out = generate(*argv, prompts=Stale)
    assert status == (path != "eager")
    if status:
        difference = report["comparison"]["difference"]
        assert difference["logits"] > report["comparison"]["bounds"]["logits"]
        assert f"DIFFERENT from generate(): request {difference['request']}," in " ".join(out.split())


def test_default_prefill(default: Result) -> None:
    """By default prompts go through breakable graphs, which is told, with what they take and what is padding."""
    _, report, out = default
    prefill, times = report["prefill"], report["prefill_times"]
    assert prefill["paths"] == {"breakable": prefill["steps"]}
    assert prefill["most"] > 1
    assert sum(use["live"] for use in prefill["buckets"]) == prefill["tokens"]
    assert (0 < prefill["padding_waste"] < 0.5, 0 < prefill["share"] < 1, prefill["memory"] > 0) == (True, True, True)
    assert prefill["capture_seconds"] > 0
    assert (times["path"], times["tokens"] <= times["bucket"]) == ("breakable", True)
    assert all(times[way]["median"] > 0 for way in ("whole", "eager", "ratio"))
    flat = " ".join(out.split())
    assert f"breakable {prefill['steps']}" in flat
    assert f"A prefill step of {times['requests']} requests, {times['tokens']} tokens, takes" in flat


def test_prompts_share_a_step_up_to_a_limit(serving: Module) -> None:
    """Prompts that fit together are admitted together; a longer one runs alone."""
    lengths = (4, 5, 2, 30, 1, 9)
    requests = [
        serving("request").Request(number=number, prompt="", prompt_ids=[1] * length, arrival=0, limit=1)
        for number, length in enumerate(lengths)
    ]
    scheduler = serving("scheduler").Scheduler(requests, serving("cache").PageAllocator(64), 8, 16, 10)
    admitted: list[list[int]] = []
    while sum(map(len, admitted)) < len(lengths):
        admitted.append([len(request.prompt_ids) for request in scheduler.admit(0)])
    assert admitted == [[4, 5], [2], [30], [1, 9]]


def test_attention_stays_within_requests(serving: Module) -> None:
    """Attention leaves padded rows at zero, whatever they hold, and no request sees another one's tokens."""
    attention, inputs = serving("attention"), serving("inputs")
    generator = torch.Generator().manual_seed(3)
    tokens, lengths = 9, [2, 4]
    rows = [torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2)]

    def attend(tensors: list[torch.Tensor], lengths: list[int]) -> Any:
        def step(_: Any) -> Any:
            return attention.attend_within_requests(*tensors, 0.3)

        runner = EagerRunner(inputs.PrefillInputs, step, backend="cpu")
        zeros = torch.zeros(sum(lengths), dtype=torch.int64)
        named = {"input_ids": zeros, "positions": zeros, "out_cache_loc": zeros}
        return runner({**named, "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32), "lengths": lengths})

    together = attend(rows, lengths)
    assert not together[sum(lengths) :].any()
    for begin, length in ((0, 2), (2, 4)):
        alone = attend([tensor[begin : begin + length] for tensor in rows], [length])
        torch.testing.assert_close(together[begin : begin + length], alone)
