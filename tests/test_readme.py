"""The README's own example: it runs, and passes every check."""

import pathlib
import re
import sys

import pytest
import typer.testing

from slotgraph.runners.commands.app import app

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_example_passes_its_own_check(
    backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved to a file, its runner has no finding, by the command that the README names."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    code = "".join(block for block in blocks if ">>>" not in block)
    assert 'backend="cpu"' in code
    file = tmp_path / "read_me_example.py"
    file.write_text(code.replace('backend="cpu"', f'backend="{backend}"'), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "read_me_example", raising=False)
    done = typer.testing.CliRunner().invoke(app, ["check", f"{file}:runner", "--seed", "0"])
    assert done.exit_code == 0, done.output
    assert "no findings" in done.stdout
