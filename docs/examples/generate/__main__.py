"""Entry point of `python docs/examples/generate`."""

import sys

from serving.program import main

if __name__ == "__main__":
    sys.exit(main())
