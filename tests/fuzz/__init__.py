"""Random cases against the library's promises. `python tests/fuzz/run.py --help` runs them."""
