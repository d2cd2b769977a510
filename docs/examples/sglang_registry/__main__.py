"""Entry point of `python docs/examples/sglang_registry`."""

import sys

from registry.program import main

if __name__ == "__main__":
    sys.exit(main())
