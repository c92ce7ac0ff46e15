"""The model of a run, without training it."""

from __future__ import annotations

import warnings
from typing import Any

from train import Run


def build(run: Run) -> tuple[Any, Any]:
    """(task, model) as fairseq-train would build them. Raises ShareError."""
    import torch
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    arguments = options.parse_args_and_arch(options.get_training_parser(), run.command()[3:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq uses what hydra will remove
        cfg = convert_namespace_to_omegaconf(arguments)
    torch.manual_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)
