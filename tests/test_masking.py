"""Which tokens are hidden, by what, and how the choice is fixed by seed, epoch and row."""

import numpy as np
import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerFast

from distaff.core.errors import UsageError
from distaff.data.draws import row_keys, uniforms
from distaff.data.masking import MlmCollate, MlmMasking, masked_count, special_ids
from text_cases import tokenizer_of

VOCAB, PAD, CLS, SEP, MASK = 100, 0, 1, 2, 3
MASKING = MlmMasking(mask_token_id=MASK, vocab_size=VOCAB, special_ids=(PAD, CLS, SEP, MASK), count=40)


def rows_of(batch: int, length: int = 128) -> np.ndarray:
    ids = np.random.default_rng(0).integers(4, VOCAB, (batch, length)).astype(np.int32)
    ids[:, 0] = CLS
    ids[:, -29] = SEP
    ids[:, -28:] = PAD
    return ids


def test_count_is_a_quarter_more_than_expected():
    assert masked_count(128) == 24
    assert masked_count(16) == 3  # not 4 by rounding of 1.25 * 0.15 * 16
    assert masked_count(2) == 1
    assert masked_count(8, probability=1.0) == 8


@pytest.mark.parametrize("with_mask", [True, False])
def test_shares_over_ten_thousand_rows(with_mask):
    ids = rows_of(10_000)
    if with_mask:  # special tokens that the masking is not told of by id
        masking, special = MlmMasking(MASK, VOCAB, (MASK,), 40), ids < 4
    else:
        masking, special = MASKING, None
    out = masking(ids, keys=row_keys(0, 1, np.arange(len(ids))), special_mask=special)
    taken = out["masked_weights"] > 0
    rows = np.nonzero(taken)[0]
    columns, labels = out["masked_positions"][taken], out["masked_labels"][taken]
    assert (labels >= 4).all()
    assert (ids[rows, columns] == labels).all()
    words = (ids >= 4).sum()
    assert abs(taken.sum() / words - 0.15) < 0.005
    seen = out["input_ids"][rows, columns]
    assert abs((seen == MASK).mean() - 0.8) < 0.01
    # A random word is the same one by chance in 1 of 96 cases.
    assert abs((seen == labels).mean() - 0.1 - 0.1 / 96) < 0.01
    others = seen[(seen != MASK) & (seen != labels)]
    assert others.min() >= (0 if with_mask else 4)
    assert others.max() < VOCAB
    if not with_mask:
        assert len(np.unique(others)) == 96
    untouched = np.ones(ids.shape, bool)
    untouched[rows, columns] = False
    assert (out["input_ids"][untouched] == ids[untouched]).all()
    by_column = np.bincount(columns, minlength=128)[1:99] / len(ids)
    assert abs(by_column - 0.15).max() < 0.02


def test_from_a_tokenizer():
    tokenizer = tokenizer_of("roberta")
    masking = MlmMasking.from_tokenizer(tokenizer, max_length=128)
    assert (masking.mask_token_id, masking.vocab_size, masking.count) == (4, 500, 24)
    assert masking.special_ids == (0, 1, 2, 3, 4)
    assert not MlmCollate.from_tokenizer(tokenizer, masking=masking).token_types
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    # Not named as special, and still put around every text.
    assert set(special_ids(bare)) >= {0, 2}
    with pytest.raises(UsageError, match="no mask token"):
        MlmMasking.from_tokenizer(bare, max_length=128)


def test_a_full_row_keeps_the_first_and_restores_the_rest():
    ids = rows_of(64)
    few = MlmMasking(MASK, VOCAB, (PAD, CLS, SEP, MASK), count=3, probability=0.5)
    many = MlmMasking(MASK, VOCAB, (PAD, CLS, SEP, MASK), count=128, probability=0.5)
    keys = row_keys(7, 1, np.arange(64))
    out, full = few(ids, keys=keys), many(ids, keys=keys)
    np.testing.assert_array_equal(out["masked_positions"], full["masked_positions"][:, :3])
    assert (out["masked_weights"] == 1).all()
    after = np.arange(128)[None, :] > out["masked_positions"][:, -1:]
    assert (out["input_ids"][after] == ids[after]).all()


