"""A drop-in for `sglang.srt.model_executor.cuda_graph_buffer_registry` of SGLang 0.5.23, over `slotgraph.InputBuffers`.

Import its names from here, and the runners of SGLang do not change. See README.md for what differs.
"""

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch

from slotgraph import BATCH, TOKENS, Axis, InputBuffers, Inputs, copied, keep, staged
from slotgraph.backends import Backend
from slotgraph.errors import BatchError
from slotgraph.extend import side

Sizes: TypeAlias = dict[Axis, int]
NO_SLOTS: Final = frozenset[str]()
MOST_BUCKETS: Final = 256
"""The most padded sizes that fills are bound for. Batches of others are filled unpadded, and their tails reset here."""
AXES: Final = {"bs": BATCH, "tokens": TOKENS}
_WHOLE: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FRACTIONS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class PaddingPolicy(enum.Enum):
    """What a fill does with the rows of a slot behind the live ones.

    FILL_SENTINEL writes `pad_value` and ZERO writes 0 in each fill. The others leave these rows as they are: FILL_ONCE
    has written `pad_value` when the buffer was allocated.
    """

    KEEP_PAD = "keep_pad"
    FILL_SENTINEL = "fill_sentinel"
    ZERO = "zero"
    FOREACH_COPY = "foreach_copy"
    FILL_ONCE = "fill_once"


_RESETS: Final = (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)
"""The policies by which each fill writes padded rows."""


@dataclasses.dataclass
class FillContext:
    """The sizes of one fill, for `source_fn` and `post_fill`."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = None


SourceFunction: TypeAlias = Callable[[Any, FillContext], Any]
Hook: TypeAlias = Callable[[torch.Tensor, Any, FillContext], None]


@dataclasses.dataclass
class GraphSlot:
    """One buffer, which mirrors the attribute of a ForwardBatch that has its name.

    Attributes:
        name: The name of the attribute. A dotted name has a `source_fn`, and is not in the extracted batch.
        shape_fn: Takes the most requests and tokens, and returns the shape.
        dtype: The dtype.
        axis: What its rows are: "bs", "tokens", or "none" if the number of rows does not vary.
        device: Its device, if not the registry's.
        padding_policy: What becomes of padded rows.
        pad_value: What they hold, for FILL_SENTINEL and FILL_ONCE.
        enabled: Whether it is allocated, filled and extracted.
        copy_from_fb: Whether a fill copies the attribute.
        post_fill: Called after all copies, to write the buffer.
        slice_fn: Cuts the buffer to so many rows, if they do not lie along the first dim.
        source_fn: Returns what is copied in place of the attribute, to as many rows as it has. None: nothing.
        buffer: The memory.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    axis: str = "tokens"
    device: torch.device | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: Any = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: Hook | None = None
    slice_fn: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    source_fn: SourceFunction | None = None
    buffer: torch.Tensor | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown axis."""
        if self.axis not in (*AXES, "none"):
            raise ValueError(f"GraphSlot {self.name!r}: axis is 'bs', 'tokens' or 'none', got {self.axis!r}")

    @property
    def resets(self) -> bool:
        """Whether each fill writes padded rows."""
        return self.axis != "none" and self.padding_policy in _RESETS

    @property
    def is_made(self) -> bool:
        """Whether its value is made by a function or by the step, so that each extracted batch has it."""
        return self.post_fill is not None or self.source_fn is not None or not self.copy_from_fb

    def rows(self, requests: int, tokens: int) -> int:
        """Return the number of its rows in a batch of these sizes."""
        if self.axis == "none":
            return 0 if self.buffer is None else self.buffer.shape[0]
        return requests if self.axis == "bs" else tokens

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Return the rows that a step of these padded sizes reads."""
        if self.buffer is None:
            raise RuntimeError(f"GraphSlot {self.name!r} is disabled, and has no buffer")
        rows = self.rows(padded_bs, padded_num_tokens)
        if self.slice_fn is not None:
            return self.slice_fn(self.buffer, rows)
        return self.buffer if self.axis == "none" else self.buffer[:rows]

    def reset_padding(self, raw_n: int, padded_n: int) -> None:
        """Write the rows from `raw_n` to `padded_n` as the policy says."""
        if self.buffer is None or raw_n >= padded_n or self.padding_policy not in _RESETS:
            return
        if self.padding_policy is PaddingPolicy.ZERO:
            self.tail(self.buffer, raw_n, padded_n).zero_()
        elif self.pad_value is None:
            raise RuntimeError(f"GraphSlot {self.name!r}: FILL_SENTINEL needs a pad_value")
        else:
            self.tail(self.buffer, raw_n, padded_n).fill_(self.pad_value)

    def tail(self, buffer: torch.Tensor, raw_n: int, padded_n: int) -> torch.Tensor:
        """Return the rows from `raw_n` to `padded_n`."""
        if self.slice_fn is None:
            return buffer[raw_n:padded_n]
        cut = self.slice_fn(buffer, padded_n)
        return cut[..., raw_n:padded_n] if cut.dim() > 1 else cut[raw_n:padded_n]

    def reset_rows(self, raw: tuple[int, int], padded: tuple[int, int]) -> None:
        """Reset the padding of a batch. raw, padded: Its requests and tokens."""
        self.reset_padding(self.rows(*raw), self.rows(*padded))

    def copy(self, source: torch.Tensor, requests: int, tokens: int) -> None:
        """Copy a source to the live rows. One of `source_fn` decides itself how many these are."""
        if self.buffer is None:
            return
        if self.source_fn is not None:
            self.buffer[: source.shape[0]].copy_(source)
        else:
            self.slice_for(requests, tokens).copy_(source)


