# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Never run: mypy and pyright hold that any runner's books are typed, and that a registry takes its metrics."""

from typing import Any, assert_type

from prometheus_client import REGISTRY

from slotgraph import DecodeRunner, EagerRunner, PrefillRunner
from slotgraph.runners.metrics import Collector, exposition
from slotgraph.runners.runner import Runner


def books_are_typed(decode: DecodeRunner[Any], prefill: PrefillRunner[Any], anyone: Runner[Any]) -> None:
    """Every key has its type, and an unknown one is none."""
    assert_type(decode.stats()["buckets"][4]["waste"], float)
    assert_type(prefill.stats()["eager"]["too_large"]["live"], int)
    assert_type(anyone.stats()["fills"]["buckets"][8]["mean"], float | None)
    assert_type(anyone.stats()["capture"]["failed"], dict[int, str])
    decode.stats()["bucketz"]  # type: ignore[typeddict-item]


def metrics_are_typed(decode: DecodeRunner[Any], eager: EagerRunner[Any]) -> None:
    """A collector is one to prometheus-client, and takes runners alone."""
    REGISTRY.register(Collector(decode=decode, extend=eager))
    assert_type(exposition(decode=decode), str)
    Collector(decode="decode")  # type: ignore[arg-type]
