import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batchSize", type=int, default=64, help="input batch size")
parser.add_argument("--nz", type=int, default=32, help="size of the latent z vector")
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=7)
opt = parser.parse_args()

torch.manual_seed(opt.manualSeed)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
dataloader = DataLoader(TensorDataset(images), batch_size=opt.batchSize, shuffle=True)


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, 96, 2, 1, 0, bias=False),
    nn.BatchNorm2d(96),
    nn.ReLU(True),
    nn.ConvTranspose2d(96, 48, 4, 2, 1, bias=False),
    nn.BatchNorm2d(48),
    nn.ReLU(True),
    nn.ConvTranspose2d(48, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(1, 48, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(48, 96, 4, 2, 1, bias=False),
    nn.BatchNorm2d(96),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(96, 1, 2, 1, 0, bias=False),
    nn.Sigmoid(),
    nn.Flatten(0),
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
fixed_noise = torch.randn(256, opt.nz, 1, 1, device=device)

for epoch in range(opt.epochs):
    for i, (real,) in enumerate(dataloader):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = real.to(device)
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(real.size(0), opt.nz, 1, 1, device=device))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)  # fake labels are real for the generator's cost
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        if i % 10 == 0:
            print(f"[{epoch}/{opt.epochs}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")

    with torch.no_grad():
        fake = netG(fixed_noise).cpu()
        distance = (fake.mean(0) - images.mean(0)).pow(2).mean() + (fake.std(0) - images.std(0)).pow(2).mean()
    print(f"epoch {epoch}: distance of the moments {distance:.4f}")