class CudaGraphBufferRegistry:
    """The inputs of captured steps at fixed addresses: register slots, then fill them from a batch in each step.

    Attributes:
        device: The device of the slots, but for those that name their own.
        max_bs: The most requests.
        max_num_tokens: The most tokens.
        share_pool: Whether slots share memory with slots of the same name and size in SGLang's pool.
        backend: The backend of slotgraph, or its name. Change it before the first fill, if at all.
        lowering: How slotgraph fills, or "auto". As above.
    """

    def __init__(
        self, *, device: torch.device | str, max_bs: int, max_num_tokens: int, share_pool: bool = False
    ) -> None:
        self.device = device
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.share_pool = share_pool
        self.backend: str | Backend = torch.device(device).type
        self.lowering = "auto"
        self._slots: dict[str, GraphSlot] = {}
        self._known_fills: Fills | None = None
        self._in_graph = False

    def register_slot(self, slot: GraphSlot, bind: torch.Tensor | None = None) -> GraphSlot:
        """Allocate a slot, or adopt a tensor for it, and return it.

        Raises:
            ValueError: The name is taken, or the tensor has another shape or dtype.
            RuntimeError: A graph begins with the fill of the slots before it.
        """
        if slot.name in self._slots:
            raise ValueError(f"GraphSlot {slot.name!r} is registered already")
        if self._in_graph:
            raise RuntimeError(f"register GraphSlot {slot.name!r} before the first fill_in_graph")
        if slot.enabled:
            slot.buffer = self._allocate(slot) if bind is None else bind
            shape = tuple(slot.shape_fn(self.max_bs, self.max_num_tokens))
            if tuple(slot.buffer.shape) != shape or slot.buffer.dtype != slot.dtype:
                got = f"{slot.buffer.dtype} of shape {tuple(slot.buffer.shape)}"
                slot.buffer = None
                raise ValueError(
                    f"bind tensor for slot {slot.name!r}: expected {slot.dtype} of shape {shape}, got {got}"
                )
        self._slots[slot.name] = slot
        self._known_fills = None
        return slot

    def _allocate(self, slot: GraphSlot) -> torch.Tensor:
        """Allocate a slot's memory, or take it from SGLang's pool, with its first contents."""
        shape, device = slot.shape_fn(self.max_bs, self.max_num_tokens), slot.device or self.device
        made = torch.zeros(shape, dtype=slot.dtype, device=device)
        if self.share_pool:
            from sglang.srt.model_executor.input_buffers import share_input_buffer  # noqa: PLC0415 - as seldom

            made = share_input_buffer(slot.name, made)
        first = (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        if slot.padding_policy in first and slot.pad_value is not None:
            made.fill_(slot.pad_value)
        return made

    def has_slot(self, name: str) -> bool:
        """Return whether a slot is registered and enabled."""
        return name in self._slots and self._slots[name].enabled

    def get_slot(self, name: str) -> GraphSlot:
        """Return a slot."""
        return self._slots[name]

    def slot_names(self) -> list[str]:
        """Return the names of all enabled slots."""
        return [name for name, slot in self._slots.items() if slot.enabled]

    @property
    def _fills(self) -> "Fills":
        """The fills of the slots that are registered now."""
        if self._known_fills is None:
            enabled = [slot for slot in self._slots.values() if slot.enabled]
            capacity = {BATCH: self.max_bs, TOKENS: self.max_num_tokens}
            self._known_fills = Fills(enabled, capacity, backend=self.backend, lowering=self.lowering)
        return self._known_fills

    def fill_from(
        self,
        forward_batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
        skip_slots: frozenset[str] = NO_SLOTS,
    ) -> None:
        """Copy a batch to the slots, reset their padding, and run the hooks. `skip_slots` stay as they are.

        Slots whose source is None, or no tensor, keep their live rows.
        """
        fills = self._known_fills or self._fills
        raw, padded = (raw_bs, raw_num_tokens), (padded_bs, padded_num_tokens)
        fills.fill(forward_batch, raw, padded, pp_proxy_tensors, skip_slots)

    def copy_slots(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors to the first rows of slots, by name, without padding and hooks.

        It runs on the current stream, and waits for no other. Sources that are the slot's own rows are not copied.
        """
        found = dict[tuple[torch.dtype, ...], tuple[list[torch.Tensor], list[torch.Tensor]]]()
        for name, source in sources.items():
            buffer = self._slots[name].buffer
            if buffer is None:
                raise RuntimeError(f"GraphSlot {name!r} is disabled, and has no buffer")
            target = buffer[: source.shape[0]]
            if not same_tensor_view(target, source):
                targets, alike = found.setdefault((target.dtype, source.dtype), ([], []))
                targets.append(target)
                alike.append(source)
        for targets, alike in found.values():
            torch._foreach_copy_(targets, alike)

    def extract_buffer(self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: Any) -> Any:
        """Return a copy of a batch whose attributes are the slots at these padded sizes.

        Attributes that are None stay None, unless a hook or a `source_fn` makes the slot's value.
        """
        fills = self._known_fills or self._fills
        views = fills.views((padded_bs, padded_num_tokens), forward_batch_template)
        views["batch_size"] = padded_bs
        return replaced(forward_batch_template, views)

    def fill_in_graph(self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: Any) -> None:
        """Record the device's part of a fill. Call it first in each captured step, and once before the capture.

        From then on `fill_from` leaves it to the replay, if the batch has the same slots as the template: replay next,
        and read slots on the device after it. Hooks, and slots that slotgraph does not fill, are not in it.
        `skip_slots` are still written if the last fill had other sizes.
        """
        self._fills.fill_in_graph(forward_batch_template, (padded_bs, padded_num_tokens))
        self._in_graph = True


class Fills:
    """The fills of a registry's slots: by slotgraph, and one by one for the few slots that its declarations do not fit.

    Attributes:
        buffers: The slots that slotgraph fills.
    """

    def __init__(self, slots: Sequence[GraphSlot], capacity: Sizes, **options: Any) -> None:
        """Declare the slots. options: The backend and the lowering."""
        declared = list[DeclaredSlot]()
        self._by_hand = list[GraphSlot]()
        for slot in slots:
            made = declare(slot, capacity)
            if made is not None:
                declared.append(made)
            elif slot.copy_from_fb or slot.resets or slot.post_fill is not None:
                self._by_hand.append(slot)
        self._declared = declared
        self._sourced = [(one.key, one.slot.source_fn) for one in declared if one.slot.source_fn is not None]
        self._has_context = bool(self._sourced or self._by_hand)
        copied = [one for one in declared if one.slot.copy_from_fb and one.slot.source_fn is None]
        self._reset_copies = [(one.key, one.slot) for one in copied if one.slot.resets]
        self._reset = [one.slot for one in declared if one.pads]
        # slots with a `source_fn` have rows of their own number, so that slotgraph does not know their padding
        self._padded_by_hand = [one.slot for one in declared if one.slot.resets and not one.pads]
        padded = {one.axis for one in declared if one.pads}
        self._on_requests, self._on_tokens = BATCH in padded, TOKENS in padded
        self._on_both = self._on_requests and self._on_tokens
        axes = {one.axis: one.rows for one in declared if one.axis is not None}
        self._gauges = [
            (axis, axis is BATCH, [(one.slot.name, one.dim) for one in copied if one.axis is axis])
            for axis in (BATCH, TOKENS)
            if axis in axes
        ]
        in_views = {one.key for one in declared if one.axis is None or one.axis in padded}
        self._shown = [
            (slot.name, slot, slot.name in in_views and slot.source_fn is None, slot.is_made)
            for slot in slots
            if "." not in slot.name
        ]
        self._buckets = dict[tuple[int, int], Any]()
        self._seen = set[tuple[int, int]]()
        self._captured = set[tuple[int, int]]()
        self._last: tuple[tuple[int, int] | None, Mapping[str, Any]] = None, {}
        self.buffers: InputBuffers[Any] | None = None
        if declared:
            body = {one.key: one.specifier for one in declared}
            space = {**body, "__annotations__": dict.fromkeys(body, Any), "__module__": __name__}
            kind: Any = types.new_class("RegisteredSlots", (Inputs,), {}, lambda own: own.update(space))
            bind = {one.key: one.slot.buffer for one in declared if one.slot.buffer is not None}
            self.buffers = InputBuffers(kind, axes, bind=bind, keep_bound=True, graphs_read_host_slots=False, **options)

    def fill(
        self, batch: Any, raw: tuple[int, int], padded: tuple[int, int], proxies: Any, skip: frozenset[str]
    ) -> None:
        """Fill all slots but those of `skip` from a batch. raw, padded: Its requests and tokens."""
        sizes = None
        if self._has_context:
            sizes = FillContext(raw[0], padded[0], raw[1], padded[1], proxies)
        for slot in self._padded_by_hand:
            if slot.name not in skip:
                slot.reset_rows(raw, padded)
        if self.buffers is not None:
            view = self._fill(self.buffers, batch, raw, padded, sizes, skip)
            if raw != padded:
                for slot in [slot for key, slot in self._reset_copies if view[key] is None]:
                    if slot.name not in skip:
                        slot.reset_rows(raw, padded)
        if self._by_hand and sizes is not None:
            by_hand = [slot for slot in self._by_hand if slot.name not in skip]
            fill_by_hand(by_hand, batch, sizes, raw, padded)

    def _fill(
        self,
        buffers: InputBuffers[Any],
        batch: Any,
        raw: tuple[int, int],
        padded: tuple[int, int],
        sizes: FillContext | None,
        skip: frozenset[str],
    ) -> Mapping[str, Any]:
        """Fill the slots that slotgraph fills, and return what they hold."""
        options: dict[str, Any] = {}
        for key, source_of in self._sourced:
            options[key] = source_of(batch, sizes)
        for axis, of_requests, gauges in self._gauges:
            rows = raw[0] if of_requests else raw[1]
            for name, dim in gauges:
                source = getattr(batch, name, None)
                if source is not None:
                    if source.shape[dim] != rows:
                        raise BatchError(f"slot {name!r}: the batch has {source.shape[dim]} rows on {axis}, not {rows}")
                    break
            else:
                options.setdefault("live", {})[axis] = rows
        key = padded if self._on_both else self._key(padded)
        bucket = self._buckets.get(key) or self._bucket(key)
        if skip:
            options |= self._part(skip, in_graph=key in self._captured)
        if bucket is not None:
            view = vars(bucket.fill(batch, **options))
            self._last = key, view
            return view
        if raw != padded:
            reset_together([slot for slot in self._reset if slot.name not in skip], raw, padded)
        view = vars(buffers.fill_unpadded(batch, **options))
        self._last = (key, view) if raw == padded else (None, {})
        return view

    def _part(self, skip: frozenset[str], *, in_graph: bool) -> dict[str, Any]:
        """Return the option of a fill that leaves some slots as they are.

        A graph's replay writes all slots but those that slotgraph knows to be skipped.
        """
        copied = [one for one in self._declared if one.slot.copy_from_fb]
        if in_graph:
            return {"skip": [one.key for one in copied if one.slot.name in skip]}
        return {"only": [one.key for one in copied if one.slot.name not in skip]}

    def _bucket(self, key: tuple[int, int]) -> Any:
        """Return the fills of padded sizes, from the second batch of these sizes on. None: fill it unpadded."""
        if key not in self._seen:
            if len(self._seen) >= MOST_BUCKETS:
                self._seen.clear()
            self._seen.add(key)
            return None
        return self._bound(key) if len(self._buckets) < MOST_BUCKETS else None

    def _bound(self, key: tuple[int, int]) -> Any:
        """Return the fills of padded sizes, bound to these."""
        if self.buffers is not None and key not in self._buckets:
            self._buckets[key] = self.buffers.at(self._sizes(key))
        return self._buckets.get(key)

    def _key(self, padded: tuple[int, int]) -> tuple[int, int]:
        """Return padded sizes, with 0 on an axis where no slot has padding."""
        return padded[0] if self._on_requests else 0, padded[1] if self._on_tokens else 0

    def _sizes(self, key: tuple[int, int]) -> Sizes:
        """Return padded sizes as slotgraph takes them. An axis without padding has its capacity."""
        found: Sizes = {}
        if self._on_requests:
            found[BATCH] = key[0]
        if self._on_tokens:
            found[TOKENS] = key[1]
        return found

    def fill_in_graph(self, template: Any, padded: tuple[int, int]) -> None:
        """Record the device's part of a fill of batches like a template."""
        if self.buffers is None:
            return
        key = self._key(padded)
        sizes = FillContext(padded[0], padded[0], padded[1], padded[1])
        absent = list[str]()
        for one in self._declared:
            slot = one.slot
            source = getattr(template, slot.name, None) if slot.source_fn is None else slot.source_fn(template, sizes)
            if slot.copy_from_fb and source is None:
                absent.append(one.key)
        bucket = self._bound(key)
        self.buffers.prepare(self._sizes(key), absent=absent)
        bucket.fill_in_graph(absent=absent)
        self._captured.add(key)

    def views(self, padded: tuple[int, int], template: Any) -> dict[str, Any]:
        """Return the slots at padded sizes by name, without those that the template does not have."""
        last, view = self._last
        is_last = last == (padded if self._on_both else self._key(padded))
        found: dict[str, Any] = {}
        for name, slot, is_viewed, is_made in self._shown:
            if is_made or getattr(template, name, None) is not None:
                tensor = view[name] if is_last and is_viewed else None
                found[name] = slot.slice_for(*padded) if tensor is None else tensor
        return found


def reset_together(slots: Sequence[GraphSlot], raw: tuple[int, int], padded: tuple[int, int]) -> None:
    """Reset the padding of some slots, of all that are zeroed in one call."""
    zeros = list[torch.Tensor]()
    for slot in slots:
        if slot.padding_policy is PaddingPolicy.ZERO and slot.buffer is not None:
            zeros.append(slot.tail(slot.buffer, slot.rows(*raw), slot.rows(*padded)))
        else:
            slot.reset_rows(raw, padded)
    if zeros:
        torch._foreach_zero_(zeros)


def fill_by_hand(
    slots: Sequence[GraphSlot], batch: Any, sizes: FillContext, raw: tuple[int, int], padded: tuple[int, int]
) -> None:
    """Fill slots one by one: reset all, copy all, then call the hooks."""
    for slot in slots:
        slot.reset_rows(raw, padded)
    for slot in slots:
        if slot.copy_from_fb:
            source = slot.source_fn(batch, sizes) if slot.source_fn else getattr(batch, slot.name, None)
            if isinstance(source, torch.Tensor):
                slot.copy(source, *raw)
    for slot in slots:
        if slot.post_fill is not None and slot.buffer is not None:
            slot.post_fill(slot.buffer, batch, sizes)


@attrs.frozen
class DeclaredSlot:
    """A slot as slotgraph fills it.

    Attributes:
        slot: The slot.
        key: Its name in the declaration.
        specifier: Its specifier.
        axis: The axis of its rows, or None if their number does not vary.
        dim: The dim of its rows.
        rows: The most rows.
        pads: Whether slotgraph resets its padding.
    """

    slot: GraphSlot
    key: str
    specifier: Any
    axis: Axis | None
    dim: int
    rows: int
    pads: bool


def declare(slot: GraphSlot, capacity: Mapping[Axis, int]) -> DeclaredSlot | None:
    """Declare a slot. Return None if fills leave it alone, or if it must be filled by hand."""
    buffer, key = slot.buffer, slot.name.replace(".", "__")
    if buffer is None or slot.post_fill is not None or not (slot.copy_from_fb or slot.resets):
        return None
    needs_number = slot.padding_policy is PaddingPolicy.FILL_SENTINEL and slot.pad_value is None
    if not (key.isidentifier() and buffer.is_contiguous() and buffer.dtype in (*_WHOLE, *_FRACTIONS)) or needs_number:
        return None
    dim = dim_of(slot, capacity)
    if dim is None:
        return None
    axis = AXES.get(slot.axis)
    if slot.source_fn is not None:
        axis = Axis(f"ROWS_OF_{key.upper()}") if buffer.shape[0] > 1 else None
    shape: list[Any] = list(buffer.shape)
    if axis is not None:
        shape[dim] = axis
    pads = slot.resets and slot.source_fn is None
    zero = torch.zeros((), dtype=slot.dtype).item()
    number = zero if slot.padding_policy is PaddingPolicy.ZERO else slot.pad_value
    given: dict[str, Any] = {
        "dtype": slot.dtype,
        "pad": number if pads else keep(f"its policy is {slot.padding_policy.name}, or the registry resets it"),
        "placement": "device" if slot.device is None or torch.device(slot.device).type != "cpu" else "host",
    }
    if not slot.copy_from_fb:
        return DeclaredSlot(slot, key, staged(*shape, **given), axis, dim, buffer.shape[dim], pads)
    alike = _FRACTIONS if slot.dtype.is_floating_point else _WHOLE
    given["converts"] = tuple(dtype for dtype in alike if dtype != slot.dtype)
    if slot.source_fn is not None:
        given["source"] = side(key)
    specifier = copied(*shape, **given, strided=True, default=None)
    return DeclaredSlot(slot, key, specifier, axis, dim, buffer.shape[dim], pads)


def dim_of(slot: GraphSlot, capacity: Mapping[Axis, int]) -> int | None:
    """Return the dim along which a slot's rows lie, 0 if they do not vary, or None if slotgraph has no such slots."""
    buffer = slot.buffer
    if buffer is None or not buffer.dim():
        return None
    if slot.source_fn is not None or slot.axis == "none":
        return 0 if slot.slice_fn is None else None
    dim = 0
    if slot.slice_fn is not None:
        like = torch.empty(buffer.shape, device="meta")
        none, one = slot.slice_fn(like, 0), slot.slice_fn(like, 1)
        cut = [place for place, rows in enumerate(none.shape) if rows == 0]
        is_first = one.dim() == like.dim() and one.storage_offset() == 0 and one.stride() == like.stride()
        if len(cut) != 1 or not is_first or cut[0] != buffer.dim() - 1:
            return None  # `reset_padding` takes the last dim
        dim = cut[0]
    return dim if buffer.shape[dim] == capacity[AXES[slot.axis]] else None


def same_tensor_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements in the same memory."""
    alike = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    return alike and a.data_ptr() == b.data_ptr()


def replaced(batch: Any, changes: dict[str, Any]) -> Any:
    """Return `dataclasses.replace(batch, **changes)`, in less time where its constructor only stores its arguments."""
    kind = type(batch)
    fields = _STORED.get(kind)
    if fields is None:
        fields = _STORED[kind] = _stored(kind)
    if fields:
        values = {**vars(batch), **changes}
        if len(values) == fields:
            made = kind.__new__(kind)
            made.__dict__ = values
            return made
    return dataclasses.replace(batch, **changes)


_STORED: Final[dict[type, int]] = {}
"""By class, how many fields its constructor stores, or 0 if it does more than that."""


def _stored(kind: Any) -> int:
    """Return the number of fields of a class whose constructor only stores them, else 0."""
    fields = dataclasses.fields(kind)
    is_plain = kind.__setattr__ is object.__setattr__ and kind.__new__ is object.__new__
    makes_more = hasattr(kind, "__post_init__") or hasattr(kind, "__slots__") or not kind.__dataclass_params__.init
    every = len(fields) == len(kind.__dataclass_fields__) and all(field.init for field in fields)
    return len(fields) if is_plain and every and not makes_more else 0


def build_decode_registry(  # noqa: PLR0913 - the original's
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_sharded_fn: Callable[[int], bool] = lambda _: False,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = True,
    share_pool: bool = True,
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """Return the registry of decode steps. With `source`, its attributes are adopted as the slots' memory."""
    made = CudaGraphBufferRegistry(device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool)
    zero, sentinel = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL
    whole, lens = torch.int64, {"padding_policy": sentinel, "pad_value": seq_len_fill_value}
    slots = [
        tokens("input_ids", whole),
        tokens("positions", whole, zero),
        tokens("out_cache_loc", cache_loc_dtype, zero),
        requests("req_pool_indices", whole, padding_policy=zero),
        requests("seq_lens", whole, **lens),
        requests("seq_lens_cpu", whole, device=torch.device("cpu"), **lens),
        mrope_positions(),
    ]
    if enable_mamba_track:
        slots.append(requests("mamba_track_indices", whole, padding_policy=zero))
        slots.append(requests("mamba_track_mask", torch.bool, padding_policy=zero))
    if is_encoder_decoder:
        once = {"padding_policy": PaddingPolicy.FILL_ONCE, "pad_value": encoder_len_fill_value}
        slots.append(requests("encoder_lens", encoder_lens_dtype, **once))
    if enable_num_token_non_padded:
        slots.append(count(decode_count_of(lambda size: not enable_prefill_cp and attn_tp_sharded_fn(size))))
    if register_global_num_tokens:
        ranks = num_dp_ranks if require_mlp_tp_gather else 1
        slots += padded_counts(ranks, is_written=require_gathered_buffer)
    register(made, slots, source, "decode")
    if source is not None:
        adopt_ngrams(made, getattr(source, "ngram_embedding_info", None))
        for key, buffer in (getattr(source, "pp_proxy_tensors", None) or {}).items():
            register_proxy(made, key, buffer, axis="none", padding_policy=PaddingPolicy.KEEP_PAD)
        for name in ("rids_int", "bootstrap_room_ids_int"):
            buffer = getattr(source, name, None)
            if buffer is not None:
                shape = tuple(buffer.shape)
                made.register_slot(GraphSlot(name, lambda *_, shape=shape: shape, buffer.dtype, "bs"), buffer)
    return made


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    attn_tp_sharded_fn: Callable[[int], bool] = lambda _: False,
    register_input_embeds: bool | None = None,
    share_pool: bool = True,
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """Return the registry of prefill steps, whose padding is executed. `input_embeds` is written by the model."""
    del require_gathered_buffer  # for callers: the original does not use it either
    made = CudaGraphBufferRegistry(device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool)
    zero, whole = PaddingPolicy.ZERO, torch.int64
    slots = [
        tokens("input_ids", whole, zero),
        tokens("positions", whole, zero),
        tokens("out_cache_loc", cache_loc_dtype, zero),
    ]
    if is_multimodal:
        slots.append(mrope_positions())
    if is_multimodal if register_input_embeds is None else register_input_embeds:
        dtype: Any = embed_dtype
        slots.append(
            GraphSlot(
                "input_embeds", lambda _, most: (most, hidden_size), dtype, padding_policy=zero, copy_from_fb=False
            )
        )
    if enable_mamba_track:
        slots.append(requests("mamba_track_indices", whole))
        slots.append(requests("mamba_track_mask", torch.bool))
        slots.append(requests("mamba_track_seqlens", torch.int32))
    if enable_num_token_non_padded:
        slots.append(count(prefill_count_of(lambda size: not enable_prefill_cp and attn_tp_sharded_fn(size))))
    register(made, slots, source, "prefill")
    for key, buffer in (getattr(source, "pp_proxy_tensors", None) or {}).items():
        register_proxy(made, key, buffer, axis="tokens", padding_policy=zero)
    return made


def build_eager_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
) -> CudaGraphBufferRegistry:
    """Return the registry of steps without graphs: the slots of decode steps, in SGLang's pool."""
    return build_decode_registry(
        device=device,
        max_bs=max_bs,
        max_num_token=max_num_token,
        seq_len_fill_value=0,
        cache_loc_dtype=cache_loc_dtype,
        enable_mamba_track=enable_mamba_track,
        is_encoder_decoder=is_encoder_decoder,
        encoder_len_fill_value=encoder_len_fill_value,
        encoder_lens_dtype=encoder_lens_dtype,
        register_global_num_tokens=False,
    )


def tokens(name: str, dtype: torch.dtype, policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY) -> GraphSlot:
    """Return a slot of one row a token."""
    return GraphSlot(name, lambda _, most: (most,), dtype, "tokens", padding_policy=policy)


def requests(name: str, dtype: torch.dtype, **options: Any) -> GraphSlot:
    """Return a slot of one row a request."""
    return GraphSlot(name, lambda most, _: (most,), dtype, "bs", **options)


def mrope_positions() -> GraphSlot:
    """Return the slot of positions along three dims, one column a token."""
    return GraphSlot(
        "mrope_positions",
        lambda _, most: (3, most),
        torch.int64,
        padding_policy=PaddingPolicy.ZERO,
        slice_fn=lambda buffer, rows: buffer[:, :rows],
    )


def count(source: SourceFunction) -> GraphSlot:
    """Return the slot of the number of tokens that are not padding."""
    return GraphSlot("num_token_non_padded", lambda *_: (1,), torch.int32, "none", source_fn=source)


def padded_counts(ranks: int, *, is_written: bool) -> list[GraphSlot]:
    """Return the slots of the padded tokens of each rank, which nothing writes unless ranks gather their tokens."""

    def padded_tokens(_: Any, sizes: FillContext) -> list[int]:
        return [sizes.padded_num_tokens] * ranks

    options: Any = {"source_fn": padded_tokens} if is_written else {"copy_from_fb": False}
    names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    return [GraphSlot(name, lambda *_: (ranks,), torch.int32, "none", **options) for name in names]


def decode_count_of(is_sharded: Callable[[int], bool]) -> SourceFunction:
    """Return the source of a decode step's count: of this rank, where ranks have a part of the tokens each."""

    def count_of(batch: Any, sizes: FillContext) -> torch.Tensor | None:
        everywhere = batch.global_num_token_non_padded
        if everywhere is None:
            here = batch.num_token_non_padded
            return here if here is None or here.dim() else here.reshape(1)
        if is_sharded(sizes.padded_num_tokens):
            from sglang.srt.model_executor.forward_batch_info import (  # noqa: PLC0415 - where tokens are sharded
                compute_local_num_token_non_padded as local,
            )

            given = {"num_tokens_per_dp": sizes.padded_num_tokens, "sharded": True}
            everywhere = local(global_num_token_non_padded=everywhere, **given)
        return everywhere.reshape(1)

    return count_of


def prefill_count_of(is_sharded: Callable[[int], bool]) -> SourceFunction:
    """Return the source of a prefill step's count, a number of the host."""

    def count_of(batch: Any, sizes: FillContext) -> list[int]:
        everywhere = batch.global_num_token_non_padded_cpu
        if everywhere is None:
            return [sizes.raw_num_tokens]
        if is_sharded(sizes.padded_num_tokens):
            from sglang.srt.model_executor.forward_batch_info import (  # noqa: PLC0415 - where tokens are sharded
                compute_local_num_token_non_padded_cpu as local,
            )

            given = {"num_tokens_per_dp": sizes.padded_num_tokens, "sharded": True}
            return [local(global_num_token_non_padded=everywhere, **given)]
        return [everywhere]

    return count_of


def register(registry: CudaGraphBufferRegistry, slots: Sequence[GraphSlot], source: Any, phase: str) -> None:
    """Register slots, which adopt the attributes of a source that have their names."""
    for slot in slots:
        buffer = None if source is None else getattr(source, slot.name, None)
        if source is not None and buffer is None:
            raise ValueError(f"source lacks buffer {slot.name!r}, which the {phase} registry needs")
        registry.register_slot(slot, buffer)


def adopt_ngrams(registry: CudaGraphBufferRegistry, ngrams: Any) -> None:
    """Register the tensors of an n-gram embedding, if there is one."""
    for name in ("column_starts", "req_lens") if ngrams is not None else ():

        def source_of(batch: Any, _: FillContext, name: str = name) -> Any:
            found = getattr(batch, "ngram_embedding_info", None)
            return None if found is None else getattr(found, name)

        buffer = getattr(ngrams, name)
        shape = tuple(buffer.shape)
        slot = GraphSlot(
            f"ngram_embedding_info.{name}",
            lambda *_, shape=shape: shape,
            buffer.dtype,
            "none",
            padding_policy=PaddingPolicy.KEEP_PAD,
            source_fn=source_of,
        )
        registry.register_slot(slot, buffer)


def register_proxy(registry: CudaGraphBufferRegistry, key: str, buffer: torch.Tensor, **options: Any) -> None:
    """Register a tensor that comes from the pipeline's stage before this one."""

    def source_of(_: Any, sizes: FillContext) -> Any:
        return None if sizes.pp_proxy_tensors is None else sizes.pp_proxy_tensors.tensors.get(key)

    if options["axis"] == "tokens":
        width = tuple(buffer.shape[1:])
        shape_fn: Callable[[int, int], tuple[int, ...]] = lambda _, most: (most, *width)  # noqa: E731 - as short
    else:
        shape_fn = lambda *_: tuple(buffer.shape)  # noqa: E731 - as short
    slot = GraphSlot(f"pp_proxy_tensors.{key}", shape_fn, buffer.dtype, source_fn=source_of, **options)
    registry.register_slot(slot, buffer)
