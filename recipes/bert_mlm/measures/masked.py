"""How well a model fills in masked tokens."""

from pathlib import Path

import torch
from folders import device, load_model, load_tokenizer
from masking import IGNORED, Blocks, Masks, load_blocks
from stages import UserError
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerBase

MASK_SEED = 1
BATCH = 32


def score(folder: Path, tokenizer: PreTrainedTokenizerBase, data: Path) -> dict[str, float]:
    """Cross-entropy (nats) and accuracy (%) at the masked tokens of the dev blocks. UserError."""
    model, info = load_model(AutoModelForMaskedLM, folder, output_loading_info=True)
    if info["missing_keys"]:
        raise UserError(
            f"{folder} has no output layer for masked tokens; --only takes other measures"
        )
    if load_tokenizer(data / "tokenizer").get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{folder} has another tokenizer than the blocks of {data}")
    blocks = load_blocks(data / "blocks", "dev")
    if blocks[0].shape[1] > model.config.max_position_embeddings:
        raise UserError(f"{folder} takes no blocks of {blocks[0].shape[1]} tokens")
    examples = Blocks(blocks, Masks(tokenizer), MASK_SEED)
    model.eval().to(device())
    loss, right, count = 0.0, 0, 0
    for batch in torch.utils.data.DataLoader(examples, BATCH):
        labels = batch["labels"].to(device())
        masked = labels != IGNORED
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"].to(device())).logits[masked].float()
        loss += F.cross_entropy(logits, labels[masked], reduction="sum").item()
        right += int((logits.argmax(-1) == labels[masked]).sum())
        count += int(masked.sum())
    return {"loss": loss / count, "accuracy": 100 * right / count, "masked": count}
