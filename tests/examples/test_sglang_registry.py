"""The drop-in for SGLang's buffer registry, beside the original in one process: the wheel's own modules."""

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from slotgraph.errors import BatchError
from tests.examples.demo import module
from tests.packing import backend_of

OURS: Final = "registry.cuda_graph_buffer_registry"
CPU: Final = torch.device("cpu")
by_case = pytest.mark.parametrize("case", [*module("registry.batches").CASES])


@pytest.fixture(scope="module")
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SGLang's own modules, from the wheel that the environment names, or that pip downloads once."""
    wheels, cache = module("registry.original"), getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("sglang") if cache is None else cache.mkdir("sglang")
    try:
        wheel = wheels.find_wheel(None, folder)
    except wheels.NoWheelError as error:
        pytest.skip(str(error))
    with wheels.loaded(wheel) as found:
        yield found


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the slots are."""
    return backend_of(request.param).device


@by_case
def test_every_byte_is_the_originals(original: Any, device: torch.device, case: str) -> None:
    """Random batches, whole and in parts, over poisoned slots: the same bytes everywhere, and the same views."""
    assert module("registry.batches").compare(case, original, module(OURS), device, 200) == []


def test_every_byte_is_the_originals_in_ten_thousand_batches(original: Any) -> None:
    """The same, in 10,000 batches over all builders."""
    batches = module("registry.batches")
    for name in batches.CASES:
        assert batches.compare(name, original, module(OURS), CPU, 10_000 // len(batches.CASES) + 1, seed=1) == []


@pytest.mark.parametrize("case", ["decode", "decode, every slot", "prefill, every slot", "slots of one's own"])
@pytest.mark.parametrize("backend", ["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_fills_in_graphs_leave_the_originals_bytes(original: Any, backend: str, case: str) -> None:
    """A graph that begins with the fill does it at its replay; a batch that lacks other slots is filled at once."""
    batches, made = module("registry.batches"), backend_of(backend)
    game = batches.Game(batches.CASES[case], original, module(OURS), made.device, 3)
    registry, graphs = game.registries[1], dict[tuple[int, int], Any]()
    registry.backend, registry.lowering = made, "in_graph"

    def replay(step: Any) -> None:
        given = {name: step.sizes[name] for name in ("padded_bs", "padded_num_tokens")}
        key = registry._fills._key(tuple(given.values()))  # sizes of an axis without padding make no other fill
        if key in graphs:
            graphs[key].replay()
        elif len(graphs) < 6:
            kept = {name: registry.get_slot(name).buffer.clone() for name in registry.slot_names()}
            registry.fill_in_graph(**given, forward_batch_template=step.batch)
            with made.stream():
                made.synchronize()
                graphs[key] = made.capture(lambda: registry.fill_in_graph(**given, forward_batch_template=step.batch))
            for name, tensor in kept.items():
                registry.get_slot(name).buffer.copy_(tensor)

    assert list(game.play(300, replay)) == []
    lowered = registry._fills.buffers.stats()["lowerings"]
    assert lowered.get("in_graph", 0) > 5, lowered


def no_resets(monkeypatch: pytest.MonkeyPatch, ours: Any) -> None:
    """No slot is padded."""
    monkeypatch.setattr(ours.GraphSlot, "resets", False)


def no_hooks(monkeypatch: pytest.MonkeyPatch, ours: Any) -> None:
    """Slots that are filled by hand are left out."""
    monkeypatch.setattr(ours, "fill_by_hand", lambda *_: None)


def no_early_copies(monkeypatch: pytest.MonkeyPatch, ours: Any) -> None:
    """Slots that are written early are not."""
    monkeypatch.setattr(ours.CudaGraphBufferRegistry, "copy_slots", lambda *_: None)


def nothing_skipped(monkeypatch: pytest.MonkeyPatch, ours: Any) -> None:
    """Slots that are skipped are written."""
    monkeypatch.setattr(ours.Fills, "_part", lambda *_, **__: {})


def all_shown(monkeypatch: pytest.MonkeyPatch, ours: Any) -> None:
    """The whole buffers are in the extracted batch."""
    monkeypatch.setattr(ours.GraphSlot, "slice_for", lambda self, *_: self.buffer)


@pytest.mark.parametrize("plant", [no_resets, no_hooks, no_early_copies, nothing_skipped, all_shown])
def test_what_is_planted_is_found(original: Any, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    """Each fault makes a difference in one of the games."""
    batches, ours = module("registry.batches"), module(OURS)
    plant(monkeypatch, ours)
    assert any(batches.compare(name, original, ours, CPU, 100) for name in ("decode", "slots of one's own"))


def test_it_has_the_originals_names(original: Any) -> None:
    """Each public name is there, with the same fields, members, methods and parameters, and may have more."""
    ours, theirs = module(OURS), original.registry
    public = [
        name
        for name, one in vars(theirs).items()
        if not name.startswith("_") and getattr(one, "__module__", None) == theirs.__name__
    ]
    assert len(public) == 8
    for name in public:
        right, mine = getattr(theirs, name), getattr(ours, name)
        if not inspect.isclass(right):
            assert parameters(mine) == parameters(right), name
            continue
        if issubclass(right, enum.Enum):
            assert {one.name: one.value for one in mine} == {one.name: one.value for one in right}
        if dataclasses.is_dataclass(right):
            assert defaults(mine) == defaults(right)
        for method, function in vars(right).items():
            if inspect.isfunction(function) and not method.startswith("_") and not issubclass(right, enum.Enum):
                assert parameters(getattr(mine, method)) == parameters(function), (name, method)


def parameters(function: Any) -> list[tuple[str, Any]]:
    """The parameters of a function, each with its kind."""
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


def defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass, with their defaults."""
    return {field.name: getattr(field.default, "name", field.default) for field in dataclasses.fields(kind)}


