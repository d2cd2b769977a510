"""Trees of drafted tokens against plain Python: growth, the best nodes, what each may see, and the accepted path."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph.backends import Backend
from slotgraph.runners.tree import Accepted, Drafts, Frontier, Tree, accept, ancestors, best_tree, top_tokens
from tests.examples.demo import module
from tests.strategies import noise


@attrs.frozen
class Node:  # a node of one request's tree in plain Python
    token: int
    score: float
    parent: int


@attrs.define
class PlainTree:
    """One request's tree in plain Python: all nodes, and those that the next step goes on from, with their branches."""

    nodes: list[Node]
    frontier: list[int]
    branches: list[list[int]]

    @classmethod
    def begin(cls, shares: list[float], tokens: list[int]) -> "PlainTree":
        nodes = [Node(token, share, -1) for token, share in zip(tokens, shares, strict=True)]
        return cls(nodes, list(range(len(nodes))), [[] for _ in nodes])

    def grow(self, shares: list[list[float]], tokens: list[list[int]]) -> None:
        """All children are nodes; the best of them are the next frontier."""
        found = []
        for row, node in enumerate(self.frontier):
            for share, token in zip(shares[row], tokens[row], strict=True):
                score = float(torch.tensor(self.nodes[node].score) * torch.tensor(share))
                found.append((len(self.nodes), row))
                self.nodes.append(Node(token, score, node))
        best = sorted(found, key=lambda one: -self.nodes[one[0]].score)[: len(self.frontier)]
        self.frontier = [node for node, _ in best]
        self.branches = [[*self.branches[row], row] for _, row in best]

    def above(self, node: int) -> list[int]:  # the nodes that one descends from, the nearest first
        parent = self.nodes[node].parent
        return [] if parent < 0 else [parent, *self.above(parent)]

    def best(self, root: int, count: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the root and the best count - 1 nodes, in the order in which they were drafted."""
        scores = [-math.inf if math.isnan(node.score) else node.score for node in self.nodes]
        ranked = sorted(range(len(scores)), key=lambda node: (-scores[node], node))
        chosen = sorted(ranked[: count - 1])
        place = {-1: 0, **{node: place for place, node in enumerate(chosen, start=1)}}
        tokens = [root, *(self.nodes[node].token for node in chosen)]
        return tokens, [-1, *(place[self.nodes[node].parent] for node in chosen)]


WORDS = 40


def plain_ancestors(parents: list[int]) -> list[set[int]]:
    """Each node and all above it."""
    seen: list[set[int]] = []
    for node, parent in enumerate(parents):
        seen.append({node} | (seen[parent] if parent >= 0 else set()))
    return seen


def plain_walk(tokens: list[int], parents: list[int], targets: list[int], steps: int) -> list[int]:
    """The accepted path from the root."""
    path = [0]
    while len(path) <= steps:
        wanted = targets[path[-1]]
        right = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == wanted]
        if not right:
            break
        path.append(right[0])
    return path


def grown(requests: int, topk: int, steps: int, seed: int) -> tuple[Frontier, list[PlainTree]]:
    """The same random tree, in tensors and in plain Python."""
    shares, tokens = top_tokens(3 * noise((requests, WORDS), torch.float32, seed), topk)
    frontier = Frontier.begin(shares, tokens)
    plain = [PlainTree.begin(s, t) for s, t in zip(shares.tolist(), tokens.tolist(), strict=True)]
    for step in range(1, steps):
        shares, tokens = top_tokens(3 * noise((requests, topk, WORDS), torch.float32, seed + step), topk)
        frontier = frontier.grow(shares, tokens)
        for request, tree in enumerate(plain):
            tree.grow(shares[request].tolist(), tokens[request].tolist())
    return frontier, plain


sizes = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))


@given(sizes)
def test_a_tree_grows_as_plain_python_grows_it(size: tuple[int, int, int, int]) -> None:
    """Nodes, scores and parents, and what the next step goes on from, as plain Python has them."""
    requests, topk, steps, seed = size
    frontier, plain = grown(requests, topk, steps, seed)
    drafts = frontier.drafts()
    assert drafts.tokens.shape == (requests, topk + (steps - 1) * topk * topk)
    for request, tree in enumerate(plain):
        assert drafts.tokens[request].tolist() == [node.token for node in tree.nodes]
        assert drafts.parents[request].tolist() == [node.parent for node in tree.nodes]
        assert drafts.scores[request].tolist() == [node.score for node in tree.nodes]
        assert frontier.scores[request].tolist() == [tree.nodes[node].score for node in tree.frontier]
        assert frontier.nodes[request].tolist() == tree.frontier
        assert frontier.branches[request].tolist() == tree.branches


ODD = (0.0, 1.0, 1.0, 0.5, 1e-40, 1.5, math.nan, math.inf, -1.0)
"""Shares that are equal, and such as no softmax gives."""


@given(sizes, st.booleans(), st.data())
def test_the_best_tree_is_that_of_plain_python(size: tuple[int, int, int, int], odd: bool, data: st.DataObject) -> None:
    """The root and the best nodes, parents before children, with their depths and with what each may see.

    A node whose score is not a number, and with it all below, comes after all that have one.
    """
    requests, topk, steps, seed = size
    drafts = (_odd(topk, steps, data) if odd else grown(requests, topk, steps, seed)[0]).drafts()
    requests, nodes = drafts.tokens.shape
    scores, count = drafts.scores.clone(), data.draw(st.integers(1, 1 + nodes))
    for row, parents in zip(scores, drafts.parents.tolist(), strict=True):
        spoilt = data.draw(st.sets(st.integers(0, nodes - 1), max_size=2))
        for node, parent in enumerate(parents):
            if node in spoilt or parent in spoilt:
                spoilt.add(node)
                row[node] = math.nan
    tree = best_tree(attrs.evolve(drafts, scores=scores), torch.arange(100, 100 + requests), count)
    positions = tree.positions(torch.arange(requests) * 10)
    for row in range(requests):
        columns = (drafts.tokens[row].tolist(), scores[row].tolist(), drafts.parents[row].tolist())
        plain = PlainTree([Node(*one) for one in zip(*columns, strict=True)], [], [])
        tokens, parents = plain.best(100 + row, count)
        assert (tree.tokens[row].tolist(), tree.parents[row].tolist()) == (tokens, parents)
        seen = plain_ancestors(parents)
        assert [set(one.nonzero().flatten().tolist()) for one in tree.mask[row]] == seen
        assert tree.depths[row].tolist() == [len(above) - 1 for above in seen]
        assert positions[row].tolist() == [row * 10 + len(above) - 1 for above in seen]


def _odd(topk: int, steps: int, data: st.DataObject) -> Frontier:
    """One tree, of such shares."""

    def drawn(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.tensor(data.draw(st.lists(st.sampled_from(ODD), min_size=count, max_size=count))).view(shape)

    frontier = Frontier.begin(drawn(1, topk), torch.arange(topk)[None])
    for _ in range(1, steps):
        frontier = frontier.grow(drawn(1, topk, topk), torch.arange(topk * topk).view(1, topk, topk))
    return frontier


@given(st.lists(st.integers(0, 100), max_size=20))
def test_ancestors_are_right_in_any_tree(draws: list[int]) -> None:
    """Any parents before their children, chains among them."""
    parents = [-1, *(draw % (place + 1) for place, draw in enumerate(draws))]
    [mask] = ancestors(torch.tensor([parents]))
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == plain_ancestors(parents)


@st.composite
def verified(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]], int]:
    """Trees whose siblings have different tokens, and targets that often go along."""
    requests, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    tokens, parents, targets = [], [], []
    for _ in range(requests):
        above = [-1, *(draw(st.integers(0, place)) for place in range(nodes - 1))]
        names = [draw(st.integers(0, 3))]
        for place in range(1, nodes):
            taken = {names[other] for other in range(1, place) if above[other] == above[place]}
            names.append(draw(st.sampled_from([name for name in range(12) if name not in taken])))
        children: list[list[int]] = [[names[n] for n in range(nodes) if above[n] == node] for node in range(nodes)]
        targets.append([draw(st.sampled_from([*found, *found, 99])) for found in children])
        tokens.append(names)
        parents.append(above)
    return tokens, parents, targets, draw(st.integers(0, nodes))


@given(verified())
def test_the_accepted_path_is_that_of_plain_python(
    drawn: tuple[list[list[int]], list[list[int]], list[list[int]], int],
) -> None:
    """The walk goes as far as drafted tokens are right, and says what the target chose after each node."""
    tokens, parents, targets, steps = drawn
    found = accept(torch.tensor(tokens), torch.tensor(parents), torch.tensor(targets), steps)
    for row in range(len(tokens)):
        path = plain_walk(tokens[row], parents[row], targets[row], steps)
        assert int(found.counts[row]) == len(path) - 1
        assert found.nodes[row].tolist() == path + [path[-1]] * (steps + 1 - len(path))
        assert found.tokens[row].tolist() == [targets[row][node] for node in found.nodes[row].tolist()]


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 100))
def test_captured_trees_are_the_eager_ones(backend: "Backend", topk: int, steps: int, seed: int) -> None:
    """All of it may be captured: a replay gives for other numbers what is computed outside."""
    requests, words = 2, 3 * topk
    first = torch.empty(requests, words, device=backend.device)
    later = torch.empty(steps - 1, requests, topk, words, device=backend.device)

    def step() -> tuple[Drafts, Tree, Accepted]:
        frontier = Frontier.begin(*top_tokens(first, topk))
        for logits in later:
            frontier = frontier.grow(*top_tokens(logits, topk))
        tree = best_tree(frontier.drafts(), frontier.tokens[:, 0], 1 + topk * steps)
        return frontier.drafts(), tree, accept(tree.tokens, tree.parents, tree.tokens.roll(-1, 1), steps)

    filled = [noise(tuple(tensor.shape), tensor.dtype, seed) for tensor in (first, later)]
    first.fill_(0.5)
    later.fill_(0.5)
    with backend.stream():
        step()
        backend.synchronize()
        graph = backend.capture(step, pool=backend.pool())
    for target, values in zip((first, later), filled, strict=True):
        target.copy_(values)
    graph.replay()
    backend.synchronize()
    for got, due in zip(graph.outputs, step(), strict=True):
        pair: list[Any] = [attrs.asdict(one, recurse=False) for one in (got, due)]  # type: ignore[arg-type]
        assert all(torch.equal(pair[0][name], value) for name, value in pair[1].items())


@pytest.mark.parametrize("count", [0, 14, -1])
def test_a_tree_of_too_many_nodes_is_refused(count: int) -> None:
    """A tree has its root, and no more nodes than were drafted."""
    frontier, _ = grown(2, 3, 2, 0)
    with pytest.raises(ValueError, match=r"a tree of -?\d+ nodes is not possible: this draft has 1 to 13"):
        best_tree(frontier.drafts(), torch.tensor([1, 2]), count)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("steps", [1, 2])
def test_ids_of_any_whole_dtype_make_the_same_tree(dtype: torch.dtype, steps: int) -> None:
    """Tokens and parents are int64, and the parent of the first nodes is -1, also where ids cannot be below 0."""
    shares, tokens = torch.tensor([[0.5, 0.25]]), torch.tensor([[3, 4]], dtype=dtype)
    frontier = Frontier.begin(shares, tokens)
    if steps > 1:
        frontier = frontier.grow(shares.expand(1, 2, 2), tokens.long().expand(1, 2, 2))
    drafts = frontier.drafts()
    assert (drafts.tokens.dtype, drafts.parents.dtype) == (torch.int64, torch.int64)
    assert drafts.parents[0].tolist() == [-1, -1, 0, 0, 1, 1][: 2 if steps == 1 else 6]
    assert best_tree(drafts, torch.tensor([9]), 3).tokens.tolist() == [[9, 3, 4]]


def test_other_shapes_are_refused_by_name() -> None:
    """A mistake is not broadcast, and the error says which shape was expected."""
    drafts = grown(2, 2, 2, 0)[0].drafts()
    tree = best_tree(drafts, torch.tensor([1, 2]), 3)
    wrong: list[tuple[Any, str]] = [
        (torch.ones(3), r"shape \[3\]"),
        (torch.ones(2, 1), r"shape \[2, 1\]"),
        ([1, 2], "list"),
    ]
    for roots, got in wrong:
        with pytest.raises(ValueError, match=rf"roots: expected a tensor of shape \[2\], got {got}"):
            best_tree(drafts, roots, 3)
    targets = torch.zeros_like(tree.tokens)
    with pytest.raises(ValueError, match=r"tokens: expected a tensor of shape \[2, 3\], got shape \[6\]"):
        accept(tree.tokens.flatten(), tree.parents, targets, 2)
    with pytest.raises(ValueError, match=r"targets: expected a tensor of shape \[2, 3\], got shape \[2, 3, 50\]"):
        accept(tree.tokens, tree.parents, targets[:, :, None].expand(-1, -1, 50), 2)
    with pytest.raises(ValueError, match=r"parents: expected \[requests, nodes\], got shape \[6\]"):
        accept(tree.tokens, tree.parents.flatten(), targets, 2)


@given(st.text("abc", min_size=2, max_size=20), st.integers(0, 6))
def test_prompt_lookup_of_the_example(text: str, count: int) -> None:
    """It drafts what came after the newest earlier place of the last three characters, or two, or one."""
    ends = (text[:-1].rfind(text[-size:]) + size for size in (3, 2, 1) if text[-size:] in text[:-1])
    at, drafted = next(ends, len(text) - 1), text
    for place in range(count):
        drafted += drafted[at + place]
    found = module("speculating.lookup").lookup(text.encode(), count)
    assert bytes(found).decode() == drafted[len(text) :]
