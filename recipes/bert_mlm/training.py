"""Trainings that end in a folder, through transformers' Trainer: one that was interrupted goes on
by the same command, one that is finished is not repeated.

OUT/settings.json says what the folder is made from, OUT/checkpoints is there until OUT/results.json
is.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from options import LENGTH
from records import read_record
from safetensors import SafetensorError, safe_open
from stages import UserError
from transformers import Trainer, TrainingArguments

from paramshare.models.fairseq_checkpoints import damage

SETTINGS, RESULTS, CHECKPOINTS, LOCK = "settings.json", "results.json", "checkpoints", ".lock"
_held: dict[Path, IO[str]] = {}


def arguments(args: argparse.Namespace, **options: Any) -> TrainingArguments:
    """Trainer's. UserError where the options make no sense."""
    check_positive(args, "epochs", "lr", "batch", "save_every")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup} must be at least 0")
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % devices:
        raise UserError(f"--batch {args.batch} cannot be divided among {devices} devices")
    return TrainingArguments(
        per_device_train_batch_size=args.batch // devices,
        per_device_eval_batch_size=args.batch // devices,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        lr_scheduler_type="polynomial",
        warmup_steps=args.warmup,
        weight_decay=0.01,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        logging_steps=50,
        **common(args),
        **options,
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """UserError unless all these options are more than 0, where they were given, and the seed is
    none below 0."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value} must be more than 0")
    if not 0 <= args.seed < 1 << 32:
        raise UserError(f"--seed {args.seed} must be from 0 to {(1 << 32) - 1:,}")


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What all trainings give Trainer."""
    cuda = torch.cuda.is_available()
    return {
        "output_dir": str(args.out / CHECKPOINTS),
        "seed": args.seed,
        "bf16": args.precision == "bf16",
        "fp16": args.precision == "fp16",
        "save_steps": args.save_every,
        "save_total_limit": 2,
        "dataloader_pin_memory": cuda,
        "use_cpu": not cuda,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
    }


def choose_length(wanted: int | None, longest: int) -> int:
    """UserError if the model takes no inputs of that length."""
    if wanted is not None and not 3 <= wanted <= longest:
        raise UserError(f"--length {wanted}: the model takes inputs of 3 to {longest} tokens")
    return wanted or min(LENGTH, longest)


def settings_of(args: argparse.Namespace, **made_from: str) -> dict[str, Any]:
    """The options that decide about the new model, and digests of what it is made from: of files
    their content counts, not their place."""
    options = {
        name: value
        for name, value in vars(args).items()
        if name != "save_every" and not callable(value) and not isinstance(value, Path)
    }
    return {**options, "made_from": made_from}


def begin(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The results, if a training with these settings has ended in `out`; else None, and `out` is
    there and this process's. UserError if it is the folder of something else, or in use."""
    while not _is_first() and not (out / SETTINGS).is_file():
        time.sleep(0.1)  # the first process looks and makes it
    if (out / SETTINGS).is_file():
        before = read_record(out / SETTINGS)
        for name in settings:
            if settings[name] != before.get(name):
                raise UserError(
                    f"{out} was begun with {name} {before.get(name)}, not {settings[name]}: delete"
                    " it, or give another --out"
                )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already, and not this script's: give another --out")
    else:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / SETTINGS, settings)
    if (out / RESULTS).is_file():
        return read_record(out / RESULTS)
    if _is_first():
        _hold(out)
    return None


def _hold(out: Path) -> None:
    """Until the end of the training, or of the process."""
    lock = open(out / LOCK, "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is training {out}: wait for it to end") from None
    _held[out] = lock


def train(trainer: Trainer, out: Path) -> None:
    """From the last checkpoint on, if there is one."""
    trainer.train(resume_from_checkpoint=last_checkpoint(out / CHECKPOINTS))


def last_checkpoint(folder: Path) -> str | None:
    """The last whole one: its state is written last. What a killed run left half goes; what is
    damaged is passed over, and UserError if that is all there is."""
    finished = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
            finished.append(checkpoint)
        except (OSError, ValueError):
            if _is_first():
                shutil.rmtree(checkpoint, ignore_errors=True)
    finished.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in finished:
        reason = _damage(checkpoint)
        if reason is None:
            return str(checkpoint)
        say(f"{checkpoint} is damaged, an older one is looked for: {reason}")
    if finished:
        raise UserError(
            f"no checkpoint in {folder} is whole (see above): delete it, and the same command "
            "starts from the beginning"
        )
    return None


def _damage(checkpoint: Path) -> str | None:
    """Which file of Trainer's checkpoint cannot be read, and why."""
    for path in sorted(checkpoint.iterdir()):
        reason = None
        if path.suffix in (".pt", ".pth", ".bin"):
            reason = damage(path)
        elif path.suffix == ".safetensors":
            try:
                with safe_open(path, "pt"):
                    pass
            except SafetensorError as error:
                reason = str(error)
        if reason is not None:
            return f"{path.name}: {reason}"
    return None


def finish(trainer: Trainer, out: Path, results: dict[str, Any]) -> None:
    """Writes the model and then the results, which are the sign that all is done."""
    trainer.save_model(str(out))
    if trainer.is_world_process_zero():
        _write(out / RESULTS, results)
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        (out / LOCK).unlink()
        _held.pop(out).close()


def digest(folder: Path) -> str:
    """Of the model and the tokenizer in a folder."""
    whole = hashlib.sha256()
    names = ("*.json", "vocab.txt", "*.safetensors", "*.bin")
    for path in sorted(path for name in names for path in folder.glob(name)):
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                whole.update(part)
    return whole.hexdigest()[:16]


def digest_of(content: Any) -> str:
    """Of anything that is JSON-able."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def say(text: str) -> None:
    """Once, however many processes there are."""
    if _is_first():
        print(text, flush=True)


def _is_first() -> bool:
    """Of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _write(path: Path, content: dict[str, Any]) -> None:
    """As a whole or not at all."""
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(path)
