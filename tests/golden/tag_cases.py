"""Tags of sentences, drawn: right ones and those of a tagger that is often wrong."""

import random

SCHEMES = {
    "iob2": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-creative-work", "I-creative-work"],
    "iobes": ["O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC"],
    "bare": ["O", "B", "I", "E", "S"],
    "pos": ["NOUN", "VERB", "DET", "PUNCT"],
}


def drawn(scheme: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the right tags and the given ones of forty sentences."""
    rng = random.Random(scheme)
    wanted = [[rng.choice(SCHEMES[scheme]) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    given = [[rng.choice(SCHEMES[scheme]) if rng.random() < 0.3 else tag for tag in tags] for tags in wanted]
    return wanted, given
