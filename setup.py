"""What pyproject.toml cannot say: the package index shows README with links that lead to the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]

readme = (ROOT / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"\]\((?!https?:|#)([^)]+\.svg)\)", rf"]({SOURCE}/raw/main/\1)", readme)
readme = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({SOURCE}/blob/main/\1)", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
