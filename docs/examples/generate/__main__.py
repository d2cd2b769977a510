"""Entry point of `python docs/examples/generate`."""  # noqa: INP001 - a folder that is run, not imported

import sys

from serving.program import main

if __name__ == "__main__":
    sys.exit(main())
