"""Entry point of `python docs/examples/generate`."""

import os
import sys

# Threads that spin keep others from their work on a busy machine. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from serving.program import main

if __name__ == "__main__":
    sys.exit(main())
