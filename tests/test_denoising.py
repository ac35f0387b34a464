"""BART's noise: sentences that change places, and spans that become one mask."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from distaff.core.errors import UsageError
from distaff.data.denoising import Denoising, sentence_ends
from distaff.data.draws import row_keys

MASK, BOS, EOS, PAD, STOP = 4, 0, 2, 1, 10


def denoising(length=34, **options):
    ends = np.zeros(100, bool)
    ends[[EOS, STOP]] = True
    ids = {"mask_id": MASK, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "start_id": EOS}
    return Denoising(length=length, sentence_ends=ends, **ids, **options)


def text_of(*lengths, seed=0):
    """Rows of ids from 11 on, in order, with a full stop here and there."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        row = np.arange(11, 11 + length)
        row[rng.random(length) < 0.2] = STOP
        rows.append(row.tolist())
    return pa.table({"input_ids": rows})


def batch_of(collate, rows, *, epoch=1, indices=None):
    indices = np.arange(len(rows)) if indices is None else indices
    return collate(rows, indices=indices, weights=np.ones(len(rows), np.float32), epoch=epoch, length=None)


def test_target_is_the_row():
    rows = text_of(32, 1, 2, 20)
    batch = batch_of(denoising(), rows)
    for row, wanted in enumerate(rows["input_ids"].to_pylist()):
        scored = batch["label_weights"][row] > 0
        assert batch["labels"][row][scored].tolist() == [BOS, *wanted, EOS]
        assert (batch["labels"][row][~scored] == PAD).all()
        assert batch["decoder_input_ids"][row][:2].tolist() == [EOS, BOS]
        read = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        assert (read[0], read[-1]) == (BOS, EOS)
        assert MASK in read
        assert len(read) <= len(wanted) + 2


def test_spans_hide_the_share_that_was_asked_for():
    """What stays is in order, and 30 % of the tokens are gone."""
    collate = denoising(length=102, permute_ratio=0.0)
    tokens = np.tile(np.arange(100) + 100, (500, 1))
    found, counts = collate.infill(tokens, np.full(500, 100), row_keys(0, np.arange(500)))
    masks = (found == MASK).sum(axis=1)
    for row, count in zip(found, counts):
        kept = row[:count][row[:count] != MASK]
        assert len(kept) == 70
        assert (np.diff(kept) > 0).all()
    # Lengths are Poisson(3): about ten spans, of which the last is cut, and one in twenty hides nothing.
    assert 9.5 < masks.mean() < 11.5
    spans, lengths = collate.span_lengths(np.full(500, 100), row_keys(0, np.arange(500)))
    first = Counter(lengths[:, 0].tolist())
    assert 0.02 < first[0] / 500 < 0.09
    assert 0.17 < first[3] / 500 < 0.28
    assert (lengths.sum(axis=1) == 30).all()
    np.testing.assert_array_equal(spans, masks)


@pytest.mark.parametrize("poisson_lambda", [0.1, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("mask_ratio", [0.01, 0.3, 1.0])
def test_no_row_grows(poisson_lambda, mask_ratio):
    collate = denoising(mask_ratio=mask_ratio, poisson_lambda=poisson_lambda)
    counts = np.tile(np.arange(33), 20)
    tokens = np.tile(np.arange(32) + 11, (len(counts), 1))
    found, items = collate.infill(tokens, counts, row_keys(0, np.arange(len(counts))))
    assert (items <= counts).all()
    assert ((found == MASK).sum(axis=1)[counts > 0] > 0).all()
    assert (found[np.arange(32)[None] >= items[:, None]] == PAD).all()


def sentences_of(row):
    parts, part = [], []
    for token in row:
        part.append(token)
        if token == STOP:
            parts.append(tuple(part))
            part = []
    return [*parts, tuple(part)] if part else parts


def test_sentences_change_places_whole():
    rows = text_of(*[32] * 40, 5, 1)["input_ids"].to_pylist()
    tokens = np.array([row + [PAD] * (32 - len(row)) for row in rows])
    counts = np.array([len(row) for row in rows])
    moved = denoising().permute(tokens, counts, row_keys(0, np.arange(len(rows))))
    changed = 0
    for before, after, count in zip(rows, moved, counts):
        after = after[:count].tolist()
        assert sorted(after) == sorted(before)
        # The last sentence may have no full stop: it then runs into the one behind it.
        whole = [part for part in sentences_of(before) if part[-1] == STOP]
        text = ",".join(map(str, after))
        assert all(",".join(map(str, part)) in text for part in whole)
        changed += after != before
    assert changed > 35
    same = denoising(permute_ratio=0.0).permute(tokens, counts, row_keys(0, np.arange(len(rows))))
    np.testing.assert_array_equal(same, tokens)
    some = denoising(permute_ratio=0.5).permute(tokens, counts, row_keys(0, np.arange(len(rows))))
    stayed = (some == tokens).mean()
    assert (moved == tokens).mean() < stayed < 1


def test_orders_are_equally_likely():
    tokens = np.tile([11, STOP, 12, STOP, 13, STOP], (12_000, 1))
    moved = denoising(length=8).permute(tokens, np.full(12_000, 6), row_keys(0, np.arange(12_000)))
    counts = np.array(list(Counter(map(tuple, moved[:, ::2].tolist())).values()))
    assert len(counts) == 6
    assert ((counts - 2_000) ** 2 / 2_000).sum() < 20.5


def test_noise_is_a_function_of_seed_epoch_and_example():
    rows = text_of(*[32] * 6)
    first = batch_of(denoising(), rows)
    again = batch_of(denoising(), rows.slice(2, 3), indices=np.arange(2, 5))
    for name, values in first.items():
        np.testing.assert_array_equal(values[2:5], again[name])
    for other in (batch_of(denoising(seed=1), rows), batch_of(denoising(), rows, epoch=2)):
        assert (other["input_ids"] != first["input_ids"]).any(axis=1).all()


def test_what_cannot_be_is_refused():
    for options in ({"mask_ratio": 0.0}, {"poisson_lambda": 0.0}, {"permute_ratio": 1.5}, {"length": 2}):
        with pytest.raises(UsageError):
            denoising(**options)


def test_sentence_ends_are_tokens():
    from text_cases import tokenizer_of

    tokenizer = tokenizer_of("roberta")
    ends = sentence_ends(tokenizer)
    ids = tokenizer("It is so. Is it? Yes", add_special_tokens=False)["input_ids"]
    assert ends[ids].sum() == 2
    assert ends[tokenizer.eos_token_id]
