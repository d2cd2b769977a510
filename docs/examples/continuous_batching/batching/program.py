"""The program: requests, each way of serving them, the comparison and the report."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import attrs
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from batching.inputs import inputs_for
from batching.lines import table
from batching.options import Options, parse
from batching.swapped import swapped
from serving.options import DTYPES, OptionsError
from slotgraph import backends
from slotgraph.errors import BackendUnavailableError, CaptureError

PAGE = 16  # tokens
VOCABULARY = 1000
WINDOW = 32
LONGEST = 60  # tokens of a prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    try:
        return serve(parse(argv))
    except (BackendUnavailableError, CaptureError, OptionsError) as error:
        print(f"continuous_batching: {error}", file=sys.stderr)
        return 2


def make_model(options: Options, device: torch.device) -> Any:
    """Return a model with seeded weights."""
    heads = max(options.hidden // 64, 2)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": options.hidden // heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST + options.max_new_tokens,
    }
    torch.manual_seed(options.seed)
    if options.model == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    elif options.model == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * options.layers
        windows = {"sliding_window": WINDOW, "layer_types": kinds[: options.layers]}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **windows))
    else:
        raise OptionsError(f"there is no model {options.model!r}: choose llama or gemma3")
    model.set_attn_implementation("sdpa")
    return model.eval().to(device, DTYPES[options.dtype])


def make_prompts(options: Options) -> list[list[int]]:
    """Return prompts of different lengths."""
    source = torch.Generator().manual_seed(options.seed)
    lengths = torch.randint(2, LONGEST, (options.requests,), generator=source)
    return [torch.randint(3, VOCABULARY, (int(length),), generator=source).tolist() for length in lengths]


@attrs.define
class Way:
    """A way to serve all requests.

    Attributes:
        name: Its name in the report.
        swap: Makes the context in which transformers makes its own objects, or ours.
        overlaps: Whether a step is prepared while the one before runs.
        tokens: The tokens of each request in the last round.
        rates: Tokens a second of each round.
        input_times: Milliseconds of the host for each step, from the scheduler's decision to the launch of its graph.
        launch_times: Those that the launch takes, before it returns.
        manager: Serves the requests.
    """

    name: str
    swap: Callable[[], contextlib.AbstractContextManager[None]]
    overlaps: bool = False
    tokens: list[list[int]] = attrs.field(factory=list)
    rates: list[float] = attrs.field(factory=list)
    input_times: list[float] = attrs.field(factory=list)
    launch_times: list[float] = attrs.field(factory=list)
    manager: Any = None

    def start(self, model: Any, options: Options, launched: list[float]) -> None:
        """Make the manager, with its cache and its graphs. launched: As for `note_times`."""
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=options.cache_tokens // PAGE,
            max_batch_tokens=options.max_tokens,
            max_requests_per_batch=options.max_requests,
            max_blocks_per_request=0,
            use_async_batching=self.overlaps,
            use_cuda_graph=model.device.type == "cuda",
        )
        generation = GenerationConfig(
            max_new_tokens=options.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with self.swap():
            self.manager = model.init_continuous_batching(
                generation_config=generation, continuous_batching_config=config
            )
            self.manager.warmup()
        note_times(self.manager.batch_processor, self, launched)
        self.manager.start()

    def serve(self, prompts: Sequence[Sequence[int]], options: Options, *, warm_up: bool = False) -> None:
        """Serve all requests once. warm_up: Whether the round's times do not count."""
        begin, found = time.perf_counter(), dict[str, list[int]]()
        names = self.manager.add_requests(inputs=prompts, max_new_tokens=options.max_new_tokens)
        while len(found) < len(prompts):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            elif not self.manager.is_running():
                raise OptionsError(f"{self.name} stopped: {self.manager.background_thread_status.fatal_error}")
        took = time.perf_counter() - begin
        self.tokens = [found[name] for name in names]
        if warm_up:
            self.input_times.clear()
            self.launch_times.clear()
        else:
            self.rates.append(sum(map(len, self.tokens)) / took)


