"""External events and the update of a graph's host parameters, as the stand-in has them."""

from typing import Any

import pytest
import torch

both = pytest.mark.modes("eager", "lazy")
only_lazy = pytest.mark.modes("lazy")

BATCH, HEADS, KEY_HEADS, ROWS, WIDTH = 2, 4, 2, 8, 16
SCALE = 0.25
STANDS_STILL = "the graph waits for an event that nobody records"


class Attention:
    """Attention of one query row a sequence over the first `lengths` rows of each, eager and as a graph."""

    def __init__(self, npu: Any) -> None:
        self.query = torch.randn(BATCH, HEADS, 1, WIDTH)
        self.keys, self.values = torch.randn(2, BATCH, KEY_HEADS, ROWS, WIDTH)
        self.on_device = [tensor.to("npu") for tensor in (self.query, self.keys, self.values)]
        self.graph = npu.NPUGraph()

    def run(self, lengths: list[int]) -> torch.Tensor:
        """The operator whose lengths are host values."""
        made: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
            *self.on_device, num_heads=HEADS, num_key_value_heads=KEY_HEADS, input_layout="BNSD", scale=SCALE,
            actual_seq_lengths_kv=lengths,
        )[0]  # fmt: skip
        return made

    def capture(self, npu: Any) -> torch.Tensor:
        """Capture it with lengths that no test expects."""
        with npu.graph(self.graph, auto_dispatch_capture=True):
            return self.run([1, 1])

    def update(self, lengths: list[int]) -> None:
        """Give the graph's next replay its lengths."""
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])

    def expected(self, lengths: list[int]) -> torch.Tensor:
        """The same in plain torch."""
        made = torch.empty_like(self.query)
        for i, length in enumerate(lengths):
            keys, values = (
                whole[i, :, :length].repeat_interleave(HEADS // KEY_HEADS, 0) for whole in (self.keys, self.values)
            )
            made[i] = torch.softmax(self.query[i] @ keys.transpose(1, 2) * SCALE, -1) @ values
        return made


@pytest.fixture
def attention(npu: Any) -> Attention:
    """Random queries, keys and values."""
    return Attention(npu)


@both
def test_eager_attention_is_right(attention: Attention) -> None:
    """Not captured, the operator takes the lengths that it is given."""
    torch.testing.assert_close(attention.run([3, 8]).cpu(), attention.expected([3, 8]))


@both
def test_an_update_may_follow_its_replay(npu: Any, attention: Attention) -> None:
    """The graph waits inside for its update, so the host may launch first, as engines do to hide the update."""
    made = attention.capture(npu)
    attention.graph.replay()
    attention.update([5, 2])
    torch.testing.assert_close(made.cpu(), attention.expected([5, 2]))


@both
def test_a_replay_without_an_update_stands_still_and_says_so(npu: Any, attention: Attention) -> None:
    """What would hang a device is an error at the next wait, and the late update frees the stream."""
    made = attention.capture(npu)
    attention.update([4, 4])
    attention.graph.replay()
    attention.graph.replay()
    with pytest.raises(RuntimeError, match=STANDS_STILL):
        npu.synchronize()
    attention.update([6, 3])
    npu.synchronize()
    torch.testing.assert_close(made.cpu(), attention.expected([6, 3]))


@both
def test_an_external_event_serves_one_replay(npu: Any) -> None:
    """Waited for in a graph before anybody recorded it; each record lets one replay pass."""
    tensor, event, graph, other = torch.zeros(3, device="npu"), npu.ExternalEvent(), npu.NPUGraph(), npu.Stream()
    with npu.graph(graph):
        event.wait(npu.current_stream())
        event.reset(npu.current_stream())
        tensor.add_(1)
    for times in (1.0, 2.0):
        event.record(other)
        graph.replay()
        assert tensor.tolist() == [times] * 3
    graph.replay()
    with pytest.raises(RuntimeError, match=STANDS_STILL):
        npu.synchronize()
    event.record(other)
    npu.synchronize()
    assert tensor.tolist() == [3.0] * 3


@both
def test_an_update_needs_a_capture_that_was_made_for_it(npu: Any) -> None:
    """torch_npu says so itself."""
    tensor, graph = torch.zeros(3, device="npu"), npu.NPUGraph()
    with npu.graph(graph):
        tensor.add_(1)
    with pytest.raises(RuntimeError, match="does not support update"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1]}])
