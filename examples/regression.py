"""Predict a number: the progress of diabetes, from records of three clinics."""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import dpfed

X, y = load_diabetes(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
# The public records alone give the scale, of features here and of y inside `fine_tune`.
scaler = StandardScaler().fit(X_test)
X, X_test = scaler.transform(X), scaler.transform(X_test)

trained = dpfed.fine_tune(
    "linear", (X, y), (X_test, y_test), task="regress", clients=3, epsilon=8.0, rounds=20
)
print(trained)
print(trained.metrics)
print(trained.predict(X_test[:5]), y_test[:5])
