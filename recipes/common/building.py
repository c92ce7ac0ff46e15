"""The model of a fairseq-train command, without training it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def build(arguments: Sequence[str]) -> tuple[Any, Any]:
    """(task, model) as `fairseq-train ARGUMENTS` would build them. Raises ShareError."""
    import torch
    from fairseq import options, tasks

    # Not by hydra's configuration, which would take longer than the model.
    parsed = options.parse_args_and_arch(options.get_training_parser(), list(arguments))
    torch.manual_seed(parsed.seed)
    task = tasks.setup_task(parsed)
    return task, task.build_model(parsed)
