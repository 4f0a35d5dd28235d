"""The Python interface: fine-tune a model on a data set, and use, store or publish the result.

import dpfed

trained = dpfed.fine_tune("my-model-folder", train, test, clients=20, epsilon=4.0)
print(trained.accuracy, trained.epsilon)
trained.export("my-adapter")
"""

from dpfed.api.comparing import Comparison, compare
from dpfed.api.fine_tuning import fine_tune
from dpfed.api.planning import plan
from dpfed.api.trained_model import TrainedModel, load
from dpfed.api.tuning import Tuning, tune

__all__ = ["Comparison", "TrainedModel", "Tuning", "compare", "fine_tune", "load", "plan", "tune"]
