"""Programs on the stand-in, each in a process of its own: for settings that are read once, and what a start does."""

from tests.programs import python


def program(source: str, **environment: str) -> list[str]:
    """Run a program, and return the lines that it prints; it may fail once it has printed some."""
    done = python("-c", source, env={"PYTHONWARNINGS": "ignore", **environment})
    assert not done.returncode or done.stdout, done.stderr
    return done.stdout.strip().splitlines()
