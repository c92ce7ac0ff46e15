"""What a fresh process takes to load an encoder from its file and to answer for the first time.

`measure` starts this file as that process. Models are built without memory and given the tensors
of the file, which are mapped into memory: what is never read is never loaded.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from encoders import Encoder, Shape, repeat, skeleton
from rivals import OURS, RIVALS
from safetensors.torch import load_file, save_file

import paramshare
from paramshare.trace import Allocations

TINY = Shape(16, 16, 16, 16, 1)


def measure(
    shape: Shape, rivals: tuple[str, ...], batch: int, length: int, rounds: int = 1
) -> dict[str, list[dict[str, float]]]:
    """Of each rival, one dict a round, in which each has one process: bytes, and seconds that only
    mean something against another rival's of that round.

    stored: of the file; load: seconds until the model is there; answer: seconds until the first
    output is; resident: by how much the process' peak exceeds what it takes after its imports;
    traced: the peak of all tensors that the forward pass allocated; largest: the largest of them.
    """
    found: dict[str, list[dict[str, float]]] = {rival: [] for rival in rivals}
    with tempfile.TemporaryDirectory() as folder:
        files = {rival: Path(folder) / f"{rival}.safetensors" for rival in rivals}
        for rival, file in files.items():
            _save(shape, rival, file)
        for _ in range(rounds):
            for rival, file in files.items():
                task = {"shape": asdict(shape), "rival": rival, "batch": batch, "length": length}
                command = [sys.executable, __file__, json.dumps({**task, "file": str(file)})]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                found[rival].append({"stored": file.stat().st_size, **json.loads(done.stdout)})
    return found


def _save(shape: Shape, rival: str, file: Path) -> None:
    if rival in OURS:
        paramshare.save_model(OURS[rival](shape), file)
    elif rival == "reused":
        save_file(RIVALS["dense"](shape.one_layer()).state_dict(), file)
    else:
        save_file(RIVALS[rival](shape).state_dict(), file)


def _load(shape: Shape, rival: str, file: str) -> Encoder:
    model = skeleton(shape.one_layer() if rival == "reused" else shape)
    if rival in OURS:
        paramshare.load_model(model, file)
    else:
        model.load_state_dict(load_file(file), assign=True)
    return repeat(model, shape.depth) if rival == "reused" else model


def _peak() -> int:
    """The most that has been resident. Linux' ru_maxrss would count the parent before exec, too."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@torch.no_grad()
def main(shape: dict[str, int], rival: str, batch: int, length: int, file: str) -> None:
    # What torch imports and allocates for its first product, and for meta tensors, is no model's.
    torch.ones(2, 2) @ torch.ones(2, 2)
    skeleton(TINY)
    before = _peak()
    start = time.perf_counter()
    model = _load(Shape(**shape), rival, file).eval()
    load = time.perf_counter() - start
    with Allocations() as trace:
        model(torch.zeros(batch, length, dtype=torch.long))
    found = {"load": load, "answer": time.perf_counter() - start, "resident": _peak() - before}
    print(json.dumps({**found, "traced": trace.peak, "largest": trace.largest}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
