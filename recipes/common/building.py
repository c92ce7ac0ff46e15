"""The model of a fairseq-train command, without training it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


def build(arguments: Sequence[str]) -> tuple[Any, Any]:
    """(task, model) as `fairseq-train ARGUMENTS` would build them. Raises ShareError."""
    import torch
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parsed = options.parse_args_and_arch(options.get_training_parser(), list(arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq uses what hydra will remove
        cfg = convert_namespace_to_omegaconf(parsed)
    torch.manual_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)
