"""T5's span corruption: lengths, and what is cut out."""

import numpy as np
import pyarrow as pa
import pytest

from distaff.core.errors import UsageError
from distaff.data.draws import row_keys
from distaff.data.span_corruption import SpanCorruption, check_sentinels, noise_counts, sentinel_ids, span_lengths

SENTINELS = np.arange(999, 899, -1, dtype=np.int32)


def corruption(inputs=64, *, seed=0, **options):
    return SpanCorruption(span_lengths(inputs, **options), SENTINELS, eos_id=1, pad_id=0, start_id=0, seed=seed)


def rows_of(*lengths, seed=0):
    """Rows of random ids from 0 to 899."""
    rng = np.random.default_rng(seed)
    return pa.table({"input_ids": [rng.integers(0, 900, length).tolist() for length in lengths]})


def batch_of(collate, rows, *, epoch=1, indices=None):
    indices = np.arange(len(rows)) if indices is None else indices
    return collate(rows, indices=indices, weights=np.ones(len(rows), np.float32), epoch=epoch, length=None)


def put_together(batch, row):
    """The row that an input and its target were made of."""
    source = batch["input_ids"][row][batch["attention_mask"][row] == 1][:-1].tolist()
    target = batch["labels"][row][batch["label_weights"][row] > 0][:-1].tolist()
    spans: dict[int, list[int]] = {}
    for token in target:
        if token >= 900:
            spans[token] = []
        else:
            spans[max(spans, key=lambda key: -key)].append(token)
    assert list(spans) == SENTINELS[: len(spans)].tolist()
    return [token for part in source for token in (spans[part] if part >= 900 else [part])]


@pytest.mark.parametrize(
    ("inputs", "density", "mean_span", "raw", "targets"),
    [
        (16, 0.15, 3.0, 17, 5),
        (32, 0.15, 3.0, 34, 8),
        (64, 0.15, 3.0, 70, 14),
        (128, 0.15, 3.0, 141, 29),
        (512, 0.15, 3.0, 568, 114),
        (128, 0.15, 1.0, 128, 39),
        (128, 0.5, 3.0, 190, 128),
    ],
)
def test_lengths_are_those_of_t5(inputs, density, mean_span, raw, targets):
    """Case T49: the encoder's side is never longer than asked, and the target fits."""
    lengths = span_lengths(inputs, density=density, mean_span=mean_span)
    assert (lengths.raw, lengths.targets) == (raw, targets)
    batch = batch_of(corruption(inputs, density=density, mean_span=mean_span), rows_of(*[raw] * 20))
    assert batch["input_ids"].shape == (20, inputs)
    assert batch["labels"].shape == (20, targets)
    encoded, decoded = batch["attention_mask"].sum(axis=1), batch["label_weights"].sum(axis=1)
    assert set(encoded.tolist()) == {raw - lengths.noise + lengths.spans + 1}
    assert set(decoded.tolist()) == {lengths.noise + lengths.spans + 1}
    assert str(encoded[0]) in lengths.explained()
    assert str(raw) in lengths.explained()


@pytest.mark.parametrize("inputs", [*range(4, 40), 100, 300])
@pytest.mark.parametrize("density", [0.05, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("mean_span", [1.0, 3.0, 10.0])
def test_every_setting_fits(inputs, density, mean_span):
    lengths = span_lengths(inputs, density=density, mean_span=mean_span)
    assert lengths.raw - lengths.noise + lengths.spans + 1 <= inputs
    assert 1 <= lengths.spans <= min(lengths.noise, lengths.raw - lengths.noise)
    assert lengths.noise + lengths.spans + 1 <= lengths.targets


@pytest.mark.parametrize("options", [{}, {"density": 0.5}, {"mean_span": 1.0}, {"density": 0.9, "mean_span": 2.0}])
def test_input_and_target_hold_the_row(options):
    """Cases T49 and T51: ragged rows, single tokens, ids that are zero; nothing is lost."""
    collate = corruption(**options)
    raw = collate.lengths.raw
    rows = rows_of(raw, 1, 2, 3, raw - 1, 17, raw // 2, raw)
    batch = batch_of(collate, rows)
    assert (batch["input_ids"] == 0).sum() > (batch["attention_mask"] == 0).sum() - 1
    for row, wanted in enumerate(rows["input_ids"].to_pylist()):
        assert put_together(batch, row) == wanted
        noise, spans = noise_counts(len(wanted), collate.lengths.density, collate.lengths.mean_span)
        assert batch["label_weights"][row].sum() <= noise + spans + 1
    np.testing.assert_array_equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == 0).all()


def test_zeros_in_the_text_are_text():
    rows = pa.table({"input_ids": [[0] * 70]})
    batch = batch_of(corruption(), rows)
    assert batch["attention_mask"].sum() == 70 - 10 + 3 + 1
    assert put_together(batch, 0) == [0] * 70


def test_noise_is_a_function_of_seed_epoch_and_example():
    rows = rows_of(*[70] * 6)
    first = batch_of(corruption(), rows)
    again = batch_of(corruption(), rows.slice(2, 3), indices=np.arange(2, 5))
    for name, values in first.items():
        np.testing.assert_array_equal(values[2:5], again[name])
    for other in (batch_of(corruption(seed=1), rows), batch_of(corruption(), rows, epoch=2)):
        assert (other["input_ids"] != first["input_ids"]).any(axis=1).all()


def test_all_cuts_are_equally_likely():
    """A row of 6 with 3 tokens cut in 2 spans: 3 kept in 2 segments (2 ways), 3 cut in 2 (2 ways)."""
    collate = corruption(6, density=0.5, mean_span=2.0)
    masks = collate.noise_mask(np.full(60_000, 6), row_keys(0, np.arange(60_000)))
    assert (masks.sum(axis=1) == 3).all()
    kinds, counts = np.unique(masks, axis=0, return_counts=True)
    assert len(kinds) == 4
    assert not kinds[:, 0].any()
    # Three degrees of freedom; 16.3 is passed by one honest draw in a thousand.
    assert ((counts - 15_000) ** 2 / 15_000).sum() < 16.3


def test_rows_that_only_fill_up_weigh_nothing():
    batch = corruption()(
        rows_of(70, 70), indices=np.arange(2), weights=np.array([1, 0], np.float32), epoch=0, length=None
    )
    assert batch["label_weights"].sum(axis=1).tolist() == [14, 0]


def test_what_cannot_be_is_refused():
    for options, word in (({"density": 1.0}, "density is 1.0"), ({"mean_span": 0.5}, "span is 0.5")):
        with pytest.raises(UsageError, match=word):
            span_lengths(64, **options)
    with pytest.raises(UsageError, match="3 tokens are too few"):
        span_lengths(3)
    with pytest.raises(UsageError, match="28 spans and the tokenizer 20"):
        check_sentinels(20, span_lengths(512))


def test_sentinels_are_found_by_name():
    from text_cases import tokenizer_of

    tokenizer = tokenizer_of("roberta")
    with pytest.raises(UsageError, match="has no sentinels"):
        sentinel_ids(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra_id_{number}>" for number in range(12)]})
    assert tokenizer.convert_ids_to_tokens(sentinel_ids(tokenizer))[10:] == ["<extra_id_10>", "<extra_id_11>"]
