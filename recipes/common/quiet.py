"""Importing paramshare.tasks imports all of fairseq, which warns of what is not used here."""

import logging
import warnings


def import_tasks() -> None:
    """And the logs of other libraries, which fairseq turns on."""
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    import paramshare.tasks  # noqa: F401

    logging.getLogger().setLevel(logging.WARNING)
