"""Mutations: small bugs planted in the engine, one at a time, and the test that catches each; no test, but a program.

    python -m tests.mutations --jobs 2 --json tests/mutations.json
    python -m tests.mutations --only a-name another-name
    python -m tests.mutations --list

tests/mutations.toml has the bugs. Each is planted in a copy of the repository. pytest then runs the tests that are
named with it and, where these pass, a wider suite, which `--suite` without paths leaves out. Exit code 0 where each bug
is caught but for those that are known to survive, 1 where not, 2 where the list does not fit the files any more.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple

import attrs
from rich.console import Console

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_suffix(".toml")
SUITE: Final = ("tests/dataflow", "tests/runners", "tests/life", "tests/regressions", "tests/backends")
LIMIT: Final = 600
"""Seconds that one run of pytest may take; a bug that makes it take longer is caught."""
_LEFT_OUT: Final = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED, _INTERRUPTED, _NOTHING_RAN = 1, 2, 5
"""Exit codes of pytest."""
_IMPORTS: Final = "import slotgraph, slotgraph.backends; from slotgraph.backends import cpu, cpu_capture, cuda, npu"
Outcome = Literal["caught", "survived", "broken"]


@attrs.frozen
class Mutation:
    """One bug. old: text that the file has exactly once; new: what stands there instead. seen: what a user would see.

    survives: why no test catches it, where that is known.
    """

    name: str
    file: str
    old: str
    new: str
    seen: str
    tests: tuple[str, ...] = attrs.field(converter=tuple)
    survives: str = ""

    def planted(self, text: str) -> str:
        return text.replace(self.old, self.new)

    def faults(self) -> Iterator[str]:
        path = ROOT / self.file
        if not path.is_file():
            yield f"there is no file {self.file}"
            return
        text = path.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            yield f"{self.file} has the old text {count} times, and must have it once"
        elif self.planted(text) == text:
            yield "the new text is the old one"
        else:
            try:
                ast.parse(self.planted(text))
            except SyntaxError as error:
                yield f"{self.file} with the new text is no Python: {error}"
        if not self.tests:
            yield "it names no tests"
        yield from (f"there is no {test}" for test in self.tests if not (ROOT / test.split("::")[0]).exists())


class Verdict(NamedTuple):
    """What became of a mutation. by: the test that caught it, or why there was none. seconds: that tests took."""

    mutation: Mutation
    outcome: Outcome
    by: str
    seconds: float


class Copy:
    """A copy of the repository, in which bugs are planted one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT, root, symlinks=True, ignore=_LEFT_OUT)
        path = os.pathsep.join([str(root / "src"), str(root)])
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "unshrunk"}
        self._environment = {**os.environ, **more}

    def judge(self, mutation: Mutation, suite: Sequence[str], limit: int) -> Verdict:
        """Plant a bug, run the tests that are named with it, then the suite, and take the bug out again."""
        path = self.root / mutation.file
        before, seen = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutation.planted(before), encoding="utf-8")
        try:
            total = 0.0
            for tests in filter(None, (mutation.tests, suite)):
                code, failed, seconds = self.run(tests, limit)
                total += seconds
                if code != 0:
                    return Verdict(mutation, *self._outcome(code, failed), total)
            return Verdict(mutation, "survived", "", total)
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # what was compiled of it holds again

    def _outcome(self, code: int | None, failed: str) -> tuple[Outcome, str]:
        """What a run of pytest says that did not pass; a bug may end a test's own import, but not the library's."""
        if code is None or code < 0:
            return "caught", "the time limit" if code is None else "a crash"
        if code == _TESTS_FAILED or (code == _INTERRUPTED and failed and self._python("-c", _IMPORTS).wait() == 0):
            return "caught", failed
        return "broken", "no test ran" if code == _NOTHING_RAN else f"pytest ended with {code}"

    def _python(self, *words: str, **where: Any) -> "subprocess.Popen[Any]":
        command = [sys.executable, *words]
        return subprocess.Popen(command, cwd=self.root, env=self._environment, start_new_session=True, **where)  # noqa: S603 - ours

    def run(self, tests: Iterable[str], limit: int) -> tuple[int | None, str, float]:
        """Run pytest until the first test fails: its exit code, None where it took too long, that test, and seconds."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # what other bugs failed on
        words = ["-m", "pytest", "-x", "-q", "-ra", "--tb=no", "-p", "no:cacheprovider", *tests]
        begun, said = time.perf_counter(), self.root / "said.txt"
        with said.open("w", encoding="utf-8") as file:
            process = self._python(*words, stdout=file, stderr=file)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)  # tests have processes of their own
                process.wait()
        failed = _FAILED.search(said.read_text(encoding="utf-8", errors="replace"))
        return code, failed[1] if failed else "", time.perf_counter() - begun


def judged(found: Sequence[Mutation], options: argparse.Namespace) -> Iterator[Verdict]:
    """The verdict of each, in their order. SystemExit where named tests fail without a bug."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as room, ThreadPoolExecutor(options.jobs) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(room) / str(number)))

        def judge(mutation: Mutation) -> Verdict:
            copy = copies.get()
            try:
                return copy.judge(mutation, options.suite, options.limit)
            finally:
                copies.put(copy)

        if options.baseline:
            copy = copies.get()
            code, failed, _ = copy.run(dict.fromkeys(test for one in found for test in one.tests), LIMIT * 10)
            copies.put(copy)
            if code != 0:
                raise SystemExit(f"without any bug, {failed or 'pytest'} fails: mend that first")
        yield from threads.map(judge, found)


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant these alone")
    parser.add_argument("--list", action="store_true", help="print what there is to plant, and plant nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write which test caught each into a file")
    parser.add_argument("--suite", nargs="*", default=SUITE, metavar="PATH", help="what runs where named tests pass")
    parser.add_argument("--jobs", type=int, default=1, help="bugs that are tried at a time")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds that one run of pytest may take")
    parser.add_argument("--no-baseline", dest="baseline", action="store_false", help="skip the run without a bug")
    options = parser.parse_args(words)
    console = Console(width=160, highlight=False, markup=False, soft_wrap=True)
    found = [Mutation(**row) for row in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]]
    names = Counter(one.name for one in found)
    wrong = [f"{name}: two mutations have this name" for name, count in names.items() if count > 1]
    wrong += [f"{one.name}: {fault}" for one in found for fault in one.faults()]
    wrong += [f"there is no mutation {name!r}" for name in options.only or () if name not in names]
    if wrong:
        console.print("\n".join(wrong))
        return 2
    found = [one for one in found if options.only is None or one.name in options.only]
    if options.list:
        console.print("\n".join(f"{one.name} ({one.file}): {one.seen}" for one in found))
        return 0
    known = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
    outcomes, odd = Counter[str](), list[str]()
    for mutation, outcome, by, seconds in judged(found, options):
        console.print(f"{outcome:9}{mutation.name}  {by or mutation.survives}  {seconds:.1f} s")
        outcomes[outcome] += 1
        odd += [mutation.name] if outcome != ("survived" if mutation.survives else "caught") else []
        known[mutation.name] = by if outcome == "caught" else outcome
        if options.json is not None:
            options.json.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    console.print(f"{outcomes.total()} planted, {outcomes['caught']} caught")
    console.print(f"unexpected: {', '.join(odd) or 'none'}")
    return int(bool(odd))


if __name__ == "__main__":
    sys.exit(main())
