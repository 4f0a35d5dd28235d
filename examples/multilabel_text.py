"""Find all topics of a review: several labels for one text. Needs pip install 'dpfed[text]'."""

import random

import dpfed

PHRASES = {
    "food": ["the soup was cold", "we loved the pasta", "the fish tasted fresh", "a dry cake"],
    "service": ["the waiter was kind", "nobody served us", "friendly staff", "a rude host"],
    "price": ["far too expensive", "cheap for this town", "fair prices", "the bill was high"],
}
draw = random.Random(0)
topics = [draw.sample(list(PHRASES), draw.randint(1, 3)) for _ in range(700)]
texts = [", ".join(draw.choice(PHRASES[topic]) for topic in found) for found in topics]
private, public = (texts[:600], topics[:600]), (texts[600:], topics[600:])

trained = dpfed.fine_tune("minilm", private, public, rounds=30, metric="macro_f1", keep="best")
print(trained)
print(trained.metrics["macro_f1"], trained.metrics["per_class"])
print(trained.classes, trained.predict_proba(["Nobody served us, and the bill was high"]))
