"""The stand-in's streams and events: order within a stream, none between streams without an event."""

import threading
import time
from typing import Any

import pytest
import torch

from tests.npu.programs import output

both = pytest.mark.modes("eager", "lazy")
only_lazy = pytest.mark.modes("lazy")


@only_lazy
def test_a_stream_that_does_not_wait_reads_what_was_there(npu: Any) -> None:
    """Without the wait the reader runs first: the missing dependency is seen."""
    side, values = npu.Stream(), torch.randint(1, 100, (5,)).to("npu")
    made = torch.full_like(values, -1)
    npu.synchronize()
    with npu.stream(side):
        torch.add(values, values, out=made)
    read = made + 0
    npu.current_stream().synchronize()
    assert read.tolist() == [-1] * 5
    npu.synchronize()


@only_lazy
def test_an_event_is_complete_once_its_stream_has_come_to_it(npu: Any) -> None:
    """Each query lets the stream take a step; none says that work is done which has not run."""
    tensor, event = torch.zeros(4, device="npu"), npu.Event()
    npu.synchronize()
    for _ in range(3):
        tensor.add_(1)
    event.record()
    answers, pause = [event.query()], threading.Event()
    while not answers[-1] and len(answers) < 10_000:  # torch_npu's own queue, a thread, answers the first ones
        pause.wait(0.0005)
        answers.append(event.query())
    assert not answers[0]
    assert answers[-1]
    assert tensor.tolist() == [3.0] * 4


@only_lazy
def test_a_query_makes_no_progress_where_that_is_asked_for() -> None:
    """With STANDIN_NO_PROGRESS a loop over queries would never end, as on a device that is busy elsewhere."""
    source = """
        import torch, torch_npu
        tensor, event = torch.zeros(4, device="npu"), torch.npu.Event()
        torch.npu.synchronize()
        tensor.add_(1)
        event.record()
        print(any(event.query() for _ in range(1000)))
        event.synchronize()
        print(event.query())
    """
    assert output(source, STANDIN_LAZY="1", STANDIN_NO_PROGRESS="1").split()[-2:] == ["False", "True"]


def test_two_devices_keep_their_tensors_apart() -> None:
    """A second device has its own memory and default stream."""
    source = """
        import torch, torch_npu
        first, second = torch.ones(3, device="npu:0"), torch.full((3,), 2.0, device="npu:1")
        print(torch.npu.device_count(), first.device, second.device, first.tolist(), second.tolist())
    """
    last = output(source, STANDIN_NPU_COUNT="2").splitlines()[-1]
    assert last == "2 npu:0 npu:1 [1.0, 1.0, 1.0] [2.0, 2.0, 2.0]"


@only_lazy
def test_a_wait_is_for_the_record_before_it(npu: Any) -> None:
    """An event that is recorded anew elsewhere does not change what an earlier wait waits for."""
    first, second, reader, event = npu.Stream(), npu.Stream(), npu.Stream(), npu.Event()
    values = torch.randint(1, 100, (5,)).to("npu")
    made = torch.full_like(values, -1)
    npu.synchronize()
    with npu.stream(first):
        torch.add(values, values, out=made)
        event.record()
    event.wait(reader)
    event.record(second)
    with npu.stream(reader):
        read = made + 0
    reader.synchronize()
    assert torch.equal(read.cpu(), values.cpu() * 2)


@both
def test_the_time_between_events_is_told_once_both_have_come(npu: Any) -> None:
    """Later is later, in milliseconds."""
    start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    begin = time.perf_counter_ns()
    start.record()
    torch.ones(3, device="npu").add_(1)
    end.record()
    npu.synchronize()
    assert 0 <= start.elapsed_time(end) <= (time.perf_counter_ns() - begin) / 1e6 + 1
