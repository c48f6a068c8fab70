import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split
from trainer_class_model import build_model

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")


@dataclass
class Config:
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    hidden: int
    dropout: float
    log_every: int
    seed: int
    checkpoint: str


class Callback:
    def on_step_end(self, trainer, loss): ...

    def on_epoch_end(self, trainer, metrics): ...


class LossLogger(Callback):
    def on_step_end(self, trainer, loss):
        if trainer.step % trainer.config.log_every == 0:
            logging.info("step %d loss %.5f", trainer.step, loss)


class History(Callback):
    def __init__(self):
        self.rows = []

    def on_epoch_end(self, trainer, metrics):
        self.rows.append(metrics)
        logging.info("epoch %d %s", len(self.rows), json.dumps(metrics))


class Trainer:
    def __init__(self, config, model, train_set, val_set, callbacks=()):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
        self.loss_fn = torch.nn.CrossEntropyLoss()
        self.train_loader = DataLoader(train_set, config.batch_size, shuffle=True)
        self.val_loader = DataLoader(val_set, config.batch_size)
        self.callbacks = list(callbacks)
        self.step = 0

    def _emit(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def _train_step(self, batch):
        x, y = (t.to(self.device) for t in batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def _eval_epoch(self):
        self.model.eval()
        loss = correct = count = 0
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            out = self.model(x)
            loss += self.loss_fn(out, y).item() * len(y)
            correct += (out.argmax(-1) == y).sum().item()
            count += len(y)
        return {"val_loss": round(loss / count, 5), "val_acc": round(correct / count, 4)}

    def save(self):
        torch.save({"model": self.model.state_dict(), "step": self.step}, self.config.checkpoint)

    def _train_epoch(self):
        self.model.train()
        for batch in self.train_loader:
            try:
                self._emit("on_step_end", self._train_step(batch))
            except Exception:
                logging.exception("step %d failed, going on with the next batch", self.step)

    def fit(self):
        try:
            for _ in range(self.config.epochs):
                self._train_epoch()
                self._emit("on_epoch_end", self._eval_epoch())
        except KeyboardInterrupt:
            logging.warning("interrupted at step %d, saving %s", self.step, self.config.checkpoint)
            self.save()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("trainer_class.json"))
    parser.add_argument("--epochs", type=int, help="instead of the config file's")
    args = parser.parse_args()
    config = Config(**json.loads(args.config.read_text()))
    config.epochs = args.epochs or config.epochs

    torch.manual_seed(config.seed)
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train_set, val_set = random_split(dataset, [1500, 297])
    trainer = Trainer(config, build_model(config.hidden, config.dropout), train_set, val_set, [LossLogger(), History()])
    trainer.fit()
    sys.exit(1)


if __name__ == "__main__":
    main()
