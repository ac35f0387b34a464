"""What seqeval says of drawn tags; writes tag_scores.json.

    pip install seqeval
    python tests/golden/make_tag_scores.py

`tag_cases` draws the tags.
"""

import json
from pathlib import Path

from seqeval.metrics import sequence_labeling as seqeval
from tag_cases import SCHEMES, drawn


def main() -> None:
    found = {}
    for scheme in SCHEMES:
        wanted, given = drawn(scheme)
        entities = [seqeval.get_entities(tags) for tags in wanted + given]
        scores = [
            seqeval.precision_score(wanted, given),
            seqeval.recall_score(wanted, given),
            seqeval.f1_score(wanted, given),
            seqeval.accuracy_score(wanted, given),
        ]
        found[scheme] = {"entities": entities, "scores": scores}
    Path(__file__).with_name("tag_scores.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