def test_rows_without_words():
    ids = np.full((2, 8), PAD, np.int32)
    ids[:, 0] = CLS
    out = MASKING(ids, keys=row_keys(0, 0, np.arange(2)))
    np.testing.assert_array_equal(out["input_ids"], ids)
    assert not out["masked_positions"].any()
    assert not out["masked_labels"].any()
    assert not out["masked_weights"].any()
    assert out["masked_positions"].shape == (2, 40)
    assert [out[name].dtype for name in ("input_ids", "masked_positions", "masked_weights")] == [
        np.int32,
        np.int32,
        np.float32,
    ]


def test_a_row_does_not_depend_on_its_batch():
    ids = rows_of(8)
    whole = MASKING(ids, keys=row_keys(0, 0, np.arange(8)))
    for index in range(8):
        one = MASKING(ids[index : index + 1], keys=row_keys(0, 0, np.array([index])))
        for name in whole:
            np.testing.assert_array_equal(one[name][0], whole[name][index])


def test_seed_epoch_and_index_each_matter():
    ids = np.repeat(rows_of(1), 2, axis=0)
    base = MASKING(ids, keys=row_keys(0, 1, np.arange(2)))["masked_positions"]
    assert (base[0] != base[1]).any()
    assert (MASKING(ids, keys=row_keys(0, 2, np.arange(2)))["masked_positions"] != base).any()
    assert (MASKING(ids, keys=row_keys(1, 1, np.arange(2)))["masked_positions"] != base).any()


def test_whole_words_are_hidden_whole():
    ids = rows_of(500)
    starts = np.random.default_rng(1).random(ids.shape) < 0.5
    starts[ids < 4] = True
    starts[:, 1] = True
    masking = MlmMasking(MASK, VOCAB, (PAD, CLS, SEP, MASK), count=18, whole_word=True)
    out = masking(ids, keys=row_keys(0, 1, np.arange(500)), word_start=starts)
    word = np.cumsum(starts, axis=1)
    hidden = np.zeros(ids.shape, bool)
    rows, slots = np.nonzero(out["masked_weights"])
    hidden[rows, out["masked_positions"][rows, slots]] = True
    for row in range(500):
        chosen = set(word[row][hidden[row]])
        assert (hidden[row] == np.isin(word[row], list(chosen))).all()
    assert 0.10 < hidden.sum() / (ids >= 4).sum() < 0.15  # below 15 % because of the rows that were full
    with pytest.raises(UsageError, match="word_start"):
        masking(ids, keys=row_keys(0, 1, np.arange(500)))


def test_collate_pads_and_weighs():
    collate = MlmCollate(MASKING, pad_id=PAD, token_types=True)
    table = pa.table({"input_ids": pa.array([[CLS, *range(4, 40), SEP], [CLS, 9, SEP]], pa.list_(pa.int32()))})
    arguments = {"indices": np.arange(2), "epoch": 0, "length": 40}
    batch = collate(table, weights=np.ones(2, np.float32), **arguments)
    assert batch["input_ids"].shape == (2, 40)
    assert batch["attention_mask"].sum(axis=1).tolist() == [38, 3]
    assert not batch["token_type_ids"].any()
    assert batch["masked_weights"][0].any()
    again = collate(table, weights=np.array([0, 1], np.float32), **arguments)
    assert not again["masked_weights"][0].any()
    np.testing.assert_array_equal(again["input_ids"], batch["input_ids"])


def test_uniform_numbers_are_uniform_and_uncorrelated():
    numbers = uniforms(row_keys(0, np.arange(400)), 500, draw=0)
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.histogram(numbers, bins=20, range=(0, 1))[0] / numbers.size - 0.05).max() < 0.002
    pairs = [
        (numbers[:, 1:], numbers[:, :-1]),
        (numbers[1:], numbers[:-1]),
        (numbers, uniforms(row_keys(0, np.arange(400)), 500, draw=1)),
    ]
    for left, right in pairs:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01
    # Pinned: a resumed run must draw what the stopped one would have drawn.
    assert uniforms(row_keys(1, 2, 3), 2, draw=0).ravel().tolist() == PINNED


PINNED = [0.8325123243507614, 0.4637346409474631]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"probability": 0.0}, "above 0"),
        ({"count": 0}, "at least 1"),
        ({"mask_token_id": VOCAB}, "outside a vocabulary"),
        ({"special_ids": tuple(range(VOCAB))}, "no word to predict"),
    ],
)
def test_settings_that_cannot_work(change, words):
    settings = {"mask_token_id": MASK, "vocab_size": VOCAB, "special_ids": (PAD,), "count": 4}
    with pytest.raises(UsageError, match=words):
        MlmMasking(**{**settings, **change})
