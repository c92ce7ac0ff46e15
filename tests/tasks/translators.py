"""fairseq's options for small translators of each architecture, and for their task; and those that
are built by them."""

from pathlib import Path
from typing import Any

import torch

SIDES = ("encoder", "decoder")
SIZES = [
    f"--{side}-{what}={value}"
    for side in SIDES
    for what, value in (
        ("layers", 2),
        ("embed-dim", 32),
        ("ffn-embed-dim", 48),
        ("attention-heads", 2),
    )
]
MODEL = ["--arch", "transformer_iwslt_de_en", *SIZES, "--dropout", "0"]
# Both have four layers on each side.
LSTM = ["--arch", "lstm", "--dropout", "0", "--decoder-out-embed-dim=16"]
LSTM += [f"--{side}-{what}" for side in SIDES for what in ("embed-dim=16", "layers=4")]
FCONV = ["--arch", "fconv", "--dropout", "0", "--decoder-out-embed-dim=16"]
FCONV += [f"--{side}-embed-dim=16" for side in SIDES]
FCONV += [f"--{side}-layers=[(16, 3)] * 4" for side in SIDES]

TASK = ["--task", "shared_translation", "--source-lang", "en", "--target-lang", "vi"]


def build(data: Path, *more: str, model: list[str] = MODEL) -> tuple[Any, torch.nn.Module]:
    """(task, model) as fairseq-train would build them."""
    # Not at the top of the file, which is imported where there is no fairseq, too.
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import paramshare.tasks  # noqa: F401  registers the task

    torch.manual_seed(0)
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(data), *TASK, *model, "--cpu", *more])
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)


def inputs() -> dict[str, torch.Tensor]:
    """Of a batch of two sentences."""
    source = torch.tensor([[5, 6, 7, 8, 2], [1, 1, 9, 10, 2]])
    return {
        "src_tokens": source,
        "src_lengths": torch.tensor([5, 3]),
        "prev_output_tokens": torch.tensor([[2, 5, 6, 7], [2, 9, 1, 1]]),
    }
