"""What the tests of recipes share: a small corpus, and how a run is stopped, read and refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np

WORDS = "the cat sat on a mat while two dogs ran over green hills and saw red birds fly home at night".split()


def sentences(count: int, seed: int) -> list[str]:
    """Words in random order."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(count)]


def logged(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timings = ("seconds", "second", "memory")
    return [{name: value for name, value in row.items() if not any(word in name for word in timings)} for row in rows]


def results(folder: Path, name: str = "eval") -> dict[str, float]:
    """What a run wrote at its end."""
    return json.loads((folder / f"{name}_results.json").read_text())


def as_if_killed(whole: Path, parts: Path, *, step: int) -> None:
    """Copy what a run that was killed after `step` leaves behind."""
    shutil.copytree(whole, parts)
    for path in (parts / "checkpoints").iterdir():
        if path.name != str(step):
            shutil.rmtree(path)
    for name in ("model.safetensors", "all_results.json", "train_results.json", "eval_results.json"):
        (parts / name).unlink()


def one_line(capsys) -> str:
    """The error that was printed, which is one line without a traceback."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("distaff: ")]
    assert len(lines) == 1, error
    assert re.search(r"[.?]$", lines[0]), lines[0]
    return lines[0]


def settle_vocabulary(folder: Path, words) -> None:
    """Give a WordPiece tokenizer these words and their letters: its trainer numbers what is equally frequent by chance.

    A model from scratch would learn now more and now less.
    """
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    special = [token["content"] for token in sorted(content["added_tokens"], key=lambda token: token["id"])]
    letters = sorted({letter for word in words for letter in word})
    tokens = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *sorted(words)])
    content["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    path.write_text(json.dumps(content, ensure_ascii=False))
