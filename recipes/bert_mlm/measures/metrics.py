"""How good predictions are: numbers from 0 to 100, correlations from -100 to 100."""

from collections.abc import Callable

import numpy as np

# Gets the outputs of the model and the labels, both as arrays of one row a text.
Measure = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def accuracy(guesses: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(np.mean(guesses == labels))


def f1(guesses: np.ndarray, labels: np.ndarray, positive: float = 1) -> float:
    """Of the class `positive`; 0 where it is neither guessed nor there."""
    found = int(np.sum((guesses == positive) & (labels == positive)))
    total = int(np.sum(guesses == positive) + np.sum(labels == positive))
    return 100 * 2 * found / max(total, 1)


def macro_f1(guesses: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the classes that are guessed or there."""
    classes = np.union1d(guesses, labels)
    return float(np.mean([f1(guesses, labels, positive) for positive in classes]))


def matthews(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Of two classes, 0 and 1: their correlation; 0 where one side has a single class."""
    return pearson(guesses, labels)


def pearson(guesses: np.ndarray, labels: np.ndarray) -> float:
    """0 where one side is constant."""
    x, y = (values - values.mean() for values in (guesses.astype(float), labels.astype(float)))
    spread = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return 100 * float(np.sum(x * y) / spread) if spread > 0 else 0.0


def spearman(guesses: np.ndarray, labels: np.ndarray) -> float:
    return pearson(_ranks(guesses), _ranks(labels))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


# ------------------------------------------------------- of the outputs of a classifier


def accuracy_alone(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return {"accuracy": accuracy(outputs.argmax(-1), labels)}


def accuracy_and_macro_f1(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    guesses = outputs.argmax(-1)
    return {"accuracy": accuracy(guesses, labels), "macro_f1": macro_f1(guesses, labels)}


def accuracy_and_f1(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    guesses = outputs.argmax(-1)
    return _with_mean(accuracy=accuracy(guesses, labels), f1=f1(guesses, labels))


def matthews_alone(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return {"matthews": matthews(outputs.argmax(-1), labels)}


def correlations(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    guesses = outputs.squeeze(-1)
    return _with_mean(pearson=pearson(guesses, labels), spearman=spearman(guesses, labels))


def _with_mean(**measured: float) -> dict[str, float]:
    return {**measured, "mean": float(np.mean(list(measured.values())))}
