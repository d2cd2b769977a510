"""A layer as a step: it takes a tensor, and gets a view; the error says so, and how to wrap it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.errors import CaptureError
from tests.runners.models import ready


class Images(Inputs):
    pixels: torch.Tensor = copied(BATCH, 4, dtype=torch.float32, pad=0)
    labels: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


SAID = r"the view went into a layer as if it were a tensor: wrap it, `lambda view: module\(view\.pixels\)`"
LAYERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "Flatten": nn.Flatten,
    "Linear": lambda: nn.Linear(4, 2),
    "Sequential": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU()),
    "ReLU": nn.ReLU,
    "Conv1d": lambda: nn.Conv1d(1, 1, 1),
    "Embedding": lambda: nn.Embedding(4, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "Softmax": lambda: nn.Softmax(-1),
    "function": lambda: torch.relu,
    "list": lambda: lambda view: torch.cat([view, view]),
    "method": lambda: lambda view: view.reshape(-1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_gets_the_view_is_refused(name: str) -> None:
    """A layer or a function of torch that gets the view itself is refused, and works when it is wrapped."""
    layer, batch = LAYERS[name](), {"pixels": torch.rand(3, 4), "labels": torch.arange(3)}
    with pytest.raises((TypeError, AttributeError), match=SAID):
        EagerRunner(Images, layer, backend="cpu")(batch)
    with pytest.raises(CaptureError, match=SAID):
        ready(DecodeRunner(Images, layer, buckets=[4], backend="cpu-capture"))


def test_a_wrapped_layer_works() -> None:
    """What the message says works."""
    module, pixels = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.rand(3, 4)
    runner = ready(DecodeRunner(Images, lambda view: module(view.pixels), buckets=[4], backend="cpu-capture"))
    with torch.no_grad():
        torch.testing.assert_close(runner({"pixels": pixels, "labels": torch.arange(3)}), module(pixels))


def test_a_name_that_no_tensor_has_is_not_taken_for_a_layers() -> None:
    """A name that is no tensor's is not taken for a layer's."""

    def misspelt(view: Any) -> Any:
        return view.pixel

    with pytest.raises(AttributeError, match=r"^'Images' has no slot or field 'pixel'; did you mean 'pixels'\?$"):
        EagerRunner(Images, misspelt, backend="cpu")({"pixels": torch.rand(3, 4), "labels": [1, 2, 3]})
