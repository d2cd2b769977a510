"""Trees of drafted tokens: how they grow, which of their nodes are verified, and which path the target accepts.

The functions work on tensors and read nothing on the host, so that any of them may be part of a captured step.
"""

import attrs
import torch


@attrs.frozen(eq=False)
class Drafts:
    """The result of a draft: topk nodes of depth 1, then topk * topk candidates for each further step.

    Attributes:
        tokens: [requests, nodes] int64.
        scores: [requests, nodes] float32. The product of the probabilities on the way from the root, never more than
            the parent's.
        parents: [requests, nodes] int64. A node's parent, which comes before it, or -1 if that is the root, the known
            token.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


@attrs.frozen(eq=False)
class Tree:
    """The nodes that are verified, a request's own known token first, each parent before its children.

    Attributes:
        tokens: [requests, nodes] int64.
        parents: [requests, nodes] int64. Indices in the same row; the root's is -1.
        depths: [requests, nodes] int64. The root's is 0.
        mask: [requests, nodes, nodes] bool. Which nodes of the tree each node may see, itself included.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor

    def positions(self, roots: torch.Tensor) -> torch.Tensor:
        """Return positions of all nodes, [requests, nodes], given the roots', [requests]."""
        return self.depths + roots[:, None]


@attrs.frozen(eq=False)
class Accepted:
    """The path of a tree that the target accepts.

    Attributes:
        counts: [requests] int64. How many drafted tokens the target would also have chosen.
        nodes: [requests, steps + 1] int64. The path from the root. After its end the last node repeats, so that every
            number is a valid index.
        tokens: [requests, steps + 1] int64. What the target chose after each of these nodes: the drafted tokens that
            are right, and one more.
    """

    counts: torch.Tensor
    nodes: torch.Tensor
    tokens: torch.Tensor


@attrs.frozen(eq=False)
class Frontier:
    """A tree while it grows: its levels so far, and the topk nodes of each request that the next step continues from.

    Attributes:
        levels: Tokens, scores and parents of each level.
        tokens: [requests, topk]. The tokens of the nodes to continue from.
        scores: [requests, topk]. Their scores.
        nodes: [requests, topk]. Their indices among all nodes.
        branches: [requests, topk, steps so far]. Which of each earlier step's nodes each one descends from.
    """

    levels: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    tokens: torch.Tensor
    scores: torch.Tensor
    nodes: torch.Tensor
    branches: torch.Tensor

    @classmethod
    def begin(cls, shares: torch.Tensor, tokens: torch.Tensor) -> "Frontier":
        """Return the children of the roots, [requests, topk] probabilities and tokens."""
        scores = _sound(shares)
        nodes = _counting(tokens)
        tokens = tokens.long()
        return cls(((tokens, scores, torch.full_like(tokens, -1)),), tokens, scores, nodes, nodes[:, :, None][:, :, :0])

    def grow(self, shares: torch.Tensor, tokens: torch.Tensor) -> "Frontier":
        """Add one level: [requests, topk, topk] probabilities and tokens of these nodes' children.

        The next step continues from the topk best candidates of a request, by the product of probabilities.
        """
        topk = self.tokens.shape[1]
        steps = self.branches.shape[2]
        scores = (self.scores[:, :, None] * _sound(shares)).flatten(1)
        parents = self.nodes[:, :, None].expand_as(tokens).flatten(1)
        words = tokens.flatten(1)
        best, places = scores.topk(topk, dim=1)
        rows = torch.div(places, topk, rounding_mode="floor")[:, :, None]
        branches = torch.cat([self.branches.gather(1, rows.expand(-1, -1, steps)), rows], dim=2)
        first = topk + (len(self.levels) - 1) * topk * topk  # nodes before this level
        levels = (*self.levels, (words, scores, parents))
        return Frontier(levels, words.gather(1, places), best, places + first, branches)

    def drafts(self) -> Drafts:
        """Return all nodes so far."""
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*self.levels, strict=True))
        return Drafts(tokens, scores, parents)


