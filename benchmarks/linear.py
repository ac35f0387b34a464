"""Linear models by scikit-learn, and the most frequent answer: what a fine-tuned model is to be compared with.

python benchmarks/linear.py texts TRAIN.tsv VALIDATION.tsv
python benchmarks/linear.py tags TRAIN.conll VALIDATION.conll
python benchmarks/linear.py images TRAIN_FOLDER VALIDATION_FOLDER
"""

import argparse
import csv
import re
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import sparse
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, matthews_corrcoef

from distaff.data.tag_scores import span_scores


def classes(train: tuple, validation: tuple) -> None:
    """Fit features and labels, and print accuracy and Matthews' correlation on others."""
    most_frequent = Counter(train[1]).most_common(1)[0][0]
    found = LogisticRegression(max_iter=2000, C=4.0).fit(*train).predict(validation[0])
    for name, labels in (("most frequent", [most_frequent] * len(validation[1])), ("linear", found)):
        accuracy, matthews = accuracy_score(validation[1], labels), matthews_corrcoef(validation[1], labels)
        print(f"{name}: accuracy {accuracy:.4f}, Matthews correlation {matthews:.4f}")


def texts(train: Path, validation: Path) -> None:
    """Words and pairs of words of each column by tf-idf, and for two columns of those that both have."""

    def rows(path: Path) -> tuple[list[list[str]], list[str]]:
        with path.open(newline="", encoding="utf-8") as file:
            _, *found = csv.reader(file, delimiter="\t")
        return [row[:-1] for row in found], [row[-1] for row in found]

    (known, labels), (new, answers) = rows(train), rows(validation)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([text for row in known for text in row])

    def features(shown: list[list[str]]) -> sparse.csr_matrix:
        columns = [vectorizer.transform(column) for column in zip(*shown)]
        shared = [columns[0].multiply(columns[1])] if len(columns) == 2 else []
        return sparse.hstack([*columns, *shared, *(part.sum(axis=1) for part in shared)]).tocsr()

    classes((features(known), labels), (features(new), answers))


def tags(train: Path, validation: Path) -> None:
    """A word, its ends, its shape and its neighbours."""

    def sentences(path: Path) -> list[list[tuple[str, str]]]:
        blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
        return [[tuple(line.split("\t")) for line in block.splitlines()] for block in blocks if block.strip()]

    def features(words: list[str], place: int) -> dict[str, str | bool]:
        word = words[place]
        shape = re.sub("[0-9]", "9", re.sub("[a-z]", "x", re.sub("[A-Z]", "X", word)))
        near = {f"word{step}": words[place + step].lower() for step in (-2, -1, 1, 2) if 0 <= place + step < len(words)}
        return {"word": word.lower(), "end": word[-3:], "start": word[:3], "shape": shape, "first": place == 0, **near}

    known, new = sentences(train), sentences(validation)

    def table(shown: list) -> list[dict]:
        return [features([word for word, _ in sentence], place) for sentence in shown for place in range(len(sentence))]

    vectorizer = DictVectorizer()
    model = LogisticRegression(max_iter=500, C=4.0)
    model.fit(vectorizer.fit_transform(table(known)), [tag for sentence in known for _, tag in sentence])
    found = iter(model.predict(vectorizer.transform(table(new))))
    answers = [[tag for _, tag in sentence] for sentence in new]
    print(span_scores(answers, [[next(found) for _ in sentence] for sentence in new]))


def images(train: Path, validation: Path) -> None:
    """Pixels."""

    def rows(folder: Path) -> tuple[np.ndarray, list[str]]:
        paths = sorted(folder.glob("*/*.png"))
        return np.stack([np.asarray(Image.open(path)).ravel() / 255 for path in paths]), [p.parent.name for p in paths]

    classes(rows(train), rows(validation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["texts", "tags", "images"])
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    flags = parser.parse_args()
    {"texts": texts, "tags": tags, "images": images}[flags.kind](flags.train, flags.validation)


if __name__ == "__main__":
    main()
