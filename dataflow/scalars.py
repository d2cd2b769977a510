"""Numbers as a declaration gives them: Python's own, and NumPy's, which are taken for the same number of Python's."""

from typing import Any

import numpy as np


def python_number(value: Any) -> Any:
    """A NumPy number as Python's own; all else as it is."""
    if isinstance(value, np.floating):
        return float(value)
    return value.item() if isinstance(value, np.bool_ | np.integer) else value
