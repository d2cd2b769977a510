"""The demo, run in this process."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.demo import PROMPTS, SMALL, Generate, Result, module


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that on a busy machine threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """Run the demo without timing steps: its exit status, its JSON and what it printed."""

    def run(*argv: str, **seams: Any) -> Result:
        file = tmp_path_factory.mktemp("report") / "report.json"
        options = module("serving.options").parse([*SMALL, *argv, "--json", str(file)])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = module("serving.program").generate(options, **seams)
        return status, json.loads(file.read_text(encoding="utf-8")), out.getvalue()

    return run


@pytest.fixture(scope="session")
def default(generate: Generate) -> Result:
    """Requests that arrive one after another, prefill with breaks, and timed steps."""
    return generate("--rounds", "3")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of a few prompts, an odd number of them, so that a run is quick."""
    file: Path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    return str(file)
