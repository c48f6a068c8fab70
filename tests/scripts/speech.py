import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

N_SYMBOLS, N_MELS = 12, 24


class Utterances(Dataset):
    """Spoken symbol strings: each symbol is two to five noisy frames of its own spectrum."""

    def __init__(self, n, seed):
        spectra = torch.randn(N_SYMBOLS + 1, N_MELS, generator=torch.Generator().manual_seed(0))
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            text = torch.randint(1, N_SYMBOLS + 1, (int(torch.randint(3, 13, (1,), generator=g)),), generator=g)
            frames = spectra[text.repeat_interleave(torch.randint(2, 6, (len(text),), generator=g))]
            self.items.append((frames + 0.7 * torch.randn(frames.shape, generator=g), text))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketSampler(Sampler):
    def __init__(self, lengths, batch_size, seed=0):
        by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.bins = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.bins)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for b in torch.randperm(len(self.bins), generator=g).tolist():
            bin_ = self.bins[b]
            yield [bin_[i] for i in torch.randperm(len(bin_), generator=g).tolist()]


def collate(batch):
    frames, texts = zip(*batch, strict=True)
    return (
        pad_sequence(frames, batch_first=True),
        torch.tensor([len(f) for f in frames]),
        pad_sequence(texts, batch_first=True),
        torch.tensor([len(t) for t in texts]),
    )


class AcousticModel(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.gru = nn.GRU(N_MELS, hidden, num_layers=1, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, N_SYMBOLS + 1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return F.log_softmax(self.fc(out), dim=-1)


def ctc(model, batch, device):
    frames, frame_lengths, texts, text_lengths = batch
    log_probs = model(frames.to(device), frame_lengths)
    loss = F.ctc_loss(log_probs.transpose(0, 1), texts.to(device), frame_lengths, text_lengths, zero_infinity=True)
    return loss, log_probs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, dev_set = Utterances(1500, 1), Utterances(100, 2)
    sampler = BucketSampler([len(f) for f, _ in train_set.items], args.batch_size, seed=args.seed)
    train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(dev_set, batch_size=25, collate_fn=collate)
    model = AcousticModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        for batch in train_loader:
            loss, _ = ctc(model, batch, device)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        exact = 0
        with torch.no_grad():
            for batch in dev_loader:
                _, log_probs = ctc(model, batch, device)
                for path, n, text, m in zip(log_probs.argmax(-1).cpu(), *batch[1:], strict=True):
                    symbols = path[:n].unique_consecutive()
                    exact += symbols[symbols > 0].tolist() == text[:m].tolist()
        print(f"epoch {epoch} train ctc {sum(losses) / len(losses):.4f} dev exact {exact / len(dev_set):.3f}")


if __name__ == "__main__":
    main()
