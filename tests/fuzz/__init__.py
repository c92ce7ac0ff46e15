"""Random cases against the library's promises. `python tests/fuzz/run.py --help` runs them."""

import sys
from pathlib import Path

# Helpers of other tests, wherever the cases run.
sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("models", "recipes")]
