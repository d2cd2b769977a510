"""Copies in groups: how the sources of a fill reach their destinations."""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import torch

Groups: TypeAlias = list[tuple[list[torch.Tensor], int, int]]
"""Destinations of each foreach call, and which sources: the first, and one past the last."""
Singles: TypeAlias = list[tuple[torch.Tensor, int]]
"""Destinations of plain copies, and which source."""
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name


def copy_all(groups: Groups, singles: Singles, sources: list[torch.Tensor] | tuple[Any, ...]) -> None:
    """Copy what a fill has ready."""
    for views, start, stop in groups:
        _FOREACH_COPY(views, sources[start:stop])
    for view, index in singles:
        view.copy_(sources[index])


def grouped(parts: Iterable[tuple[str, list[torch.Tensor]]], *, mixed: bool) -> tuple[Groups, Singles]:
    """Destinations in the order of their sources, part by part, each with how it is copied.

    mixed: whether one foreach call takes several parts, all of them in one row.
    """
    groups: Groups = []
    singles: Singles = []
    start = 0
    for how, views in parts:
        if how == "single":
            singles += [(view, start + i) for i, view in enumerate(views)]
        elif how == "foreach" and groups and mixed:
            groups[0][0].extend(views)
            groups[0] = (groups[0][0], 0, start + len(views))
        elif how == "foreach":
            groups.append((views, start, start + len(views)))
        start += len(views)
    lone = [(views[0], at) for views, at, _ in groups if len(views) == 1]
    return [group for group in groups if len(group[0]) > 1], singles + lone
