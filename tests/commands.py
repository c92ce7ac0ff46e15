"""Command lines, run as a user would run them."""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
# Imported once, by the process that all others are forked from: most of a command's time.
FORKS.set_forkserver_preload(
    [
        *("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "paramshare"),
        *("fairseq.trainer", "fairseq.sequence_generator", "transformers.trainer"),
    ]
)


def python(*arguments: object, **options) -> subprocess.CompletedProcess:
    """This interpreter with the arguments; stdout and stderr are captured as text."""
    command = list(map(str, arguments))
    threads = options.get("env", os.environ).get("OMP_NUM_THREADS")  # read by what is preloaded
    if _is_slow_to_start(command) and threads == os.environ.get("OMP_NUM_THREADS"):
        return _forked(command, **options)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)


def _is_slow_to_start(command: list[str]) -> bool:
    if command[0] == "-m":
        return command[1].startswith("fairseq_cli.")
    if command[0] == "-c":
        return command[1] == _DDP_ON_CPU
    return Path(command[0]).is_relative_to(ROOT / "recipes")


def _forked(
    command: list[str],
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    input: str = "",
) -> subprocess.CompletedProcess:
    """The command in a process that is forked where torch, fairseq and transformers have been
    imported. Otherwise as by a fresh interpreter: nothing of pytest or of other commands."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [f"{folder}/{name}" for name in ("stdin", "stdout", "stderr")]
        Path(streams[0]).write_text(input, "utf-8")
        arguments = command, str(cwd or Path.cwd()), dict(env), streams, _search_path()
        process = FORKS.Process(target=_as_main, args=arguments)
        process.start()
        process.join()
        said = (Path(stream).read_text("utf-8") for stream in streams[1:])
        return subprocess.CompletedProcess(command, process.exitcode, *said)


@cache
def _search_path() -> list[str]:
    """Where a fresh interpreter looks for modules: not where pytest does."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))


def _as_main(
    command: list[str], cwd: str, env: dict[str, str], streams: list[str], path: list[str]
) -> None:
    sys.stdin = open(streams[0], encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    for number, stream in enumerate(streams[1:], 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    logging.root.handlers.clear()  # of what was imported: commands set up their own
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for name in [name for name, module in sys.modules.items() if _lies_in_tests(module)]:
        del sys.modules[name]
    try:
        if command[0] == "-m":
            sys.argv, sys.path = command[1:], [cwd, *path]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv, sys.path = ["-c", *command[2:]], [cwd, *path]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv, sys.path = command, [str(Path(command[0]).parent), *path]
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out


def _lies_in_tests(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(ROOT / "tests")


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
