"""Learn Python's standard library byte by byte: a GPT-2 in Hugging Face's Trainer, which knows nothing of autotune."""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

WINDOW_LENGTH = 64


class SourceWindows(Dataset[dict[str, Tensor]]):
    """Source of the standard library as windows of bytes, int64 `[64]`, which are their own labels."""

    def __init__(self, pattern: str) -> None:
        source = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob(pattern)))
        self.windows = torch.frombuffer(bytearray(source), dtype=torch.uint8).unfold(0, WINDOW_LENGTH, WINDOW_LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train with the flags of TrainingArguments; the Trainer evaluates, prints and saves."""
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type, unused-ignore]
    parser.set_defaults(per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=20, logging_steps=50)
    parser.set_defaults(eval_strategy="steps", eval_steps=50, per_device_eval_batch_size=64)
    (arguments,) = parser.parse_args_into_dataclasses()

    set_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW_LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=SourceWindows("[a-t]*.py"),
        eval_dataset=SourceWindows("u*.py"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
