"""What the demo takes for equal: the same tokens with float32, and near-ties of the reference below that."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.examples.demo import NEEDS, Generate, Module

pytest.importorskip("transformers", reason=NEEDS)

LIMIT = 9


@pytest.fixture(scope="module")
def language(serving: Module) -> Any:
    """The small Llama in float32."""
    return serving("model").load_language(serving("options").parse([]), torch.device("cpu"))


@pytest.fixture(scope="module")
def alone(serving: Module, language: Any) -> Any:
    """What generate() makes of one prompt."""
    [answer] = serving("reference").reference_answers(language, [_request(serving, [])])
    return answer


def _request(serving: Module, tokens: Sequence[int], logits: torch.Tensor | None = None) -> Any:
    request = serving("request").Request(number=3, prompt="The sea", prompt_ids=[256, 5, 6], arrival=0, limit=LIMIT)
    for step, token in enumerate(tokens):
        request.add(token, torch.arange(9.0) if logits is None else logits[step], step)
    return request


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes(generate: Generate, dtype: str) -> None:
    """Near-ties are counted and bounded, and all logits are as near as the reference is to itself."""
    status, report, out = generate("--dtype", dtype)
    comparison, bounds = report["comparison"], report["comparison"]["bounds"]
    assert (status, comparison["difference"], comparison["apart"]) == (0, None, 0)
    assert comparison["tokens"] == report["tokens"]
    assert 0 < comparison["largest"] <= bounds["logits"] < comparison["spread"] / 4
    assert 0 < bounds["noise"] <= bounds["logits"] / 2
    assert comparison["gap"] <= bounds["tie"] == 2 * bounds["logits"]
    equal = f"{report['tokens'] - comparison['ties']} of {report['tokens']} tokens of 16 requests outright"
    assert equal in " ".join(out.split())


def test_one_token_has_a_tolerance_too(generate: Generate, prompts: str) -> None:
    """Where the reference has no room to differ from itself, a few units in the last place are allowed."""
    status, report, _ = generate("--dtype", "bfloat16", "--prompts", prompts, "--max-new-tokens", "1")
    assert (status, report["measured"]) == (0, None)
    assert report["comparison"]["bounds"]["logits"] > 0.1


def test_given_tolerance_decides(generate: Generate, prompts: str) -> None:
    """`--tolerance` stands for what would have been measured, in every precision."""
    argv = ("--prompts", prompts, "--max-new-tokens", "4", "--tolerance")
    status, report, _ = generate("--dtype", "bfloat16", *argv, "1.5")
    assert (status, report["comparison"]["bounds"]["logits"], report["comparison"]["bounds"]["tie"]) == (0, 1.5, 3.0)
    status, report, out = generate("--dtype", "bfloat16", *argv, "0.00001")
    assert (status, report["comparison"]["difference"]["near_tie"]) == (1, False)
    assert "by other logits" in out
    assert generate(*argv, "0.5")[1]["comparison"]["bounds"] == {"logits": 0.5, "tie": 0, "noise": None}


@pytest.mark.parametrize(
    ("got", "expected", "token", "near_tie"),
    [([5, 6], [5, 7], 1, True), ([5], [5, 7], 1, False), ([5, 6, 7], [5, 6], 2, False), ([5, 6], [5, 6], None, False)],
)
def test_comparison_names_the_first_difference(
    serving: Module, got: list[int], expected: list[int], token: int | None, *, near_tie: bool
) -> None:
    """Another token, a text that ends too early or too late; another token by equal logits is called a near-tie."""
    answer = serving("reference").Answer(expected, torch.arange(9.0).expand(len(expected), 9))
    bounds = serving("bounds").Bounds(logits=0.1)
    difference = serving("comparison").compare([_request(serving, got)], [answer], bounds).difference
    found = None if difference is None else (difference.token, difference.near_tie)
    assert found == (None if token is None else (token, near_tie))


@pytest.mark.parametrize(("below", "passes"), [(0.0, True), (0.15, True), (0.25, False), (float("nan"), False)])
def test_near_ties_have_a_bound(serving: Module, below: float, *, passes: bool) -> None:
    """Another token passes as long as the reference likes it hardly less than its own, and the texts go on."""
    logits = torch.zeros(3, 9)
    logits[:, 5] = 2.0
    logits[1, 7] = 2.0 - below
    answer = serving("reference").Answer([5, 5, 5], logits)
    bounds = serving("bounds").Bounds(logits=0.1, tie=0.2)
    comparison = serving("comparison").compare([_request(serving, [5, 7, 5], logits)], [answer], bounds)
    assert (comparison.difference is None, comparison.ties, comparison.apart) == (passes, int(passes), int(not passes))
    if passes:
        assert comparison.gap == pytest.approx(below)
    else:
        assert (comparison.difference.token, comparison.difference.expected, comparison.difference.got) == (1, 5, 7)


def test_forced_logits_are_those_of_generate(serving: Module, language: Any, alone: Any) -> None:
    """Reading a text at once, alone or padded among others, gives the logits that made it token by token."""
    texts = [([256, 5, 6], alone.tokens), ([256], [1, 2, 3]), ([256, 5, 6], alone.tokens[:2])]
    for together in (1, 3):
        forced = serving("forcing").forced_logits(language, texts, together)
        assert [len(rows) for rows in forced] == [LIMIT, 3, 2]
        torch.testing.assert_close(forced[0], alone.logits, atol=1e-3, rtol=0)
        torch.testing.assert_close(forced[2], alone.logits[:2], atol=1e-3, rtol=0)


def test_reference_follows_another_text(serving: Module, language: Any, alone: Any) -> None:
    """Up to the first other token the answer is generate()'s; after it, what the model makes of the request's text."""
    others = [*alone.tokens[:2], alone.tokens[2] + 1, *range(40, 40 + LIMIT - 3)]
    answer = serving("forcing").answer_to(language, _request(serving, others), alone)
    [forced] = serving("forcing").forced_logits(language, [([256, 5, 6], others)])
    assert answer.tokens[:3] == alone.tokens[:3]
    assert torch.equal(answer.logits[:3], alone.logits[:3])
    assert torch.equal(answer.logits[3:], forced[3:])
    assert answer.tokens[3:] == forced[3:].argmax(dim=1).tolist()


@pytest.mark.parametrize(("after", "due"), [([1, 2], 6), ([1, 257], 5), ([257, 2], 4), ([1] * 6, LIMIT)])
def test_ends_of_other_texts(serving: Module, language: Any, alone: Any, after: list[int], due: int) -> None:
    """A text that stops short is missing a token, and one that goes on after its end has one too many."""
    tokens = [*alone.tokens[:2], alone.tokens[2] + 1, *after]
    assert len(serving("forcing").answer_to(language, _request(serving, tokens), alone).tokens) == due


def test_same_text_needs_no_forcing(serving: Module, language: Any, alone: Any) -> None:
    """Where generate() made the same text, or one begins the other, its answer stands."""
    for tokens in (alone.tokens, alone.tokens[:4], [*alone.tokens, 1]):
        assert serving("forcing").answer_to(language, _request(serving, tokens), alone) is alone
