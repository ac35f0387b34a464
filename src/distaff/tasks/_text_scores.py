"""ROUGE, BLEU and chrF of generated texts, from 0 to 100. Nothing is downloaded.

ROUGE is `rouge-score`'s with Porter's stemmer, the mean of the texts' F1, as in the old script; two things differ. Its
own tokenizer throws away every letter outside a-z, so that "Zürich" is "z rich" and Chinese is nothing at all: here a
word is a run of letters and digits of any script (on ASCII both give the same words). And rougeLsum splits sentences at
`.`, `!` or `?` before a space, where the old script wanted a model of NLTK from the network.
BLEU and chrF are `sacrebleu`'s, over the corpus.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from distaff.core.errors import MissingExtraError, UsageError

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# sacrebleu's tokenisation "13a" splits at spaces, which these languages do not write.
_BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "th": "char", "my": "char", "km": "char", "lo": "char"}


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of `ROUGE`; an empty prediction, or one for an empty reference, has 0."""
    _check(predictions, references)
    scorer = _rouge_scorer()
    scores = [scorer.score(_sentences(wanted), _sentences(text)) for text, wanted in zip(predictions, references)]
    return {name: 100 * float(np.mean([score[name].fmeasure for score in scores])) for name in ROUGE}


def bleu(predictions: Sequence[str], references: Sequence[str], *, language: str | None = None) -> dict[str, float]:
    """Return `bleu` and `chrf` of the corpus; `language` is that of the texts ("zh", "de_DE")."""
    _check(predictions, references)
    try:
        import sacrebleu
    except ImportError as error:
        raise MissingExtraError("sacrebleu", "train", "BLEU") from error
    tokenizer = _BLEU_TOKENIZERS.get((language or "").split("_")[0].lower(), "13a")
    wanted = [list(references)]
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(predictions), wanted, tokenize=tokenizer).score),
        "chrf": float(sacrebleu.corpus_chrf(list(predictions), wanted).score),
    }


def _check(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references) or not predictions:
        raise UsageError(f"{len(predictions)} predictions and {len(references)} references cannot be compared.")


def _sentences(text: str) -> str:
    """Return the text with a sentence a line, as rougeLsum wants it."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text.strip())


@functools.cache
def _rouge_scorer() -> Any:
    try:
        from nltk.stem.porter import PorterStemmer
        from rouge_score import rouge_scorer, tokenizers
    except ImportError as error:
        raise MissingExtraError("rouge_score", "train", "ROUGE") from error

    class Words(tokenizers.Tokenizer):
        stemmer = PorterStemmer()

        def tokenize(self, text: str) -> list[str]:
            words = re.findall(r"[^\W_]+", text.lower())
            # Words of three letters stay whole, as in rouge-score's own tokenizer.
            return [self.stemmer.stem(word) if len(word) > 3 and word.isascii() else word for word in words]

    return rouge_scorer.RougeScorer(list(ROUGE), tokenizer=Words())
