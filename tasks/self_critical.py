"""Criterion `self_critical`: self-critical training of captioners with CIDEr-D as the reward.

Rennie et al., https://arxiv.org/abs/1612.00563, with the mean reward of a picture's other samples
as the baseline. The end of a caption is a token of the reward, too, or captions would be trained to
break off (https://arxiv.org/abs/2305.12254).
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from torch import Tensor, nn

from paramshare import ShareError
from paramshare.tasks.cider import CiderD, Vector


@dataclass
class SelfCriticalConfig(FairseqDataclass):
    samples: int = field(default=5, metadata={"help": "captions sampled for a picture"})
    longest_sample: int = field(default=20, metadata={"help": "most tokens of a sampled caption"})


@register_criterion("self_critical", dataclass=SelfCriticalConfig)
class SelfCriticalCriterion(FairseqCriterion):
    """The loss in training is -(reward - baseline) x log probability of sampled tokens; in
    validation it is the negative reward (CIDEr-D, at most 10) of greedy captions."""

    def __init__(self, task: Any, samples: int, longest_sample: int) -> None:
        super().__init__(task)
        if not hasattr(task, "feature_width"):
            raise ShareError("--criterion self_critical needs --task shared_captioning")
        if samples < 2:
            raise ShareError(f"--samples {samples}: the baseline of one are the others, use 2 on")
        self.samples, self.longest = samples, longest_sample
        self._references: dict[str, dict[int, list[Vector]]] = {}
        self._reward: CiderD | None = None

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        split = "train" if model.training else "valid"
        count = self.samples if model.training else 1
        captions = self._captions(model, sample, count)
        rewards = self.rewards(split, sample["id"].tolist(), captions)
        logged = {
            "nsentences": sample["nsentences"],
            "ntokens": sample["ntokens"],
            "reward": rewards.mean(1).sum().item(),
            "length": sum(len(x) for x in captions) / count,
        }
        if not model.training:
            loss = -rewards.sum().to(sample["target"].device)
            return loss, sample["nsentences"], {**logged, **_sized(loss, sample["nsentences"])}
        others = (rewards.sum(1, keepdim=True) - rewards) / (count - 1)
        likely, there = self._log_probabilities(model, sample, captions)
        advantage = (rewards - others).flatten().to(likely)
        loss = -(advantage[:, None] * likely * there).sum()
        tokens = int(there.sum())
        return loss, tokens, {**logged, **_sized(loss, tokens)}

    def rewards(self, split: str, pairs: list[int], captions: list[Tensor]) -> Tensor:
        """CIDEr-D `(pictures, samples)` of the captions of pairs of a split, with the document
        frequencies of the training captions."""
        data = self.task.datasets[split]
        if self._reward is None:
            self._reward = CiderD(self._of_pictures("train").values())
        if split not in self._references:
            self._references[split] = {
                picture: [self._reward.vector(caption) for caption in captions]
                for picture, captions in self._of_pictures(split).items()
            }
        references = self._references[split]
        each = len(captions) // len(pairs)
        scores = [
            self._reward.score(tuple(caption.tolist()), references[data.pictures[pairs[n // each]]])
            for n, caption in enumerate(captions)
        ]
        return torch.tensor(scores).view(len(pairs), each)

    def _of_pictures(self, split: str) -> dict[int, list[tuple[int, ...]]]:
        data = self.task.datasets[split]
        found = defaultdict(list)
        for picture, target in zip(data.pictures, data.targets, strict=True):
            found[picture].append(tuple(target.tolist()))
        return found

    @torch.no_grad()
    def _captions(self, model: nn.Module, sample: dict[str, Any], count: int) -> list[Tensor]:
        """So many captions of each picture: sampled, or the greedy one. The end is in them."""
        options = replace(
            GenerationConfig(),
            beam=count,
            nbest=count,
            sampling=count > 1,
            max_len_b=self.longest,
        )
        training = model.training
        bare = getattr(model, "module", model)  # without DistributedDataParallel
        generator = self.task.build_generator([bare], options)
        inputs = {
            name: x for name, x in sample["net_input"].items() if name != "prev_output_tokens"
        }
        found = self.task.inference_step(generator, [bare], {"net_input": inputs})
        model.train(training)
        return [hypothesis["tokens"].cpu() for each in found for hypothesis in each[:count]]

    def _log_probabilities(
        self, model: nn.Module, sample: dict[str, Any], captions: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of each token of the captions, `(pictures x samples, length)`, and where there is one."""
        device = sample["target"].device
        pad, eos = self.padding_idx, self.task.target_dictionary.eos()
        target = data_utils.collate_tokens(captions, pad, eos).to(device)
        previous = data_utils.collate_tokens(captions, pad, eos, move_eos_to_beginning=True)
        repeated = {
            name: x.repeat_interleave(self.samples, 0) for name, x in sample["net_input"].items()
        }
        output = model(**{**repeated, "prev_output_tokens": previous.to(device)})
        likely = model.get_normalized_probs(output, log_probs=True)
        there = target.ne(pad)
        return likely.gather(2, target[..., None]).squeeze(2), there

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        total = {
            name: utils.item(sum(x.get(name, 0) for x in logging_outputs))
            for name in ("loss", "sample_size", "nsentences", "reward", "length")
        }
        pictures = max(total["nsentences"], 1)
        metrics.log_scalar("loss", total["loss"] / max(total["sample_size"], 1), pictures, round=4)
        metrics.log_scalar("reward", total["reward"] / pictures, pictures, round=4)
        metrics.log_scalar("length", total["length"] / pictures, pictures, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def _sized(loss: Tensor, size: int) -> dict[str, Any]:
    return {"loss": loss.detach(), "sample_size": size}
