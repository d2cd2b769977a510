"""The demo's sampler: draws follow the probabilities, depend on nothing but what they should, and are the same bits."""

from typing import Any

import pytest
import torch

from slotgraph.backends import choose
from tests.examples.demo import module

VOCABULARY, ROWS = 50, 20_000


def sampler(**options: Any) -> Any:
    """One of the demo's own."""
    return module("serving.sampling").Sampler(**options)


def logits_of(rows: int, *, seed: int = 0) -> torch.Tensor:
    """Random rows."""
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_hashed_bits_are_those_of_plain_numbers() -> None:
    """No product overflows: int64 tensors hold what Python's unbounded numbers give, and no two numbers collide."""
    mixed = module("serving.sampling").mixed
    numbers = [0, 1, 2**32 - 1, *torch.randint(2**32, (1000,)).tolist()]
    bits = mixed(torch.tensor(numbers))
    assert bits.tolist() == [mixed(number) for number in numbers]
    assert len(set(bits.tolist())) == len(set(numbers))
    assert 0 <= int(bits.min()) <= int(bits.max()) < 2**32
    ones = sum((mixed(number) ^ mixed(number ^ 1)).bit_count() for number in numbers) / len(numbers)
    assert 15 < ones < 17, "a bit of the number changes half of all bits"


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("over", ["positions", "numbers", "seeds"])
def test_draws_follow_the_probabilities(over: str, top_p: float) -> None:
    """Over the positions of one request, over requests, and over seeds: each token as often as it is likely."""
    logits, many, one = logits_of(1), torch.arange(ROWS), torch.tensor([7])
    shares = (logits[0].double() / 0.9).softmax(-1)
    ranked, order = shares.sort(descending=True)
    kept = torch.zeros(VOCABULARY).bool().scatter(0, order, ranked.cumsum(0) - ranked < top_p)
    shares = shares * kept / (shares * kept).sum()
    if over == "seeds":
        draws = [sampler(temperature=0.9, top_p=top_p, seed=seed).choose(logits, one, one) for seed in range(2000)]
        tokens = torch.cat(draws)
    else:
        names = {"numbers": one.expand(ROWS), "positions": one.expand(ROWS), over: many}
        tokens = sampler(temperature=0.9, top_p=top_p).choose(logits.expand(ROWS, -1), **names)
    counts = tokens.bincount(minlength=VOCABULARY)
    deviation = (len(tokens) * shares * (1 - shares)).sqrt()
    assert ((counts - len(tokens) * shares).abs() <= 5 * deviation + 1).all()
    assert not counts[~kept].any()
    assert int((counts > 0).sum()) == int(kept.sum()) or top_p == 1


def test_a_row_depends_on_itself_alone() -> None:
    """In any batch, behind any padding, one row at a time or all at once: the same tokens, which the text is, too."""
    one, logits = sampler(temperature=1.3, top_p=0.9, seed=-5), logits_of(64, seed=1)
    numbers, positions = torch.randint(9, (64,)), torch.randint(5, 90, (64,))
    tokens = one.choose(logits, numbers, positions)
    order = torch.randperm(64)
    assert one.choose(logits[order], numbers[order], positions[order]).equal(tokens[order])
    alone = [one.choose(*(part[row : row + 1] for part in (logits, numbers, positions))) for row in range(64)]
    assert torch.cat(alone).equal(tokens)
    text = one.choose(logits, torch.full((64,), 3), 11 + torch.arange(64))
    assert one.choices(logits, 3, 11) == text.tolist()
    others = [sampler(temperature=1.3, top_p=0.9, seed=seed).choose(logits, numbers, positions) for seed in (0, 5)]
    assert not any(other.equal(tokens) for other in others)


def test_each_temperature_draws_as_it_should() -> None:
    """None takes the largest logit, a low one nearly always; a nucleus of next to nothing always."""
    logits, rows = logits_of(500, seed=2), torch.arange(500)
    best = logits.argmax(-1)
    assert sampler().choose(logits, rows, rows).equal(best)
    assert sampler(temperature=3.0, top_p=1e-6).choose(logits, rows, rows).equal(best)
    assert int((sampler(temperature=1e-3).choose(logits, rows, rows) == best).sum()) > 495
    assert int((sampler(temperature=3.0).choose(logits, rows, rows) == best).sum()) < 250


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_graph_draws_what_the_host_draws(backend_name: str, top_p: float) -> None:
    """Captured on a device and replayed on other logits, it chooses the same tokens."""
    at, one = choose(backend_name), sampler(temperature=0.8, top_p=top_p, seed=3)
    slots = [logits_of(32).to(at.device), *(torch.arange(32, device=at.device) for _ in range(2))]
    with at.stream():
        one.choose(*slots)
        at.synchronize()
        tokens: list[torch.Tensor] = []
        graph = at.capture(lambda: tokens.append(one.choose(*slots)))
    given = [logits_of(32, seed=9), torch.randint(1000, (32,)), torch.randint(4000, (32,))]
    for slot, tensor in zip(slots, given, strict=True):
        slot.copy_(tensor)
    graph.replay()
    at.synchronize()
    assert tokens[-1].cpu().equal(one.choose(*given))
