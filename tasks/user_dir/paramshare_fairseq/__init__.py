"""For `fairseq-train --user-dir`: registers paramshare's plugins and does nothing else."""

import paramshare.tasks  # noqa: F401
