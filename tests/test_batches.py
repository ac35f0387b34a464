"""Batches as a function of the step: order, shares of processes, the last batch, lengths."""

import logging

import datasets
import numpy as np
import pyarrow as pa
import pytest

from distaff.core.errors import DataError, UsageError
from distaff.data.batches import Batches, length_buckets
from distaff.data.columns import pad_rows, row_lengths
from distaff.data.masking import MlmCollate, MlmMasking
from distaff.data.text import tokenize_blocks, tokenize_lines
from text_cases import reference_lines, tokenizer_of


def numbered(count: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": [[index] * (1 + index % 5) for index in range(count)]})


def collate(rows, *, indices, weights, epoch, length):
    ids, mask = pad_rows(rows["input_ids"], length=length, fill=-1)
    return {"ids": ids, "mask": mask, "indices": indices, "row_weights": weights, "epoch": np.full(len(ids), epoch)}


def batches_of(dataset, **options):
    return Batches(dataset, **{"collate": collate, "batch_size": 8, "max_length": 5, **options})


def mlm_batches(dataset, tokenizer, *, max_length, whole_word=False, **options):
    masking = MlmMasking.from_tokenizer(tokenizer, max_length=max_length, whole_word=whole_word)
    return Batches(
        dataset, collate=MlmCollate.from_tokenizer(tokenizer, masking=masking), max_length=max_length, **options
    )


@pytest.fixture(scope="module")
def lines():
    texts = datasets.Dataset.from_dict({"text": list(reference_lines()[:150])})
    return tokenize_lines(texts, tokenizer=tokenizer_of("bert"), max_length=64)


def test_an_epoch_has_each_row_once():
    batches = batches_of(numbered(21), seed=3)
    assert batches.steps_per_epoch == 3
    orders = []
    for epoch in range(3):
        parts = [batches(epoch * 3 + step) for step in range(3)]
        rows = np.concatenate([part["ids"][:, 0] for part in parts])
        weights = np.concatenate([part["row_weights"] for part in parts])
        assert all(part["ids"].shape == (8, 5) for part in parts)
        assert sorted(rows[weights > 0]) == list(range(21))
        assert weights.sum() == 21
        assert all((part["epoch"] == epoch + 1).all() for part in parts)
        orders.append(rows[:21].tolist())
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])
    assert batches.epoch(4) == pytest.approx(4 / 3)


def test_a_batch_is_a_function_of_step_and_seed():
    first, second = batches_of(numbered(50), seed=2**40), batches_of(numbered(50), seed=2**40)
    later = second(11)
    for step in (11, 3, 11):
        np.testing.assert_array_equal(first(step)["ids"], second(step)["ids"])
    np.testing.assert_array_equal(later["ids"], first(11)["ids"])
    assert (batches_of(numbered(50), seed=1)(0)["ids"] != batches_of(numbered(50), seed=2)(0)["ids"]).any()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_global_batch(lines, processes):
    tokenizer = tokenizer_of("bert")
    options = {"max_length": 64, "batch_size": 16, "pad_to_max_length": False, "seed": 5}
    whole = mlm_batches(lines, tokenizer, **options)
    shares = [
        mlm_batches(lines, tokenizer, process_index=index, process_count=processes, **options)
        for index in range(processes)
    ]
    for step in (0, 9, 10):  # 9 is the last of the epoch, with padding rows
        expected, parts = whole(step), [share(step) for share in shares]
        for name, values in expected.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
            assert len(parts[0][name]) == 16 // processes


def test_evaluation_is_in_order_and_the_same_for_any_batch_size(lines):
    tokenizer = tokenizer_of("bert")

    def scored(batch_size):
        batches = mlm_batches(lines, tokenizer, max_length=64, batch_size=batch_size, shuffle=False)
        parts = [batches(step) for step in range(batches.steps_per_epoch)]
        np.testing.assert_array_equal(batches(batches.steps_per_epoch)["input_ids"], parts[0]["input_ids"])
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert not found["masked_weights"][150:].any()
        return {name: values[:150] for name, values in found.items()}

    expected = scored(1)
    assert expected["masked_weights"].sum() > 300
    for batch_size in (4, 8, 64, 200):
        for name, values in scored(batch_size).items():
            np.testing.assert_array_equal(values, expected[name])


def test_masks_change_with_the_epoch_in_training(lines):
    batches = mlm_batches(lines.select(range(1)), tokenizer_of("bert"), max_length=64, batch_size=1)
    assert (batches(0)["masked_positions"] != batches(1)["masked_positions"]).any()


