"""Entry point of `python docs/examples/continuous_batching`."""

import os
import sys
from pathlib import Path

# Threads that spin keep others from their work on a busy machine. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generate"))  # the demo's package: serving

from batching.program import main

if __name__ == "__main__":
    sys.exit(main())
