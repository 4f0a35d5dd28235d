"""Train on one data set for each client: three hospitals, and public records for the test."""

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import dpfed

X, y = load_breast_cancer(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
# The public records alone give the scale. Statistics of private records would leak.
scaler = StandardScaler().fit(X_test)
X, X_test = scaler.transform(X), scaler.transform(X_test)

hospitals = {name: (X[i::3], y[i::3]) for i, name in enumerate(["north", "south", "west"])}
trained = dpfed.fine_tune(
    "linear", hospitals, (X_test, y_test), classes=["malignant", "benign"], epsilon=4.0, rounds=40
)
print(trained)
print(trained.history.tail())
