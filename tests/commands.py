"""Command lines, run as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def python(*arguments: object, **options) -> subprocess.CompletedProcess:
    """This interpreter with the arguments; stdout and stderr are captured as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, **options
    )


def fairseq(name: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """fairseq-NAME."""
    return python("-m", f"fairseq_cli.{name}", *arguments, **options)


# fairseq gives its default, torch's DistributedDataParallel, the GPU's number, which that refuses
# where there is none.
_DDP_ON_CPU = """
from fairseq_cli.train import cli_main
from fairseq.models import distributed_fairseq_model as wrapping

class OnCpu(wrapping.DistributedDataParallel):
    def __init__(self, *, device_ids, output_device, **options):
        super().__init__(**options)

wrapping.DistributedDataParallel = OnCpu
cli_main()
"""


def fairseq_train_workers(store: Path, *arguments: object) -> list[subprocess.CompletedProcess]:
    """fairseq-train by two workers at once, without a GPU. fairseq by itself starts one worker for
    each GPU, so they are started here; `store`, a file that is not there, is where they meet."""
    common = [
        *("--cpu", "--distributed-backend", "gloo", "--distributed-world-size", 2),
        *("--distributed-no-spawn", "--distributed-init-method", f"file://{store}"),
    ]
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(python, "-c", _DDP_ON_CPU, *arguments, *common, "--distributed-rank", rank)
            for rank in range(2)
        ]
        return [call.result() for call in calls]
