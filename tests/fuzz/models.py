"""Runs cases of random models: `check_case` is one of them."""

from __future__ import annotations

import copy
import io
import random
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from warned import filtered

from fuzz.drawing import draw_case
from fuzz.found import Found
from fuzz.invariants import CHECKS, Subject, values_of
from fuzz.parts import build
from fuzz.sharing import share_all
from fuzz.watchdog import TooSlow, bounded


def check_seed(seed: int, tally: Counter[str]) -> None:
    """Runs the case of a seed. Raises Found."""
    check_case(draw_case(seed), tally)


def check_case(case: dict[str, Any], tally: Counter[str]) -> None:
    where = "build"
    try:
        with bounded(), filtered("ignore"), tempfile.TemporaryDirectory() as folder:
            try:
                module = build(case["model"])
                values_of(module, torch.zeros(1, 3, dtype=torch.long))
            except Exception:
                tally["models that do not run"] += 1
                where = "share"
                share_all(build(case["model"]), case["calls"])
                return
            where = "share"
            module = build(case["model"])
            messages = share_all(module, case["calls"])
            tally["calls refused"] += len([m for m in messages if m])
            tally["calls accepted"] += messages.count("")
            if "" not in messages:
                tally["cases refused"] += 1
                return
            tally["cases accepted"] += 1
            for stage in case["model"]["stages"]:
                tally[stage["kind"]] += 1
            subject = Subject(case, module, Path(folder))
            draw = random.Random(case["model"]["seed"])
            names = list(CHECKS) if _can_be_copied(subject) else ["forward", "gradients"]
            for where in names:
                check = CHECKS[where]
                if draw.random() < 0.3:
                    with redirect_stdout(io.StringIO()):  # choices are printed
                        check(subject)
                    tally[f"checks: {where}"] += 1
    except (Exception, TooSlow) as error:
        if isinstance(error, Found):
            raise
        kind = f"{where}: {type(error).__name__}"
        raise Found(kind, str(error)) from error


def _can_be_copied(subject: Subject) -> bool:
    """Whether torch copies the plain model after a step: none with a weight-normed LSTM."""
    plain = subject.plain()
    plain(subject.tokens)
    values_of(plain, subject.tokens)
    try:
        copy.deepcopy(plain)
    except RuntimeError as error:
        if "graph leaves" in str(error):
            return False
        raise
    return True
