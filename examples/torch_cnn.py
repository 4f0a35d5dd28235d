"""Train a small CNN on Fashion-MNIST across ten clients: python torch_cnn.py FOLDER."""

import sys

from torch import nn

import dpfed
from dpfed.data.sources.mnist import FashionMnist

# Without a folder, the error says which files to download.
source = FashionMnist(path=next(iter(sys.argv[1:]), None)).load()
train, test = ((t.inputs["pixel_values"], t.labels) for t in (source.train, source.test))
# GroupNorm, not BatchNorm: a layer must not mix the records of a batch.
features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
net = nn.Sequential(features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
# Random weights have far to go, so the rate is larger than the recipe's.
trained = dpfed.fine_tune(net, train, test, clients=10, classes=10, epsilon=8.0, rounds=60, lr=0.02)
print(trained)
