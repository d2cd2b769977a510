"""Speculative decoding by three captured steps: equal to plain greedy decoding, whatever the tree, and quicker."""

import contextlib
import importlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, computed, copied, keep
from slotgraph.backends import load
from slotgraph.speculative import WIDTH
from tests.examples.demo import NEEDS, Module

pytest.importorskip("transformers", reason=NEEDS)

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "speculative"
QUICK = ("--requests", "4", "--max-new-tokens", "12", "--buckets", "2,3")
SHORTER = ("--requests", "8", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def speculating() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"speculating.{name}")
    sys.path.remove(str(FOLDER))


def served(speculating: Module, *argv: str, **seams: Any) -> tuple[int, str]:
    """Run the program: its exit status, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = speculating("program").serve(speculating("options").parse(argv), **seams)
    return status, out.getvalue()


def acceptance(out: str) -> tuple[float, dict[int, int]]:
    """The mean acceptance length and the histogram, as they were printed."""
    found = re.search(r"^acceptance +([\d.]+) tokens a verify", out, re.MULTILINE)
    assert found is not None
    counts = {int(length): int(count) for length, count in re.findall(r"^  length (\d+) +(\d+)", out, re.MULTILINE)}
    return float(found[1]), counts


@pytest.mark.parametrize("backend", ["cpu-capture", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_token_equals_generate(speculating: Module, backend: str) -> None:
    """The default tree, over requests that come and go, makes generate()'s tokens, several a verify."""
    available = load(backend).is_available()
    if not available:
        pytest.skip(f"{backend}: {available.reason}")
    status, out = served(speculating, "--backend", backend, "--time", *SHORTER)
    assert (status, out.splitlines()[-1]) == (0, "equality         every token is the one that generate() chose")
    mean, counts = acceptance(out)
    trees = sum(counts.values())
    assert mean > 1.5
    assert abs(mean - sum(length * count for length, count in counts.items()) / trees) < 0.01
    assert len(counts) == max(counts) > 3
    assert "tree             3 wide, 4 deep; 10 nodes are verified" in out
    assert re.search(
        r"^inputs +[\d.]+ us of the host's time a cycle: draft [\d.]+, verify [\d.]+, ext", out, re.MULTILINE
    )
    assert re.findall(r"(draft|verify|extend) +\d+ steps from graphs, (\d+) eagerly", out) == [
        ("draft", "0"),
        ("verify", "0"),
        ("extend", "0"),
    ]


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (2, 1, 3), (2, 2, 1), (4, 3, 37), (3, 2, 5)], ids=str)
def test_any_tree(speculating: Module, topk: int, steps: int, nodes: int) -> None:
    """Chains, trees one deep, trees of the root alone and whole ones win more tokens or fewer, and change none."""
    shape = ("--topk", str(topk), "--steps", str(steps), "--draft-tokens", str(nodes), "--seed", str(nodes))
    status, out = served(speculating, *QUICK, *shape)
    assert status == 0
    mean, counts = acceptance(out)
    assert max(counts) <= 1 + min(steps, nodes - 1)
    assert (mean > 1) == (nodes > 1)


def test_a_wider_tree_wins_more(speculating: Module) -> None:
    """Branches are worth their while: with more of them a verify accepts more."""
    sizes = [("--topk", "1", "--draft-tokens", "5"), ("--topk", "3", "--draft-tokens", "16")]
    chain, tree = (acceptance(served(speculating, *QUICK, *size)[1])[0] for size in sizes)
    assert tree > chain


def everything(parents: torch.Tensor) -> torch.Tensor:
    """A mask that hides nothing."""
    return (parents[:, :, None] > -2).expand(-1, -1, parents.shape[1])


def wrong_declarations(speculating: Module) -> dict[str, Any]:
    """Declarations of a verify, each with one fault."""
    base: Any = speculating("inputs").VerifyInputs

    class Unmasked(base):  # type: ignore[misc]
        tree_mask: torch.Tensor = computed(everything, shape=(BATCH, WIDTH, WIDTH), dtype=torch.bool)

    class StaleRows(base):  # type: ignore[misc]
        out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=keep("no one reads what padded rows write"))
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("they run on any positions"))

    return {"mask": Unmasked, "tail": StaleRows}


@pytest.mark.parametrize("fault", ["mask", "tail"])
def test_a_fault_is_found(speculating: Module, fault: str) -> None:
    """A mask that shows a node its siblings, and padded rows that write where others' keys are, end with status 1."""
    status, out = served(speculating, *SHORTER, "--buckets", "6", verify=wrong_declarations(speculating)[fault])
    assert status == 1
    assert re.search(
        r"^DIFFERENT from generate\(\): request \d+, generated token \d+: expected \[\d+\], got \[", out, re.MULTILINE
    )


def test_what_cannot_run_is_told(speculating: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """A tree that no draft fills, and a backend that is not here, end with a sentence and status 2."""
    main = speculating("program").main
    assert main(["--topk", "2", "--steps", "2", "--draft-tokens", "8"]) == 2
    assert main(["--backend", "no-such"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "speculative: --draft-tokens 8: --topk 2 and --steps 2 draft 7 nodes"
    assert second.startswith("speculative: there is no backend 'no-such'")


def test_the_folder_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python docs/examples/speculative` takes options and exits with what it found."""
    monkeypatch.setattr(sys, "argv", ["speculative", "--requests", "1", "--max-new-tokens", "4", "--buckets", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER), run_name="__main__")
    assert ended.value.code == 0
    assert "requests         1" in capsys.readouterr().out
