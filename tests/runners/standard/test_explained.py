"""`slotgraph explain` prints standard declarations by their name at the face."""

import json

import pytest
from typer.testing import CliRunner

from slotgraph.runners.commands.app import app
from tests.runners.standard.batches import CLASSES


def explained(*arguments: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["explain", *arguments, "--backend", "cpu"])
    assert done.exit_code == 0, done.output
    return done.output


def test_plan_of_a_width() -> None:
    """The width is given once: WIDTH and TOKENS follow from it."""
    sizes = [f"--size={name}" for name in ("batch=3/4", "hidden=4", "vocab=5", "front=1")]
    where = "slotgraph:standard.MultiLayerDraftExtendInputs"
    found = json.loads(explained(where, *sizes, "--width", "3", "--format", "json"))
    padded = {slot["name"]: slot["padded"] for slot in found["slots"]}
    assert (padded["hidden_states"], padded["select_index"]) == ([12, 4], [4])
    assert {axis["name"]: axis["padded"] for axis in found["axes"]}["WIDTH"] == 3


@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str) -> None:
    """Each of them is found, and shown."""
    assert explained(f"slotgraph:standard.{name}").startswith(f"{name} on cpu")