def test_reset_slots_are_those_that_a_recapture_resets(original: Any) -> None:
    """Slots whose padding is zeroed are those that SGLang zeroes before it captures again."""
    registry = module("registry.batches").CASES["decode, every slot"].make(module(OURS), None, CPU)
    zero = {name for name in registry.slot_names() if registry.get_slot(name).padding_policy.name == "ZERO"}
    assert zero == original.inputs.INDEX_SEMANTIC_BUFFERS & {*registry.slot_names()}


def test_runners_share_the_originals_pool(original: Any) -> None:
    """Slots of one name and size are one memory, also beside SGLang's own registry."""
    batches, ours = module("registry.batches"), module(OURS)
    make = batches.CASES["eager"].make
    one, other = make(ours, None, CPU), make(original.registry, None, CPU)
    for name in one.slot_names():
        assert one.get_slot(name).buffer.data_ptr() == other.get_slot(name).buffer.data_ptr()


def test_the_program_compares_and_times(original: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which registries are equal, and prints a line for each kind of sizes; a difference ends it with 1."""
    program, timing = module("registry.program"), module("registry.timing")
    assert program.run(original, module(OURS), CPU, 90, 1) == 0
    out = capsys.readouterr().out
    assert out.count("\nequal, ") + 1 == len(module("registry.batches").CASES)
    assert [row.name for row in timing.rows(CPU) if f"\n{row.name}  " not in out] == []


def test_a_difference_ends_the_program(
    original: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first difference is named."""
    no_resets(monkeypatch, module(OURS))
    assert module("registry.program").run(original, module(OURS), CPU, 900, 0) == 1
    assert "DIFFERENT, decode: batch " in capsys.readouterr().out


def test_what_cannot_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel or a backend that is not there ends the program with a sentence and status 2."""
    program, wheels = module("registry.program"), module("registry.original")
    assert program.main(["--wheel", str(tmp_path / "none.whl")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert program.main(["--backend", "no-such"]) == 2
    assert "no backend 'no-such'" in capsys.readouterr().err
    monkeypatch.delenv(wheels.VARIABLE, raising=False)
    with pytest.raises(wheels.NoWheelError, match="pip download"):
        wheels.find_wheel(None)
    monkeypatch.setattr(wheels.sys, "executable", "false")
    with pytest.raises(wheels.NoWheelError, match="cannot be downloaded"):
        wheels.find_wheel(None, tmp_path)


def small(**options: Any) -> Any:
    """A registry of two slots, which needs no SGLang."""
    ours = module(OURS)
    made = ours.CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    policy = ours.PaddingPolicy.ZERO
    made.register_slot(ours.GraphSlot("input_ids", lambda _, most: (most,), torch.int64, padding_policy=policy))
    made.register_slot(ours.GraphSlot("seq_lens", lambda most, _: (most,), torch.int32, "bs", **options))
    return made


def fill(registry: Any, **given: Any) -> None:
    """Fill it from a batch of two requests of five tokens."""
    batch = module("registry.batches").ForwardBatch(batch_size=2, **given)
    registry.fill_from(batch, raw_bs=2, padded_bs=3, raw_num_tokens=5, padded_num_tokens=6)


def test_slots_that_cannot_be_registered_are_refused() -> None:
    """Names, memory and axes that do not fit are refused as the original refuses them."""
    ours, registry = module(OURS), small(enabled=False)
    assert registry.slot_names() == ["input_ids"]
    assert not registry.has_slot("seq_lens")
    assert registry.get_slot("seq_lens").buffer is None
    with pytest.raises(ValueError, match="registered already"):
        registry.register_slot(ours.GraphSlot("input_ids", lambda *_: (1,), torch.int64))
    with pytest.raises(ValueError, match="axis is"):
        ours.GraphSlot("other", lambda *_: (1,), torch.int64, "rows")
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="bind tensor for slot 'other'"):
            registry.register_slot(ours.GraphSlot("other", lambda *_: (4,), torch.float32), wrong)
    sentinel = small(padding_policy=ours.PaddingPolicy.FILL_SENTINEL)
    with pytest.raises(RuntimeError, match="needs a pad_value"):
        fill(sentinel, seq_lens=torch.ones(2, dtype=torch.int32))


def test_what_the_original_lets_pass_is_refused() -> None:
    """The differences that README.md lists: other rows than the batch says, broadcasts, fractions for whole numbers."""
    registry = small()
    ids, lens = torch.arange(5), torch.ones(2, dtype=torch.int32)
    fill(registry, input_ids=ids, seq_lens=lens)
    before = registry.get_slot("input_ids").buffer.clone()
    for wrong in ({"input_ids": ids[:1], "seq_lens": lens}, {"input_ids": ids + 0.5, "seq_lens": lens}):
        for _ in range(3):  # whether sizes are seen for the first time or not
            with pytest.raises(BatchError, match="slot 'input_ids'"):
                fill(registry, **wrong)
    assert registry.get_slot("input_ids").buffer.equal(before)


def test_a_slot_comes_before_the_first_graph() -> None:
    """Slots that are registered later are filled, too, but not once a graph begins with the fill."""
    ours, registry = module(OURS), small()
    registry.backend = "cpu-capture"
    fill(registry, input_ids=torch.arange(5), seq_lens=torch.ones(2, dtype=torch.int32))
    late = registry.register_slot(ours.GraphSlot("positions", lambda _, most: (most,), torch.int64))
    fill(registry, input_ids=torch.arange(5), positions=torch.arange(5))
    assert late.buffer.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    template = module("registry.batches").ForwardBatch(input_ids=torch.arange(6))
    registry.fill_in_graph(padded_bs=3, padded_num_tokens=6, forward_batch_template=template)
    with pytest.raises(RuntimeError, match="before the first fill_in_graph"):
        registry.register_slot(ours.GraphSlot("rows", lambda *_: (1,), torch.int64))


def test_extracted_batches_are_replaced_as_dataclasses_do() -> None:
    """Classes that only store their arguments take a short way, others the constructor; both give the same."""
    ours = module(OURS)

    @dataclasses.dataclass
    class Plain:
        ids: Any = None
        size: int = 0

    @dataclasses.dataclass
    class Checked(Plain):
        def __post_init__(self) -> None:
            self.size += 1

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        ids: Any = None

    for batch in (Plain(1, 2), Checked(1, 2), Frozen(1)):
        assert ours.replaced(batch, {"ids": 5}) == dataclasses.replace(batch, ids=5)
    noted = Plain(1, 2)
    noted.note = "not a field"  # type: ignore[attr-defined] # as engines do
    made = ours.replaced(noted, {"ids": 5})
    assert vars(made) == {"ids": 5, "size": 2}
    with pytest.raises(TypeError, match="other"):
        ours.replaced(noted, {"other": 5})
