"""Linear models by scikit-learn, and the most frequent answer: what a fine-tuned model is to be compared with.

python benchmarks/linear.py texts TRAIN.tsv VALIDATION.tsv
python benchmarks/linear.py tags TRAIN.conll VALIDATION.conll
python benchmarks/linear.py images TRAIN_FOLDER VALIDATION_FOLDER
python benchmarks/linear.py questions TRAIN.json VALIDATION.json
"""

import argparse
import csv
import json
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
from distaff.tasks._squad_scores import squad_v2_scores


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


def questions(train: Path, validation: Path) -> None:
    """The sentence of the context that is nearest by tf-idf, where a linear model of its nearness says it answers."""

    def rows(path: Path) -> list[tuple[str, str, list[str]]]:
        paragraphs = [part for article in json.loads(path.read_text())["data"] for part in article["paragraphs"]]
        return [
            (part["context"], row["question"], [answer["text"] for answer in row["answers"]])
            for part in paragraphs
            for row in part["qas"]
        ]

    known, new = rows(train), rows(validation)
    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english").fit([row[0] for row in known + new])

    def nearest(shown: list) -> tuple[list[str], np.ndarray]:
        found, nearness = [], []
        for context, question, _ in shown:
            sentences = re.split(r"(?<=[.!?])\s+", context)
            scores = (vectorizer.transform(sentences) @ vectorizer.transform([question]).T).toarray()[:, 0]
            found.append(sentences[int(scores.argmax())])
            nearness.append([scores.max(), scores.mean(), len(sentences)])
        return found, np.array(nearness)

    answerable = [bool(answers) for *_, answers in known]
    sentences, nearness = nearest(new)
    says = LogisticRegression().fit(nearest(known)[1], answerable).predict(nearness)
    references = {str(number): answers for number, (*_, answers) in enumerate(new)}
    given = {"none": [""] * len(new), "linear": [text if yes else "" for text, yes in zip(sentences, says)]}
    for name, answers in given.items():
        print(name, squad_v2_scores({str(number): text for number, text in enumerate(answers)}, references))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["texts", "tags", "images", "questions"])
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    flags = parser.parse_args()
    {"texts": texts, "tags": tags, "images": images, "questions": questions}[flags.kind](flags.train, flags.validation)


if __name__ == "__main__":
    main()
