"""The demo over two processes of gloo: the tokens of one, whichever way work is shared out; and what is refused.

As a program it runs the demo several times in one group of processes. Its argument is a JSON list of cases: the demo's
arguments, and the name of a bug to plant or an empty one.
"""

import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.examples.demo import FOLDER, NEEDS, SMALL, Generate, Result, module, save_llama, shifted
from tests.programs import python

pytest.importorskip("transformers", reason=NEEDS)

SHORT = ("--max-new-tokens", "5", "--max-prefill-tokens", "64", "--max-batch", "2", "--rounds", "0")
FEW = ("--max-new-tokens", "4", "--arrival-gap", "0", "--prefill", "eager", "--rounds", "0")


def launch(*command: str) -> "subprocess.CompletedProcess[str]":
    """Two ranks of a program, by torch's own launcher."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return python(*ranks, *command, paths=[FOLDER, *sys.path])


@pytest.fixture(scope="module")
def single(generate: Generate, prompts: str) -> Result:
    """One process."""
    return generate("--prompts", prompts, *SHORT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with biases and tied weights, whose vocabulary no two ranks can share out."""
    odd = {"vocab_size": 301, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": [257], "mlp_bias": True}
    return str(save_llama(tmp_path_factory.mktemp("checkpoint"), **odd))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, prompts: str, checkpoint: str) -> dict[str, Any]:
    """Reports of several runs, in the same two processes one after another."""
    folder = tmp_path_factory.mktemp("reports")
    cases = {
        "dp": (["--dp", "2", *SHORT], ""),
        "pp": (["--pp", "2", *SHORT], ""),
        "replayed": (["--tp", "2", "--backend", "cpu", "--no-verify"], ""),
        "checkpoint": (["--tp", "2", "--model", checkpoint, "--prefill", "breakable", "--rounds", "2"], ""),
        "bfloat16": (["--tp", "2", "--dtype", "bfloat16"], ""),
        "shifted": (["--tp", "2"], "shifted"),
        "forgotten": (["--tp", "2"], "forgotten"),
        "apart": (["--dp", "2"], "shifted"),
        "ahead": (["--tp", "2", "--ahead", "2"], ""),
        "idle": (["--dp", "2", "--arrival-gap", "2", "--temperature", "0.9", "--top-p", "0.9"], ""),
        "wrong rows": (["--pp", "2"], "shifted"),
        "traced": (["--pp", "2", "--prefill", "piecewise"], ""),
    }
    few = {name: () if name in ("dp", "pp") else FEW for name in cases}
    runs = [
        ([*SMALL, "--prompts", prompts, *few[name], *argv, "--json", str(folder / name)], plant)
        for name, (argv, plant) in cases.items()
    ]
    done = launch(__file__, json.dumps(runs))
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in cases}


def texts_of(report: Any) -> list[list[int]]:
    """The tokens of each request."""
    return [text["tokens"] for text in report["texts"]]


