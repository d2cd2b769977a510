"""Faults: planted one at a time, and the test that catches each; no test, but a program.

    python -m tests.faults --jobs 2
    python -m tests.faults --only a-name another-name
    python -m tests.faults --list

A fault is planted in every Python process that its tests start, before anything else runs. Exit code 0 where each is
caught, 1 where not.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from tests.faults.planted import FAULTS
from tests.faults.planting import Fault

ROOT: Final = Path(__file__).parents[2]
LIMIT: Final = 600
"""Seconds that pytest may take; a fault that makes it take longer is caught."""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED: Final = 1
"""The exit code of pytest where a test failed."""


class Verdict(NamedTuple):
    """What became of a fault. by: the test that caught it, or why there was none. seconds: that pytest took."""

    is_caught: bool
    by: str
    seconds: float


def judge(fault: Fault) -> Verdict:
    """Plant a fault in a pytest of its own, until the first of its tests fails."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="faults-") as room:
        text = f"from tests.faults.planted import FAULTS\n\nFAULTS[{fault.name!r}].plant()\n"
        (Path(room) / "sitecustomize.py").write_text(text, encoding="utf-8")  # Python runs it first
        path = os.pathsep.join([room, str(ROOT / "src"), str(ROOT)])
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "unshrunk"}
        options = ("-x", "-q", "-ra", "--tb=no", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *options, *fault.tests]
        with (Path(room) / "said.txt").open("w+", encoding="utf-8") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **more}, stdout=said, stderr=said, start_new_session=True
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # tests have processes of their own
                process.wait()
                return Verdict(is_caught=True, by="the time limit", seconds=time.perf_counter() - begun)
            said.seek(0)
            text = said.read()
    seconds, failed = time.perf_counter() - begun, _FAILED.search(text)
    if "Error in sitecustomize" in text:  # after which Python goes on
        return Verdict(is_caught=False, by="it was not planted", seconds=seconds)
    if code < 0:
        return Verdict(is_caught=True, by="a crash", seconds=seconds)
    if code == _TESTS_FAILED and failed is not None:
        return Verdict(is_caught=True, by=failed[1], seconds=seconds)
    return Verdict(is_caught=False, by=f"pytest ended with {code}", seconds=seconds)


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAULTS, help="plant these alone")
    parser.add_argument("--list", action="store_true", help="print what there is to plant, and plant nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at a time")
    options = parser.parse_args(words)
    console = Console(width=160, highlight=False, markup=False, soft_wrap=True)
    found = [FAULTS[name] for name in options.only or FAULTS]
    if options.list:
        console.print("\n".join(f"{one.name}: {one.seen} Breaks: {one.promise}" for one in found))
        return 0
    survived = list[str]()
    with ThreadPoolExecutor(options.jobs) as threads:
        for one, verdict in zip(found, threads.map(judge, found), strict=True):
            word = "caught" if verdict.is_caught else "survived"
            console.print(f"{word:9}{one.name}  {verdict.by}  {verdict.seconds:.1f} s")
            survived += [] if verdict.is_caught else [one.name]
    console.print(f"{len(found)} planted, {len(found) - len(survived)} caught")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
