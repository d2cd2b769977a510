"""Batches that are mappings: they are asked, never changed, and what is missing in them is missing."""

import collections
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, copied, side
from slotgraph.backends.registry import choose
from slotgraph.errors import MissingSourceError

Pairs = Mapping[str, Any]


def made() -> torch.Tensor:
    """What a factory makes of nothing: a tensor that would fit."""
    return torch.tensor([7, 7])


class Counted(collections.UserDict[str, Any]):
    """Makes what it lacks and keeps it, as `defaultdict` does."""

    def __missing__(self, key: str) -> torch.Tensor:
        """Make it."""
        self.data[key] = made()
        return self.data[key]  # type: ignore[no-any-return]


class Eager(dict[str, Any]):
    """The same of a plain dict."""

    def __missing__(self, key: str) -> torch.Tensor:
        """Make it."""
        self[key] = made()
        return self[key]  # type: ignore[no-any-return]


class Plain(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = dict(pairs)

    def __getitem__(self, key: str) -> Any:
        """What it has."""
        return self._pairs[key]

    def __iter__(self) -> Iterator[str]:
        """Its names."""
        return iter(self._pairs)

    def __len__(self) -> int:
        """How many."""
        return len(self._pairs)


KINDS: dict[str, Callable[[Pairs], Pairs]] = {
    "defaultdict": lambda pairs: collections.defaultdict(made, pairs),
    "counter": collections.Counter,
    "user": lambda pairs: Counted(dict(pairs)),
    "missing": Eager,
    "chain": lambda pairs: collections.ChainMap(dict(pairs)),
    "plain": Plain,
    "proxy": types.MappingProxyType,
}


class Nested(Inputs):
    """Sources of every way in which a batch is read: by name, nested, beside the batch, by a field, and optional."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    deep: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source="inner.deep")
    given: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=side("outer.given"))
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    scale: int = 3
    scaled: torch.Tensor = computed(lambda scale: scale, shape=1, dtype=torch.int64)


def total(view: Nested) -> torch.Tensor:
    """A number of all sources, another where the optional one is there."""
    rows = (view.ids + view.more + view.deep + view.given) * view.scaled
    return rows if view.extra is None else rows + 1000


def batch_of(kind: Callable[[Pairs], Pairs]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that a batch must have, and what comes beside it."""
    values = {name: torch.tensor([1, 2]) * 10**place for place, name in enumerate(("ids", "more", "deep", "given"))}
    batch = {"ids": values["ids"], "more": values["more"], "inner": kind({"deep": values["deep"]})}
    return batch, {"outer": kind({"given": values["given"]})}


class Flat(Inputs):
    """Sources by their names alone, which are read in one go."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def runners(inputs: type[Inputs], step: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """One of each lowering, and eager ones."""
    absent = [{"extra"}] if inputs is Nested else []
    for lowering in choose("cpu").capabilities.lowerings:
        runner = DecodeRunner(inputs, step, buckets=[4], absent=absent, backend="cpu-capture", lowering=lowering)
        runner.capture()
        yield lowering, runner
    yield "eager", EagerRunner(inputs, step, backend="cpu")
    yield "no copy", EagerRunner(inputs, step, backend="cpu", no_copy=True)


@pytest.mark.parametrize("name", KINDS)
def test_a_mapping_is_asked_and_not_changed(name: str) -> None:
    """Each kind of mapping gives what it has; what it lacks is missing, whichever part lacks it; no key is added."""
    kind = KINDS[name]
    for how, runner in runners(Nested, total):
        pairs, beside = batch_of(kind)
        batch = kind(pairs)
        keys = set(batch), set(pairs["inner"]), set(beside["outer"])
        for _ in range(3):
            assert runner(batch, **beside).tolist() == [3333, 6666], how
        for lacking in ("ids", "more"):
            short = kind({key: value for key, value in pairs.items() if key != lacking})
            with pytest.raises(MissingSourceError, match=lacking):
                runner(short, **beside)
            assert set(short) == keys[0] - {lacking}, how
        with pytest.raises(MissingSourceError, match="deep"):
            runner(kind({**pairs, "inner": kind({"other": 1})}), **beside)
        with pytest.raises(MissingSourceError, match="given"):
            runner(batch, outer=kind({"other": 1}))
        assert (set(batch), set(pairs["inner"]), set(beside["outer"])) == keys, how
        assert runner(batch, **beside).tolist() == [3333, 6666], how


@pytest.mark.parametrize("name", KINDS)
def test_names_that_are_read_in_one_go(name: str) -> None:
    """The same of a declaration whose sources are all looked up by name, and of the source that tells the size."""
    kind, values = KINDS[name], {"ids": torch.tensor([1, 2]), "more": torch.tensor([10, 20])}
    for how, runner in runners(Flat, lambda view: view.ids + view.more):
        for _ in range(3):
            assert runner(kind(values)).tolist() == [11, 22], how
        for lacking in values:
            short = kind({key: value for key, value in values.items() if key != lacking})
            for _ in range(2):
                with pytest.raises(MissingSourceError, match=lacking):
                    runner(short)
            assert set(short) == set(values) - {lacking}, how
        assert runner(kind(values)).tolist() == [11, 22], how