def test_torchrun_shares_out_heads_and_says_all_once(tmp_path: Path, prompts: str, single: Result) -> None:
    """`torchrun docs/examples/generate --tp 2`: each rank has half of the heads, and all is said once."""
    file = tmp_path / "report.json"
    done = launch(str(FOLDER), "--tp", "2", "--prompts", prompts, *SHORT, "--model", "random", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report, said = json.loads(file.read_text(encoding="utf-8")), " ".join(done.stdout.split())
    check_shared(report, single[1], "tp", [3, 3])
    assert said.count("2, tensor parallel") == said.count("decode steps by bucket") == 1
    assert (report["ranks"]["alone"]["difference"], report["ranks"]["alone"]["apart"]) == (None, 0)
    assert "beside the same ranks, eagerly: equal to generate(): all" in said
    assert "beside one process: equal" in said
    assert 2 * report["memory"]["kv_cache"] == single[1]["memory"]["kv_cache"]


def check_shared(report: Any, alone: Any, way: str, shares: list[int]) -> None:
    """Two ranks make the tokens of one process, by as many steps."""
    assert texts_of(report) == texts_of(alone)
    assert (report["backend"], report["comparison"]["difference"]) == ("cpu-capture", None)
    ranks = report["ranks"]
    assert (ranks["way"], ranks["size"], ranks["requests"], ranks["differing"]) == (way, 2, shares, [])
    assert report["counted"] == report["decoded"] == alone["decoded"]
    assert report["prefill"]["tokens"] == alone["prefill"]["tokens"]


def test_two_ranks_make_the_tokens_of_one(several: dict[str, Any], single: Result) -> None:
    """Each rank has half of the prompts or of the layers."""
    report, pipeline, alone = several["dp"], several["pp"], single[1]
    check_shared(report, alone, "dp", [2, 1])
    check_shared(pipeline, alone, "pp", [3, 3])
    replayed = sum(one["steps"] for one in report["prefill"]["buckets"] + report["buckets"])
    eager = sum(report["ranks"]["forced"].values()) - replayed / 2
    assert 0 < eager <= report["prefill"]["paths"]["eager"], "both run each step in one way, whoever has prompts"
    assert 2 * pipeline["memory"]["kv_cache"] == alone["memory"]["kv_cache"]
    assert pipeline["comparison"] == alone["comparison"], "the same sums in the same order"
    assert (pipeline["buckets"], pipeline["prefill"]["paths"]) == (alone["buckets"], alone["prefill"]["paths"])


def test_other_ways_to_run_are_right_too(
    several: dict[str, Any], generate: Generate, single: Result, checkpoint: str, prompts: str
) -> None:
    """Steps that run again, an odd vocabulary with tied embeddings, traced layers and low precision are right, too."""
    shorter = [text[:4] for text in texts_of(single[1])]
    assert all(several[name]["passed"] for name in ("replayed", "checkpoint", "traced", "bfloat16", "idle", "ahead"))
    assert texts_of(several["replayed"]) == texts_of(several["traced"]) == texts_of(several["ahead"]) == shorter
    assert several["traced"]["prefill"]["paths"] == {"piecewise": 1}
    alone = generate("--model", checkpoint, "--prompts", prompts, *FEW)[1]
    assert texts_of(several["checkpoint"]) == texts_of(alone)
    [times] = several["checkpoint"]["measured"]["times"]  # how many steps are timed is the same in all ranks
    assert (times["live"], times["bucket"], times["ways"]) == (3, 4, {})
    ranks = several["bfloat16"]["ranks"]["alone"]
    assert ranks["largest"] <= ranks["bounds"]["logits"]


def test_bugs_are_found(several: dict[str, Any]) -> None:
    """A wrong position on any rank differs from the same ranks without it; a forgotten sum only from one process."""
    assert not any(several[name]["passed"] for name in ("shifted", "forgotten", "apart", "wrong rows"))
    assert several["shifted"]["comparison"]["difference"] is not None
    assert several["forgotten"]["comparison"]["difference"] is None
    assert several["forgotten"]["ranks"]["alone"]["difference"] is not None
    assert (several["apart"]["comparison"]["apart"], several["apart"]["ranks"]["requests"]) == (3, [2, 1])


@pytest.mark.parametrize(
    ("argv", "present", "message"),
    [
        (["--backend", "abacus"], None, "abacus"),
        (["--model", "no-such-folder"], None, "no config.json"),
        (["--prompts", "no-such-file"], None, "no such file"),
        (["--json", "no-such-folder/report.json"], None, "no folder"),
        (["--max-new-tokens", "1000"], None, "lower --max-new-tokens"),
        (["--prompts", "-"], None, "no prompts"),
        (["--tp", "2"], None, "torchrun --nproc-per-node 2 docs/examples/generate --tp 2"),
        (["--dp", "4"], None, "torchrun --nproc-per-node 4 docs/examples/generate --dp 4"),
        (["--tp", "2"], 3, "--tp 2 is for 2 processes, and here are 3"),
        (["--dp", "2", "--ahead", "1"], 2, "leave out --sync, --dp and --pp"),
        (["--sync", "--ahead", "0"], None, "leave out --sync, --dp and --pp"),
        (["--tp", "2", "--dp", "2"], 4, "--tp 2 --dp 2: one at a time"),
        ([], 2, "say --tp 2 or --dp 2 or --pp 2"),
        (["--pp", "5"], 5, "the model has 4 layers"),
        (["--pp", "2"], 1, "torchrun --nproc-per-node 2 docs/examples/generate --pp 2"),
        (["--dp", "2", "--prompts", "-"], 2, "give a file"),
        (["--tp", "4"], 4, "num_key_value_heads 2"),
        (["--tp", "3"], 3, "num_attention_heads 4, num_key_value_heads 2, intermediate_size 256"),
    ],
)
def test_what_cannot_run_says_what_to_change(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: Sequence[str],
    present: int | None,
    message: str,
) -> None:
    """Exit status 2 and a sentence, without a traceback, and before processes wait for each other."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n"))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(present)}.items():
        monkeypatch.delenv(name, raising=False)
        if present is not None:
            monkeypatch.setenv(name, value)
    assert module("serving.program").main(["--model", "random", *argv]) == 2
    assert message in capsys.readouterr().err


def test_models_that_cannot_be_shared_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model with another plan is refused by its configuration alone: there are no weights to load."""
    transformers = importlib.import_module("transformers")
    transformers.Phi3Config(pad_token_id=0).save_pretrained(tmp_path)
    assert module("serving.program").main(["--model", str(tmp_path), "--tp", "2"]) == 2
    said = capsys.readouterr().err
    assert "Phi3Config has no plan that this program knows" in said
    assert "layers.*.self_attn.qkv_proj" in said


def test_each_rank_needs_a_prompt() -> None:
    """Each rank needs a prompt at least; the first ones take one more where they do not come out even."""
    ranks = module("serving.ranks")
    worlds = [ranks.World("dp", rank, 3) for rank in range(3)]
    assert [world.share("abcd") for world in worlds] == [["a", "d"], ["b"], ["c"]]
    assert ranks.World("tp", 1, 3).share("ab") == ["a", "b"]
    with pytest.raises(module("serving.options").OptionsError, match="give at least 3"):
        worlds[0].share("ab")


def run(patch: pytest.MonkeyPatch, argv: list[str], plant: str) -> None:
    """One case; its report goes to the file that its arguments name."""
    program, options = module("serving.program"), module("serving.options").parse(argv)
    world = module("serving.ranks").world_of(options)
    patch.setattr(program, "joined", lambda _: contextlib.nullcontext(world))  # one group for all
    if plant == "forgotten":  # shares are not added up
        patch.setattr(module("serving.shares"), "add_up", lambda _: None)
    program.generate(options, **({"prepare": shifted} if plant == "shifted" else {}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(sys.stderr):
        for case in json.loads(sys.argv[1]):
            with pytest.MonkeyPatch.context() as patched:
                run(patched, *case)
    dist.destroy_process_group()
