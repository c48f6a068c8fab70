"""Learn handwritten digits: a LightningModule in Lightning's Trainer, which knows nothing of autotune."""

import argparse
import json

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitClassifier(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # Lightning need not be installed
    """A small convolutional network: images `[batch, 1, 8, 8]` -> logits `[batch, 10]`."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.network = nn.Sequential(*stem, nn.Flatten(), nn.Linear(96 * 16, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def on_validation_epoch_end(self) -> None:
        self.print(json.dumps({"accuracy": self.trainer.callback_metrics["accuracy"].item()}), flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train; the Trainer validates, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    options = parser.parse_args()

    lightning.seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, validation = random_split(data, [11 * 128, len(data) - 11 * 128])
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accumulate_grad_batches=options.accumulate_grad_batches, log_every_n_steps=10
    )
    trainer.fit(DigitClassifier(), loader, DataLoader(validation, batch_size=256))


if __name__ == "__main__":
    main()
