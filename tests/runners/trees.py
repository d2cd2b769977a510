"""Trees of drafted tokens in plain Python, for the tests of runners that draft."""

import attrs
import torch


@attrs.frozen
class Node:
    """A node of one request's tree in plain Python."""

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

    def above(self, node: int) -> list[int]:
        """The nodes that one descends from, the nearest first."""
        parent = self.nodes[node].parent
        return [] if parent < 0 else [parent, *self.above(parent)]

    def best(self, root: int, count: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the root and the best count - 1 nodes, in the order in which they were drafted."""
        ranked = sorted(range(len(self.nodes)), key=lambda node: (-self.nodes[node].score, node))
        chosen = sorted(ranked[: count - 1])
        place = {-1: 0, **{node: place for place, node in enumerate(chosen, start=1)}}
        tokens = [root, *(self.nodes[node].token for node in chosen)]
        return tokens, [-1, *(place[self.nodes[node].parent] for node in chosen)]
