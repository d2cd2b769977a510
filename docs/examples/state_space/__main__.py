"""Entry point of `python docs/examples/state_space`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generate"))  # the demo's package: serving

from states.program import main

if __name__ == "__main__":
    sys.exit(main())
