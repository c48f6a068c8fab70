import argparse
import collections
import math
import os
import pathlib
import re

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="RNN/LSTM language model")
parser.add_argument("--nhid", type=int, default=128, help="number of hidden units per layer")
parser.add_argument("--lr", type=float, default=5, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=4, help="upper epoch limit")
parser.add_argument("--batch_size", type=int, default=20, metavar="N", help="batch size")
parser.add_argument("--bptt", type=int, default=35, help="sequence length")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=50)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

library = pathlib.Path(os.__file__).parent
words = []
for path in sorted(library.glob("[a-d]*.py")):
    words += re.findall(r"\w+|[^\w\s]|\n", path.read_text(encoding="utf-8"))[:8000]
common = [w for w, _ in sorted(collections.Counter(words).items(), key=lambda kv: (-kv[1], kv[0]))[:999]]
word2idx = {w: i for i, w in enumerate(["<unk>", *common])}
ids = torch.tensor([word2idx.get(w, 0) for w in words])


def batchify(data, bsz):
    # Work out how cleanly we can divide the dataset into bsz parts.
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


cut = int(len(ids) * 0.93)
train_data, val_data = batchify(ids[:cut], args.batch_size), batchify(ids[cut:], 10)


class RNNModel(nn.Module):
    def __init__(self, ntoken, nhid, nlayers=2, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, repackage_hidden(hidden))
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch, lr):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur = total_loss / args.log_interval
            print(f"| epoch {epoch:3d} | batch {batch:5d} | lr {lr:02.2f} | loss {cur:5.2f} | ppl {math.exp(cur):8.2f}")
            total_loss = 0.0


model = RNNModel(len(word2idx), args.nhid, dropout=args.dropout).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
best_val_loss = None
for epoch in range(1, args.epochs + 1):
    train(epoch, optimizer.param_groups[0]["lr"])
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
    if best_val_loss is None or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        optimizer.param_groups[0]["lr"] /= 4.0  # anneal when there is no improvement
