"""The paged KV cache, and attention over it, plugged into transformers through its attention interface."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from serving.inputs import DecodeInputs, PrefillInputs, TokenInputs
from slotgraph import current_view, graph_break

NAME = "slotgraph-paged"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
DUMMY_PAGE = 0  # where padded rows write: no request owns it
TRITON, SDPA = "triton", "sdpa"


class PageAllocator:
    """Hands out pages 1 to `pages` - 1; the one freed last goes first, so that a stale pointer is soon a wrong one."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, DUMMY_PAGE, -1))

    @property
    def free(self) -> int:
        """Pages that can be had now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many pages; RuntimeError where fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that no request reads any more."""
        self._free.extend(reversed(pages))


@attrs.frozen
class PagedCache:
    """Keys and values of all layers, [layers, pages, page size, KV heads, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, model: PreTrainedModel, pages: int, page_size: int) -> "PagedCache":
        """A cache of zeros for a model: what is masked out must still be finite."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, pages, page_size, config.num_key_value_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        return cls(keys, values)

    @property
    def pages(self) -> int:
        """How many pages there are, the dummy among them."""
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens in one page."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, locations: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one row a token, [tokens, KV heads, head size], at flat locations, page * page size + offset."""
        self.keys[layer].flatten(0, 1)[locations] = keys
        self.values[layer].flatten(0, 1)[locations] = values

    def read(self, layer: int, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the pages that each request owns, [requests, KV heads, pages * page size, head size]."""
        keys, values = (pages[layer][page_table].flatten(1, 2).transpose(1, 2) for pages in (self.keys, self.values))
        return keys, values


class Rows(NamedTuple):
    """What one layer has of this step's tokens, [tokens, heads, head size] each; keys and values have fewer heads."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


ATTEND_PAGES: Final = (
    "(Tensor query, Tensor keys, Tensor values, Tensor page_table, Tensor seq_lens, float scale) -> Tensor"
)


@torch.library.custom_op("serving::attend_pages", mutates_args=(), schema=ATTEND_PAGES)
def attend_pages(*given: Any) -> torch.Tensor:
    """The kernel as an operator, which torch.compile leaves as it is: see paged_kernel, where triton must be there."""
    out: torch.Tensor = importlib.import_module("serving.paged_kernel").attend_pages(*given)
    return out


@attend_pages.register_fake
def _(query: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


class KernelAttention:
    """Each row is a request's newest token, and sees its pages up to its length, where they lie."""

    def __init__(self, cache: PagedCache, view: DecodeInputs) -> None:
        self._cache, self._page_table, self._seq_lens = cache, view.page_table, view.seq_lens

    def __call__(self, layer: int, rows: Rows, scale: float, view: TokenInputs) -> torch.Tensor:
        """Store and attend: the launch depends on the bucket alone, and the kernel reads lengths and pages."""
        cache = self._cache
        cache.write(layer, view.out_cache_loc, rows.key, rows.value)
        pages = cache.keys[layer], cache.values[layer], self._page_table
        out: torch.Tensor = attend_pages(rows.query, *pages, self._seq_lens, scale)
        return out


class GatheredAttention:
    """The same where no kernel is there: over a copy of all pages that the page table has room for, and a mask."""

    def __init__(self, cache: PagedCache, view: DecodeInputs) -> None:
        self._cache = cache
        self._page_table = view.page_table
        places = torch.arange(view.page_table.shape[1] * cache.page_size, device=view.seq_lens.device)
        # A row that may see nothing turns nan, and would hand it on to live rows through page 0: hence at least 1.
        self._mask = (places < view.seq_lens.clamp(min=1)[:, None])[:, None, None, :]

    def __call__(self, layer: int, rows: Rows, scale: float, view: TokenInputs) -> torch.Tensor:
        """Store, gather the pages and attend: shapes depend on the bucket alone, and nothing is read by the host."""
        self._cache.write(layer, view.out_cache_loc, rows.key, rows.value)
        keys, values = self._cache.read(layer, self._page_table)
        query = rows.query[:, :, None]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, scale=scale, enable_gqa=True)
        return out[:, :, 0]


DecodeAttention: TypeAlias = KernelAttention | GatheredAttention
DECODE: Final[dict[str, type[DecodeAttention]]] = {TRITON: KernelAttention, SDPA: GatheredAttention}
"""By name, one made in each step."""


def best_attention(asked: str, device: torch.device) -> str:
    """Which of them: the kernel on CUDA where triton is there, unless `asked` is "sdpa"."""
    is_there = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return TRITON if is_there and asked != SDPA else SDPA


def _find_varlen() -> Callable[..., Any] | None:
    """Torch's attention of all requests in one call; None before torch 2.11, whose one knows no scale."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    options = inspect.signature(attend).parameters
    if "window_size" not in options:
        return None
    grouped = {"enable_gqa": True} if "enable_gqa" in options else {}  # before, it takes fewer heads without a word
    return functools.partial(attend, window_size=(-1, 0), **grouped)


_VARLEN: Final = _find_varlen()


def takes_all_at_once(query: torch.Tensor) -> bool:
    """Whether torch attends within all requests in one call: its kernels are for 16 bits, from compute capability 8."""
    if _VARLEN is None or not query.is_cuda or query.element_size() > 2:  # noqa: PLR2004 - bytes
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend_within_requests(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Prompts lie behind one another, and a token sees those of its own up to itself; padded rows get zeros."""
    # The prompts' number and lengths differ from step to step, which no graph can follow: this runs between graphs.
    view = current_view(PrefillInputs)
    if _VARLEN is not None and takes_all_at_once(query) and view.lengths:
        ends, longest = view.cu_seqlens_q, max(view.lengths)
        found: torch.Tensor = _VARLEN(query, key, value, ends, ends, longest, longest, scale=scale)
        found[sum(view.lengths) :] = 0
        return found
    out, begin = torch.zeros(query.shape, dtype=query.dtype, device=query.device), 0
    for length in view.lengths:
        mine = slice(begin, begin + length)
        q, k, v = (tensor[mine].transpose(0, 1)[None] for tensor in (query, key, value))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[mine] = seen[0].transpose(0, 1)
        begin += length
    return out


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
between_graphs = graph_break(attend_within_requests)
"""The same, marked: a capture ends a graph before it, and begins another after it. Else it is as it was."""
as_operator = torch.library.custom_op("serving::attend_within_requests", attend_within_requests, mutates_args=())
"""The same as an operator with a name, at which a step that is traced can be cut."""


@as_operator.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    del key, value, scale
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


ATTEND: dict[str, Any] = {"eager": attend_within_requests, "breakable": between_graphs, "piecewise": as_operator}
"""By the path of prefill."""


class PrefillAttention:
    """Within a step, as nothing of its requests was in the cache before; one for all steps and their graphs."""

    def __init__(self, cache: PagedCache, attend: Attend) -> None:
        self._cache = cache
        self._attend = attend

    def __call__(self, layer: int, rows: Rows, scale: float, view: TokenInputs) -> torch.Tensor:
        """Store in this graph; after it each token attends to those of its own request."""
        self._cache.write(layer, view.out_cache_loc, rows.key, rows.value)
        return self._attend(rows.query, rows.key, rows.value, scale)


StepAttention: TypeAlias = DecodeAttention | PrefillAttention


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **settings: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out."""
    for name in UNSUPPORTED:
        if settings.get(name) is not None:
            raise NotImplementedError(f"this model uses {name!r}, which this demo's paged attention does not know")
    rows = Rows(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
    attention: StepAttention = settings["step_attention"]
    return attention(module.layer_idx, rows, settings["scaling"], settings["step_view"])[None], None


@contextlib.contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model attends through `paged_attention`; afterwards as before."""
    own: Any = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
