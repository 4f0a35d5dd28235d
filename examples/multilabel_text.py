"""Find all topics of a review: several labels for one text. Needs pip install 'dpfed[text]'."""

import random

import dpfed

TOPICS = {
    "food": ["the soup was cold", "we loved the pasta", "the fish tasted fresh", "a dry cake"],
    "service": ["the waiter was kind", "nobody served us", "friendly staff", "a rude host"],
    "price": ["far too expensive", "cheap for this town", "fair prices", "the bill was high"],
}


def reviews(count: int, seed: int) -> dict[str, list]:
    draw = random.Random(seed)
    labels = [[topic for topic in TOPICS if draw.random() < 0.5] for _ in range(count)]
    texts = [", ".join(["A visit", *(draw.choice(TOPICS[t]) for t in names)]) for names in labels]
    return {"text": texts, "label": labels}


trained = dpfed.fine_tune(
    "minilm", reviews(600, 0), reviews(100, 1), task="multilabel", classes=list(TOPICS),
    clients=10, epsilon=8.0, rounds=30, metric="macro_f1", keep="best",
    settings={"model.max_length": 32},
)  # fmt: skip
print(trained)
print(trained.metrics["macro_f1"], trained.metrics["per_class"])
print(trained.classes, trained.predict_proba(["Nobody served us, and the bill was high"]))