def top_tokens(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities, float32, and ids of the topk likeliest tokens of each row: [..., topk] each, best first."""
    return torch.softmax(logits.float(), dim=-1).topk(topk, dim=-1)


def best_tree(drafts: Drafts, roots: torch.Tensor, nodes: int) -> Tree:
    """Return the tree of the roots, [requests] int64, and the `nodes` - 1 drafted nodes with the best scores.

    A parent is never left out for its child: its score is at least as good, and of equal scores the earlier node wins.
    A NaN score is the worst of all, as those of all nodes below it must be.

    Raises:
        ValueError: There are fewer nodes, or the roots are not one for each request.
    """
    _check_shape("roots", roots, drafts.tokens.shape[:1])
    most = 1 + drafts.tokens.shape[1]
    if not 1 <= nodes <= most:
        raise ValueError(f"a tree of {nodes} nodes is not possible: this draft has 1 to {most}, including the root")
    scores = drafts.scores.masked_fill(drafts.scores.isnan(), -torch.inf)  # a NaN would be sorted before its parent
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    chosen = order.sort(dim=1).values
    tokens = torch.cat([roots[:, None], drafts.tokens.gather(1, chosen)], dim=1)
    places = _counting(tokens)
    where = torch.zeros_like(drafts.parents[:, :1]).expand(-1, most).scatter(1, chosen + 1, places[:, 1:])
    above = where.gather(1, drafts.parents.gather(1, chosen) + 1)
    parents = torch.cat([torch.full_like(places[:, :1], -1), above], dim=1)
    mask = ancestors(parents)
    return Tree(tokens, parents, mask.sum(2) - 1, mask)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return what each node may see, [requests, nodes, nodes] bool: itself and all nodes above it.

    The parent of a root is -1. Each round doubles the paths, so that log2(nodes) rounds are enough for a tree of any
    depth.
    """
    nodes = parents.shape[1]
    places = _counting(parents)
    mask = places[:, :, None] == places[:, None, :]
    above = torch.where(parents < 0, places, parents)
    for _ in range((nodes - 1).bit_length()):
        mask = mask | mask.gather(1, above[:, :, None].expand(-1, -1, nodes))
        above = above.gather(1, above)
    return mask


def accept(tokens: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor, steps: int) -> Accepted:
    """Walk each tree from its root while a child is what the target chose, at most `steps` times.

    Padded rows walk too, and have no effect on others.

    Args:
        tokens: The tree's, [requests, nodes] int64.
        parents: The tree's, [requests, nodes] int64.
        targets: [requests, nodes] int64. What the target chose after each node, the largest of its logits.
        steps: The depth of the tree.

    Raises:
        ValueError: The three are not of one shape, [requests, nodes].
    """
    if parents.dim() != 2:  # noqa: PLR2004 - requests and nodes
        raise ValueError(f"parents: expected [requests, nodes], got shape {list(parents.shape)}")
    _check_shape("tokens", tokens, parents.shape)
    _check_shape("targets", targets, parents.shape)
    path = [torch.zeros_like(targets[:, :1])]
    for _ in range(steps):
        node = path[-1]
        right = (parents == node) & (tokens == targets.gather(1, node))
        path.append(torch.where(right.any(1, keepdim=True), right.int().argmax(1, keepdim=True), node))
    nodes = torch.cat(path, dim=1)
    return Accepted((nodes[:, 1:] != nodes[:, :-1]).sum(1), nodes, targets.gather(1, nodes))


def _check_shape(name: str, value: torch.Tensor, wanted: torch.Size) -> None:
    """Raise ValueError if a value is not a tensor of this shape."""
    if not isinstance(value, torch.Tensor) or value.shape != wanted:
        got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name}: expected a tensor of shape {list(wanted)}, got {got}")


def _sound(shares: torch.Tensor) -> torch.Tensor:
    """Clamp probabilities to 0 and 1. Larger ones, or NaN, could put a child before its parent."""
    return torch.nan_to_num(shares, nan=0.0).clamp(0.0, 1.0)


def _counting(like: torch.Tensor) -> torch.Tensor:
    """Return the indices in each row, from 0, as int64."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