def test_lengths_are_few_and_fit(lines):
    batches = mlm_batches(lines, tokenizer_of("bert"), max_length=64, batch_size=4, pad_to_max_length=False)
    assert batches.buckets == (16, 32, 48, 64)
    lengths = row_lengths(lines)
    seen = set()
    for step in range(40):
        batch = batches(step)
        longest = int(lengths[batches.indices(step)[0]].max())
        assert batch["input_ids"].shape[1] == min(bucket for bucket in batches.buckets if bucket >= longest)
        assert batch["masked_positions"].shape == (4, 12)
        assert {name: values.dtype.name for name, values in batch.items()} == {
            "input_ids": "int32",
            "attention_mask": "int32",
            "token_type_ids": "int32",
            "masked_positions": "int32",
            "masked_labels": "int32",
            "masked_weights": "float32",
        }
        seen.add(batch["input_ids"].shape[1])
    assert 1 < len(seen) <= 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_similar_lengths_come_together(shuffle):
    """Each row once an epoch, a function of the step, and far less padding; epochs differ in training alone."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(1 + rng.geometric(0.1, 600), 64)
    dataset = datasets.Dataset.from_dict({"input_ids": [[index] * length for index, length in enumerate(lengths)]})
    options = {"max_length": 64, "pad_to_max_length": False, "shuffle": shuffle, "seed": 5}
    grouped = batches_of(dataset, group_by_length=True, **options)
    plain = batches_of(dataset, **options)
    steps = grouped.steps_per_epoch
    assert steps == plain.steps_per_epoch == 75
    epochs = []
    for epoch in range(2):
        rows = [grouped.indices(epoch * steps + step) for step in range(steps)]
        numbers = np.concatenate([numbers[weights > 0] for numbers, weights in rows])
        assert sorted(numbers) == list(range(600))
        epochs.append(numbers)
    assert np.array_equal(*epochs) != shuffle
    padded = [sum(made(step)["ids"].size for step in range(steps)) for made in (grouped, plain)]
    assert padded[0] < 0.65 * padded[1]
    # Asked in any order, as after a resume.
    again = batches_of(dataset, group_by_length=True, **options)
    for step in (steps + 40, 3, 74, 33, 32):
        np.testing.assert_array_equal(again(step)["ids"], grouped(step)["ids"])
    assert {grouped(step)["ids"].shape[1] for step in range(steps)} <= set(grouped.buckets)
    if shuffle:
        means = [lengths[grouped.indices(step)[0]].mean() for step in range(32)]
        assert means != sorted(means)


def test_a_last_batch_that_is_not_full_has_the_weights_of_its_rows():
    batches = batches_of(numbered(21), pad_to_max_length=False, group_by_length=True)
    assert sorted(int(batches.indices(step)[1].sum()) for step in range(3)) == [5, 8, 8]
    assert batches.identity()["group_by_length"]


def test_buckets():
    assert length_buckets(128) == (32, 64, 96, 128)
    assert length_buckets(512) == (128, 256, 384, 512)
    assert length_buckets(50) == (16, 32, 40, 50)
    assert length_buckets(8) == (8,)


def test_blocks_whole_words_end_to_end():
    tokenizer = tokenizer_of("roberta")
    texts = datasets.Dataset.from_dict({"text": list(reference_lines()[:200])})
    blocks = tokenize_blocks(texts, tokenizer=tokenizer, block=64, whole_word=True)
    batches = mlm_batches(blocks, tokenizer, max_length=64, whole_word=True, batch_size=8)
    batch = batches(0)
    assert "token_type_ids" not in batch
    assert batch["attention_mask"].all()
    originals = np.array(blocks["input_ids"][:])[batches.indices(0)[0]]
    restored = batch["input_ids"].copy()
    rows, slots = np.nonzero(batch["masked_weights"])
    restored[rows, batch["masked_positions"][rows, slots]] = batch["masked_labels"][rows, slots]
    np.testing.assert_array_equal(restored, originals)
    share = batch["masked_weights"].sum() / (originals > 4).sum()
    assert 0.05 < share < 0.25


def test_padding_of_sliced_and_fixed_lists():
    column = pa.chunked_array([pa.array([[1], [2, 3], [], [4, 5, 6]], pa.list_(pa.int32()))]).slice(1)
    ids, mask = pad_rows(column, length=4, fill=9)
    assert ids.tolist() == [[2, 3, 9, 9], [9, 9, 9, 9], [4, 5, 6, 9]]
    assert mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.int32()), 2).slice(1, 2)
    assert pad_rows(fixed, length=None, fill=0)[0].tolist() == [[2, 3], [4, 5]]
    with pytest.raises(DataError, match="3 tokens where at most 2"):
        pad_rows(column, length=2, fill=0)


def test_what_cannot_be_batched():
    with pytest.raises(UsageError, match="batch of 6 rows cannot be split over 4"):
        batches_of(numbered(9), batch_size=6, process_count=4)
    with pytest.raises(UsageError, match="batch of 0 rows"):
        batches_of(numbered(9), batch_size=0)
    with pytest.raises(DataError, match="no rows"):
        batches_of(numbered(0))
    with pytest.raises(UsageError, match="no step -1"):
        batches_of(numbered(9))(-1)


def test_real_german_dialect(shared_data, tmp_path, caplog):
    from distaff.data.text import load_texts

    folder = shared_data / "lm" / "gsw_alemannic_wikipedia"
    with caplog.at_level(logging.INFO, "distaff"):
        texts = load_texts(files=str(folder / "train.txt"), cache_dir=tmp_path)
        articles = load_texts(files=str(folder / "train.jsonl"), cache_dir=tmp_path)
    assert texts["text"][:] == [line for article in articles["text"] for line in article.split("\n") if line.strip()]
    assert len(texts) == 890
    blocks = tokenize_blocks(texts, tokenizer=tokenizer_of("roberta"), block=128)
    batches = mlm_batches(blocks, tokenizer_of("roberta"), max_length=128, batch_size=32)
    assert sum(batches(step)["masked_weights"].any(axis=1).sum() for step in range(batches.steps_per_epoch)) == len(
        blocks
    )