@contextlib.contextmanager
def timed_launches() -> Iterator[list[float]]:
    """Yield a list, to which each replay of a CUDA graph adds the seconds that it takes the host."""
    replay, took = torch.cuda.CUDAGraph.replay, list[float]()

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begin = time.perf_counter()
        replay(graph)
        took.append(time.perf_counter() - begin)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed):
        yield took


def note_times(processor: Any, way: Way, launched: list[float]) -> None:
    """Let a processor note what each step takes on the host. launched: Seconds of launches since the last step."""
    ios, runner = processor.inputs_and_outputs, processor.model_runner
    spent = 0.0

    def noting(owner: Any, name: str, *, ends_step: bool = False) -> None:
        method = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            nonlocal spent
            begin = time.perf_counter()
            found = method(*args, **options)
            spent += time.perf_counter() - begin
            if ends_step:
                launch = sum(launched)
                way.input_times.append(1000 * (spent - launch))
                way.launch_times.append(1000 * launch)
                launched.clear()
                spent = 0.0
            return found

        setattr(owner, name, run)

    noting(ios, "prepare_batch_tensors")
    noting(ios, "get_model_kwargs")
    noting(runner, "compute_batch", ends_step=True)


def serve(options: Options, *, declare: Callable[..., Any] = inputs_for) -> int:
    """Serve the requests each way, print the report, and return 0 if all tokens are equal, else 1."""
    backend = backends.choose(options.backend)
    model, prompts = make_model(options, backend.device), make_prompts(options)
    ways = [Way("transformers", contextlib.nullcontext), Way("slotgraph", lambda: swapped(options, declare))]
    if backend.device.type == "cuda":  # where transformers can prepare a step while another runs
        ways += [Way(f"{way.name}, async", way.swap, overlaps=True) for way in ways]
    with contextlib.ExitStack() as running:
        launched = running.enter_context(timed_launches())
        for way in ways:
            way.start(model, options, launched)
            running.callback(way.manager.stop)  # or its thread, which waits for requests, keeps the process alive
            way.serve(prompts, options, warm_up=True)
        for _ in range(options.rounds):
            for way in ways:
                way.serve(prompts, options)
    print(*report(ways, on_device=backend.device.type == "cuda"), sep="\n", end="\n\n")
    print(*table(), sep="\n", end="\n\n")
    return verdict(ways, options)


def report(ways: Sequence[Way], *, on_device: bool) -> list[str]:
    """Return a line for each way. Ratios are medians over rounds, of rounds that followed one another."""
    lines = [f"{'way':20}{'tokens/s':>9}{'of transformers':>22}{'input ms':>10}{'launch ms':>11}"]
    for way in ways:
        base = ways[2 * way.overlaps].rates
        ratios = [rate / other for rate, other in zip(way.rates, base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        times = f"{statistics.median(way.input_times):10.2f}{statistics.median(way.launch_times):11.2f}"
        lines.append(f"{way.name:20}{statistics.median(way.rates):9.0f}{spread:>22}{times}")
    return lines if on_device else [line[:51] for line in lines]


def verdict(ways: Sequence[Way], options: Options) -> int:
    """Print whether each way chose the tokens of transformers' first one; return the exit status."""
    expected, *others = [way.tokens for way in ways]
    for way, tokens in zip(ways[1:], others, strict=True):
        differing = [row for row, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
        if differing and options.dtype == "float32" and "slotgraph" in way.name:
            first = differing[0]
            print(f"DIFFERENT from transformers: {way.name}, {len(differing)} requests, first request {first}")
            return 1
        if differing:  # rounding depends on who shares a step, and so do tokens that are nearly equal
            print(f"{way.name}: {len(differing)} of {len(expected)} requests are not those of transformers")
    if all(tokens == expected for tokens in others):
        print(f"equal: transformers chose the same tokens for all {len(expected)} requests")
    return 0
