"""SGLang's own registry, loaded from its wheel: three of its modules, beside stand-ins for what they import."""

import ast
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch

VERSION: Final = "0.5.23"
VARIABLE: Final = "SGLANG_WHEEL"
"""The environment variable that names the wheel."""
ONE_WHEEL: Final = ("--python-version=3.11", "--platform=manylinux_2_34_x86_64", "--only-binary=:all:")
"""The same wheel for each Python, since none of its compiled modules is loaded."""
RANKS: Final = types.SimpleNamespace(num_dp_ranks=1, attn_tp_size=2, attn_tp_rank=1)
"""What the stand-in for SGLang's parallel state says: the second of two ranks, each with a half of the tokens."""
COUNTS: Final = "sglang.srt.model_executor.forward_batch_info"
LOADED: Final = (
    "sglang.srt.environ",
    "sglang.kernels.ops.memory.small_copy",
    "sglang.srt.model_executor.input_buffers",
    "sglang.srt.model_executor.cuda_graph_buffer_registry",
)


class NoWheelError(Exception):
    """The wheel is not here. The message says why, and what to do."""


@attrs.frozen
class Original:
    """SGLang's modules.

    Attributes:
        registry: The registry's module.
        inputs: The module of buffers that runners share.
    """

    registry: Any
    inputs: Any

    def forget_pool(self) -> None:
        """Forget the memory that slots of one name share, so that registries made later have their own."""
        self.inputs._forward_input_buffer_pool.clear()  # noqa: SLF001 - SGLang has no other way


def find_wheel(path: pathlib.Path | None, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the wheel of SGLang: at a path, at that of the environment variable, or downloaded.

    Args:
        path: The wheel, if the caller knows it.
        folder: Where a downloaded wheel stays. None: nothing is downloaded.

    Raises:
        NoWheelError: There is none.
    """
    named = path or (pathlib.Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            raise NoWheelError(f"there is no file {named}")
        return named
    hint = f"`pip download --no-deps sglang=={VERSION}` makes the file that {VARIABLE} or --wheel names"
    if folder is None:
        raise NoWheelError(f"no wheel of SGLang: {hint}")
    found = sorted(folder.glob(f"sglang-{VERSION}-*.whl"))
    if not found:
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=10", *ONE_WHEEL]
        try:
            done = subprocess.run(  # noqa: S603 - pip, of this Python
                [sys.executable, *words, "--dest", str(folder), f"sglang=={VERSION}"],
                check=False,
                capture_output=True,
                encoding="utf-8",
                timeout=120,
            )
        except subprocess.TimeoutExpired:
            raise NoWheelError(f"the download of SGLang's wheel took over two minutes: {hint}") from None
        found = sorted(folder.glob(f"sglang-{VERSION}-*.whl"))
        if not found:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise NoWheelError(f"SGLang's wheel cannot be downloaded ({last}): {hint}")
    return found[0]


@contextlib.contextmanager
def loaded(wheel: pathlib.Path) -> Iterator[Original]:
    """Load SGLang's registry while a block runs. Afterwards its modules and the stand-ins are gone again."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    try:
        with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
            yield _load(files, pathlib.Path(folder))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def _load(files: zipfile.ZipFile, folder: pathlib.Path) -> Original:
    _stand_in("sglang.srt.utils", is_npu=lambda: False)
    _stand_in("sglang.srt.runtime_context", get_parallel=lambda: RANKS)
    _stand_in(COUNTS, **_functions(_source(files, COUNTS), ("_attn_tp_local", "compute_local_num_token")))
    modules = [
        _module(name, _source(files, name), folder)
        for name in LOADED
        if torch.cuda.is_available() or "small_copy" not in name
    ]
    *_, inputs, registry = modules
    return Original(registry, inputs)


def _source(files: zipfile.ZipFile, name: str) -> str:
    return files.read(name.replace(".", "/") + ".py").decode()


def _stand_in(name: str, **content: Any) -> types.ModuleType:
    """Make a module that holds nothing but these names, and the packages that it is in."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        _stand_in(parent)
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(content)
    sys.modules[name] = made
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


def _module(name: str, source: str, folder: pathlib.Path) -> types.ModuleType:
    """Run a module's own source, from a file: triton reads the source of a kernel from there."""
    file = folder / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    made = _stand_in(name, __file__=str(file))
    exec(compile(source, str(file), "exec"), vars(made))  # noqa: S102 - SGLang's own module
    return made


def _functions(source: str, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Run a few functions of a module that imports too much to be loaded."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith(prefixes)]
    space: dict[str, Any] = {"torch": torch, "Tuple": tuple, "get_parallel": lambda: RANKS}
    exec(compile(tree, f"sglang wheel: {COUNTS}", "exec"), space)  # noqa: S102 - SGLang's own functions
    return {name: one for name, one in space.items() if isinstance(one, types.FunctionType)}
