"""Train a small CNN across ten clients: python torch_cnn.py [folder of Fashion-MNIST]."""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpfed
from dpfed.data.sources.mnist import FashionMnist

if len(sys.argv) > 1:
    source = FashionMnist(path=sys.argv[1]).load()
    (X, y), (X_test, y_test) = (
        (part.inputs["pixel_values"], part.labels) for part in (source.train, source.test)
    )
else:
    print("Digits of scikit-learn. For Fashion-MNIST, give a folder with the four files of")
    print("https://github.com/zalandoresearch/fashion-mnist#get-the-data")
    digits = load_digits()
    X = (digits.images[:, None] / 16).astype("float32")
    X, X_test, y, y_test = train_test_split(X, digits.target, test_size=0.2, random_state=0)

# GroupNorm, not BatchNorm: a layer must not mix the records of a batch.
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.GroupNorm(4, 16),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(4),
    torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)
trained = dpfed.fine_tune(
    net, (X, y), (X_test, y_test), clients=10, classes=10, epsilon=8.0, rounds=60, lr=0.02
)
print(trained)
