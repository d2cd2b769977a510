"""Random batches for two registries, and the comparison of every byte of their slots."""

import contextlib
import dataclasses
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from registry.original import Original

MOST_REQUESTS, MOST_TOKENS, HIDDEN = 12, 40, 6
STAGED: Final = frozenset({"positions", "out_cache_loc", "req_pool_indices", "seq_lens"})
"""The slots that SGLang's early metadata of a verify step writes before the rest."""
COPIED: Final[Mapping[str, str]] = {
    "input_ids": "tokens",
    "positions": "tokens",
    "out_cache_loc": "tokens",
    "mrope_positions": "columns",
    "req_pool_indices": "bs",
    "seq_lens": "bs",
    "seq_lens_cpu": "bs",
    "mamba_track_indices": "bs",
    "mamba_track_mask": "bs",
    "mamba_track_seqlens": "bs",
    "encoder_lens": "bs",
    "rids_int": "bs",
    "bootstrap_room_ids_int": "bs",
    "extra": "tokens",
    "rows": "bs",
    "hooked": "bs",
    "flat": "none",
}
"""The attributes of a batch that slots are copied from, and their rows."""
OTHERS: Final = (
    *("batch_size", "input_embeds", "num_token_non_padded", "global_num_token_non_padded"),
    *("global_num_token_non_padded_cpu", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"),
    *("ngram_embedding_info", "seq_lens_sum", "spec_info", "computed"),
)
ForwardBatch: Final[Any] = dataclasses.make_dataclass(
    "ForwardBatch", [(name, Any, dataclasses.field(default=None)) for name in (*COPIED, *OTHERS)]
)
"""Stands for SGLang's class, whose module imports the whole engine."""


@attrs.frozen
class Case:
    """One way to make a registry.

    Attributes:
        make: Makes it from the module of a registry and its buffers' source, and registers further slots.
        source: Makes the buffers that it adopts, or None if it allocates them.
        pads_requests: Whether requests are padded, too.
        unpadded: Whether nothing is padded.
        proxies: The width of each tensor that the pipeline's stage before this one sends.
    """

    make: Callable[[Any, Any, torch.device], Any]
    source: Callable[[torch.device], Any] | None = None
    pads_requests: bool = True
    unpadded: bool = False
    proxies: Mapping[str, int] = attrs.field(factory=dict)


def decode(**options: Any) -> Callable[[Any, Any, torch.device], Any]:
    """Make a decode registry with options of its builder."""
    return lambda module, source, device: module.build_decode_registry(
        device=device,
        max_bs=MOST_REQUESTS,
        max_num_token=MOST_TOKENS,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        share_pool=False,
        source=source,
        **options,
    )


def prefill(**options: Any) -> Callable[[Any, Any, torch.device], Any]:
    """Make a prefill registry with options of its builder."""
    return lambda module, source, device: module.build_prefill_registry(
        device=device, max_bs=MOST_REQUESTS, max_num_token=MOST_TOKENS, source=source, **options
    )


def eager(**options: Any) -> Callable[[Any, Any, torch.device], Any]:
    """Make an eager registry with options of its builder."""
    return lambda module, _, device: module.build_eager_registry(
        device=device, max_bs=MOST_REQUESTS, max_num_token=MOST_TOKENS, cache_loc_dtype=torch.int64, **options
    )


def registered(module: Any, _: Any, device: torch.device) -> Any:
    """Make a registry of slots of a user's own, one for each policy, with hooks, cuts and sources of their own."""
    made = module.CudaGraphBufferRegistry(device=device, max_bs=MOST_REQUESTS, max_num_tokens=MOST_TOKENS)
    slot, policy = module.GraphSlot, module.PaddingPolicy

    def tokens(_: int, most: int) -> tuple[int, ...]:
        return (most,)

    def requests(most: int, _: int) -> tuple[int, ...]:
        return (most,)

    def add_up(buffer: torch.Tensor, batch: Any, sizes: Any) -> None:
        buffer.fill_(sizes.padded_bs * 100 + sizes.raw_num_tokens + batch.batch_size)

    def lead(buffer: torch.Tensor, _: Any, sizes: Any) -> None:
        buffer[: sizes.padded_bs] += 1

    reset = {"padding_policy": policy.FILL_SENTINEL, "pad_value": -3}
    made.register_slot(slot("input_ids", tokens, torch.int32, **reset))
    made.register_slot(slot("extra", lambda _, most: (most, 5), torch.float32, padding_policy=policy.ZERO))
    made.register_slot(slot("seq_lens", requests, torch.int32, "bs", padding_policy=policy.KEEP_PAD))
    made.register_slot(slot("rows", lambda most, _: (most + 1,), torch.int64, "bs", **reset))
    made.register_slot(slot("hooked", requests, torch.int64, "bs", post_fill=lead, **reset))
    made.register_slot(slot("flat", lambda *_: (7,), torch.int64, "none"))
    made.register_slot(slot("computed", lambda *_: (2,), torch.int64, "none", copy_from_fb=False, post_fill=add_up))
    made.register_slot(slot("input_embeds", lambda *_: (0,), torch.int64, enabled=False))
    made.register_slot(slot("encoder_lens", requests, torch.int64, "bs", padding_policy=policy.FILL_ONCE, pad_value=9))
    made.register_slot(slot("spec_info", tokens, torch.bfloat16, copy_from_fb=False, padding_policy=policy.ZERO))
    return made


def adopted(device: torch.device) -> Any:
    """Make the buffers that an engine has itself, with what only such buffers have."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64, on: Any = device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=on)

    tokens = {name: zeros(MOST_TOKENS) for name in ("input_ids", "positions", "out_cache_loc")}
    requests = {name: zeros(MOST_REQUESTS) for name in ("req_pool_indices", "seq_lens", "rids_int")}
    return types.SimpleNamespace(
        **tokens,
        **requests,
        bootstrap_room_ids_int=zeros(MOST_REQUESTS),
        seq_lens_cpu=zeros(MOST_REQUESTS, on="cpu"),
        mrope_positions=zeros(3, MOST_TOKENS),
        global_num_tokens_gpu=zeros(3, dtype=torch.int32),
        global_num_tokens_for_logprob_gpu=zeros(3, dtype=torch.int32),
        ngram_embedding_info=types.SimpleNamespace(
            column_starts=zeros(MOST_REQUESTS, dtype=torch.int32), req_lens=zeros(MOST_REQUESTS, dtype=torch.int32)
        ),
        pp_proxy_tensors={name: zeros(MOST_TOKENS, HIDDEN, dtype=torch.bfloat16) for name in ("hidden", "residual")},
    )


def sharded(tokens: int) -> bool:
    """Whether ranks have a part of the tokens each: where they are even."""
    return tokens % 2 == 0


CASES: Final[Mapping[str, Case]] = {
    "decode": Case(decode()),
    "decode, every slot": Case(
        decode(
            enable_mamba_track=True,
            is_encoder_decoder=True,
            encoder_len_fill_value=5,
            enable_num_token_non_padded=True,
            require_gathered_buffer=True,
            require_mlp_tp_gather=True,
            num_dp_ranks=3,
            attn_tp_sharded_fn=sharded,
        )
    ),
    "decode, adopted": Case(
        decode(require_gathered_buffer=True, require_mlp_tp_gather=True, num_dp_ranks=3),
        adopted,
        proxies={"hidden": HIDDEN, "residual": HIDDEN},
    ),
    "prefill": Case(prefill(cache_loc_dtype=torch.int32, share_pool=True), pads_requests=False),
    "prefill, every slot": Case(
        prefill(
            cache_loc_dtype=torch.int64,
            is_multimodal=True,
            hidden_size=HIDDEN,
            embed_dtype=torch.bfloat16,
            enable_mamba_track=True,
            enable_num_token_non_padded=True,
            attn_tp_sharded_fn=sharded,
            share_pool=False,
        ),
        pads_requests=False,
    ),
    "prefill, adopted": Case(
        prefill(cache_loc_dtype=torch.int64),
        adopted,
        pads_requests=False,
        proxies={"hidden": HIDDEN, "residual": HIDDEN},
    ),
    "eager": Case(eager(), unpadded=True),
    "eager, every slot": Case(eager(enable_mamba_track=True, is_encoder_decoder=True), unpadded=True),
    "slots of one's own": Case(registered),
}
"""Registries by all builders, and one of slots that only `register_slot` makes."""


@attrs.frozen
class Step:
    """One batch, and how it is filled."""

    batch: Any
    sizes: Mapping[str, int]
    skip: frozenset[str]
    early: Mapping[str, torch.Tensor]
    proxies: Any


class Game:
    """One registry of each kind, and the batches that both are filled from."""

    def __init__(self, case: Case, original: Original, ours: Any, device: torch.device, seed: int) -> None:
        """Make both registries. ours: The module of the drop-in."""
        self.case, self.device = case, device
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.registries = list[Any]()
        for module in (original.registry, ours):
            original.forget_pool()  # so that the two share no memory
            self.registries.append(case.make(module, None if case.source is None else case.source(device), device))
        self.slots = {name: one.get_slot(name) for one in self.registries[:1] for name in one.slot_names()}
        if self.registries[1].slot_names() != [*self.slots]:
            raise AssertionError(f"other slots: {self.registries[1].slot_names()}, not {[*self.slots]}")

    def numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw numbers that each dtype has."""
        made = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=self.generator)
        return made.to(self.device, dtype)

    def poison(self) -> None:
        """Write garbage to all of the slots, the same in both registries."""
        for name, slot in self.slots.items():
            garbage = self.numbers(*slot.buffer.shape, dtype=slot.dtype)
            for one in self.registries:
                one.get_slot(name).buffer.copy_(garbage)

    def source(self, name: str, rows: str, requests: int, tokens: int) -> torch.Tensor | None:
        """Draw one attribute, at times of another dtype, not contiguous, or absent."""
        slot = self.slots.get(name)
        if slot is None or self.draw.random() < 0.1:  # noqa: PLR2004 - one in ten
            return None
        dtype = slot.dtype
        if dtype in (torch.int32, torch.int64) and self.draw.random() < 0.2:  # noqa: PLR2004 - one in five
            dtype = torch.int32 if dtype == torch.int64 else torch.int64
        shape = {
            "tokens": (tokens, *slot.buffer.shape[1:]),
            "columns": (3, tokens),
            "bs": (requests,),
            "none": tuple(slot.buffer.shape),
        }[rows]
        made = self.numbers(*shape, dtype=dtype)
        if self.draw.random() < 0.1:  # noqa: PLR2004 - one in ten
            made = torch.stack([made, made], -1)[..., 0]
        return made.cpu() if slot.buffer.device.type == "cpu" else made

    def sizes(self) -> dict[str, int]:
        """Draw live and padded sizes, at times full or empty."""
        draw, most = self.draw, (MOST_REQUESTS, MOST_TOKENS)
        padded_bs, padded_tokens = (draw.choice([size, draw.randint(1, size), size // 2]) for size in most)
        raw_bs, raw_tokens = (draw.choice([size, draw.randint(0, size)]) for size in (padded_bs, padded_tokens))
        if self.case.unpadded:
            padded_bs, padded_tokens = raw_bs, raw_tokens
        if not self.case.pads_requests:
            padded_bs = raw_bs
        return {
            "raw_bs": raw_bs,
            "padded_bs": padded_bs,
            "raw_num_tokens": raw_tokens,
            "padded_num_tokens": padded_tokens,
        }

    def step(self) -> Step:
        """Draw a batch."""
        sizes, draw = self.sizes(), self.draw
        requests, tokens = sizes["raw_bs"], sizes["raw_num_tokens"]
        given: dict[str, Any] = {name: self.source(name, rows, requests, tokens) for name, rows in COPIED.items()}
        count = draw.randint(0, tokens)
        everywhere = torch.tensor(count, dtype=torch.int32, device=self.device)
        given["num_token_non_padded"] = draw.choice([None, everywhere, everywhere.reshape(1)])
        given["global_num_token_non_padded"] = draw.choice([None, everywhere, everywhere])
        given["global_num_token_non_padded_cpu"] = draw.choice([None, count])
        given["ngram_embedding_info"] = draw.choice([None, self.ngrams(requests)])
        given["seq_lens_sum"], given["batch_size"] = draw.randint(0, 99), requests
        skip, early = frozenset[str](), dict[str, torch.Tensor]()
        if draw.random() < 0.2:  # noqa: PLR2004 - one in five
            skip = frozenset(draw.sample(sorted(COPIED), 3)) if draw.random() < 0.5 else STAGED  # noqa: PLR2004 - half
            early = {name: given[name] for name in STAGED & self.slots.keys() if given[name] is not None}
        proxies = None
        if self.case.proxies and draw.random() < 0.8:  # noqa: PLR2004 - most
            names = [name for name in self.case.proxies if draw.random() < 0.8]  # noqa: PLR2004 - most
            found = {one: self.numbers(tokens, self.case.proxies[one], dtype=torch.bfloat16) for one in names}
            proxies = types.SimpleNamespace(tensors=found)
        return Step(ForwardBatch(**given), sizes, skip, early, proxies)

    def ngrams(self, requests: int) -> Any:
        """Draw what an n-gram embedding takes."""
        starts, lens = (self.numbers(requests, dtype=torch.int32) for _ in range(2))
        return types.SimpleNamespace(column_starts=starts, req_lens=lens)

    def play(self, batches: int, replay: Callable[[Step], object] | None = None) -> Iterator[str]:
        """Fill both registries from so many random batches, and yield each difference.

        replay: Called after each fill, to replay a graph that begins with the drop-in's fill. No slot is skipped then.
        """
        for number in range(batches):
            step = self.step()
            if replay is not None:
                step = attrs.evolve(step, skip=frozenset(), early={})
            if self.draw.random() < 0.3:  # noqa: PLR2004 - one in three
                self.poison()
            views = list[Any]()
            for one in self.registries:
                if step.early:
                    one.copy_slots(step.early)
                one.fill_from(step.batch, **step.sizes, pp_proxy_tensors=step.proxies, skip_slots=step.skip)
                if replay is not None and one is self.registries[-1]:
                    replay(step)
                padded = {name: step.sizes[name] for name in ("padded_bs", "padded_num_tokens")}
                views.append(one.extract_buffer(**padded, forward_batch_template=step.batch))
            yield from (f"batch {number}: {fault}" for fault in self.faults(*views))

    def faults(self, right: Any, ours: Any) -> Iterator[str]:
        """Yield each slot and each attribute of the extracted batches that differ."""
        theirs, mine = self.registries
        for name in self.slots:
            expected, got = (one.get_slot(name).buffer for one in (theirs, mine))
            if not same_bytes(expected, got):
                yield f"slot {name!r} holds {got.tolist()}, and the original's {expected.tolist()}"
        for name, expected in vars(right).items():
            got = getattr(ours, name)
            if name not in self.slots or expected is None or got is None or not self.is_view(theirs, name, expected):
                if got is not expected and got != expected:
                    yield f"the extracted batch has {name}={got!r}, and the original's {expected!r}"
            elif not (self.is_view(mine, name, got) and got.shape == expected.shape):
                yield f"the extracted batch has another view of {name!r}: {got!r}, and the original's {expected!r}"

    def is_view(self, registry: Any, name: str, value: Any) -> bool:
        """Return whether a value is the first rows of a slot."""
        buffer = registry.get_slot(name).buffer
        return isinstance(value, torch.Tensor) and value.data_ptr() in (buffer.data_ptr(), 0)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    first, second = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def compare(name: str, original: Original, ours: Any, device: torch.device, batches: int, seed: int = 0) -> list[str]:
    """Fill both registries of a case from random batches, and return the first differences."""
    found = list[str]()
    with contextlib.closing(Game(CASES[name], original, ours, device, seed).play(batches)) as faults:
        for fault in faults:
            found.append(fault)
            if len(found) == 3:  # noqa: PLR2004 - enough to see what is wrong
                break
    return found
