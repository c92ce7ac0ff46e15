"""What a checkpoint of fairseq says of a shared model: in the task's state and the model's."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from fairseq.tasks import FairseqTask
from torch import Tensor, nn
from zoo import batch

from fuzz.damage import HARMLESS, damaged_json, damaged_pickle, json_text
from fuzz.formats import Format, unchanged_or_loaded
from paramshare.tasks.sharing import ShareConfig, SharingTask, share_model


class Translator(nn.Module):
    """As much of fairseq's translators as sharing looks at."""

    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(60, 8)
            self.dictionary = [""]
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(), self.Side()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens) + self.decoder(tokens)


def _make_translator(folder: Path) -> None:
    torch.manual_seed(0)
    model = Translator().double()
    plans = share_model(model, ShareConfig())
    state = {"model": dict(model.state_dict()), "task_state": {"sharing_plans": plans}}
    torch.save(state, folder / "checkpoint.pt")


def _damage_translator(draw: random.Random, folder: Path) -> tuple[str, bool]:
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=False)
    if draw.random() < 0.5:
        plans, what = damaged_json(draw, state["task_state"]["sharing_plans"])
        state["task_state"]["sharing_plans"] = plans
    elif draw.random() < 0.5:
        state["model"], what = damaged_pickle(draw, state["model"], ["x"])
        torch.save(state, path)
        return what, any(f"make {how} " in what for how in HARMLESS)
    else:  # the plan that goes along with a model's state: the bytes of JSON are one
        side = draw.choice(["encoder", "decoder"])
        stored = (f"{side}.paramshare.{what}" for what in ("plan_version_1", "_extra_state"))
        name = next(name for name in stored if name in state["model"])
        plan, what = damaged_json(draw, state["task_state"]["sharing_plans"][side])
        state["model"][name] = torch.tensor(list(json_text(plan).encode()))
    torch.save(state, path)
    return f"plans: {what}", True


def _load_translator(folder: Path, draw: random.Random) -> Tensor:
    class Task(SharingTask, FairseqTask):
        pass

    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    torch.manual_seed(1)
    model, task = Translator().double(), Task.__new__(Task)
    FairseqTask.__init__(task, None)

    def load() -> None:
        task.load_state_dict(state["task_state"])
        task.share(model, from_checkpoint=True)

    unchanged_or_loaded(model, load)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        return model(batch()[0])


FORMATS = {
    "shared translator": Format(
        _make_translator,
        _damage_translator,
        _load_translator,
        said="Error(s) in loading state_dict",
    )
}
