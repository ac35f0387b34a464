"""Streams: what is held out, what is seen, and that a resume sees the rest."""

import json
import logging
from collections import Counter

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distaff.core.errors import CheckpointError, DataError, UsageError
from distaff.data.batches import Batches
from distaff.data.columns import flat_values
from distaff.data.masking import MlmCollate, MlmMasking
from distaff.data.stream import TextStream
from distaff.data.text import load_texts
from text_cases import reference_lines, tokenizer_of

BLOCK = 16
LINES = [f"{line.strip()} {index}" for index, line in enumerate(reference_lines()[:300:6])]  # 50 different ones


def plain(rows, *, indices, weights, epoch, length):
    """Return the blocks as they are, without masks."""
    ids = flat_values(rows["input_ids"]).reshape(-1, length)
    return {"ids": ids, "indices": indices}


def source_of(kind, folder, lines=LINES):
    """Return a stream of `lines` of one of the kinds that `datasets` has."""
    if kind == "files":
        names = []
        for part in range(2):
            half = lines[: len(lines) // 2] if part == 0 else lines[len(lines) // 2 :]
            (folder / f"{part}.txt").write_text("\n\n".join(half))
            names.append(str(folder / f"{part}.txt"))
        return load_texts(files=names, streaming=True)
    if kind == "one file":
        (folder / "all.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        return load_texts(files=str(folder / "all.jsonl"), streaming=True)
    if kind == "parquet folder":
        (folder / "hub").mkdir(exist_ok=True)
        table = pa.table({"id": range(len(lines)), "body": lines})
        pq.write_table(table, folder / "hub" / "train.parquet", row_group_size=7)
        return load_texts(dataset_name=str(folder / "hub"), streaming=True, cache_dir=folder / "cache")
    datasets.Dataset.from_dict({"text": [part for line in lines for part in (line, " ")]}).save_to_disk(
        folder / "saved"
    )
    return load_texts(dataset_name=str(folder / "saved"), streaming=True)


def stream_of(source, **options):
    defaults = {
        "collate": plain,
        "block": BLOCK,
        "batch_size": 4,
        "vocab_size": 400,
        "num_eval_samples": 8,
        "window": 5,
    }
    return TextStream(source, tokenizer=tokenizer_of("bert"), **{**defaults, **options})


def tokens_of(lines):
    return np.concatenate([tokenizer_of("bert")(line)["input_ids"] for line in lines])


def test_every_token_once_an_epoch_and_across_the_wrap(tmp_path, caplog):
    stream = stream_of(source_of("files", tmp_path), seed=3)
    training = tokens_of(LINES[8:])
    per_epoch = len(training) // BLOCK
    with caplog.at_level(logging.INFO, "distaff"):
        batches = [stream(step) for step in range(2 * per_epoch // 4 + 3)]
    blocks = {int(index): block for batch in batches for index, block in zip(batch["indices"], batch["ids"])}
    assert len(blocks) == 4 * len(batches)
    joined = np.concatenate([blocks[index] for index in range(2 * per_epoch)])
    np.testing.assert_array_equal(joined, np.concatenate([training, training, training])[: len(joined)])
    order = np.concatenate([batch["indices"] for batch in batches])
    assert order.tolist() != sorted(order)
    # Shuffled in windows: nothing is further from its place than a window.
    assert abs(order - np.arange(len(order))).max() < 5
    assert f"Epoch 0 of the stream is read: {len(training)} tokens" in caplog.text
    assert [stream.epoch(0), stream.epoch(len(batches))] == [0.0, 2.0]


def test_evaluation_texts_stay_apart(tmp_path):
    """50 lines, 30 steps of 4, evaluation every 5."""
    stream = stream_of(source_of("files", tmp_path))
    first = stream.evaluation()["input_ids"][:]
    assert np.concatenate(first).tolist() == tokens_of(LINES[:8])[: len(first) * BLOCK].tolist()
    # The number at a line's end tells the lines apart.
    marks = {tuple(tokenizer_of("bert")(line)["input_ids"][-6:]) for line in LINES[:8]}
    assert len(marks) == 8
    seen = []
    for step in range(30):
        seen.append(stream(step))
        if step % 5 == 0:
            assert stream.evaluation()["input_ids"][:] == first
    assert stream.epoch(30) >= 1
    ordered = {int(index): block for batch in seen for index, block in zip(batch["indices"], batch["ids"])}
    joined = np.concatenate([ordered[index] for index in sorted(ordered)]).tolist()
    assert not marks & {tuple(joined[start : start + 6]) for start in range(len(joined))}


@pytest.mark.parametrize("kind", ["files", "one file", "parquet folder", "saved folder"])
def test_resumed_twice(tmp_path, kind):
    whole = stream_of(source_of(kind, tmp_path))
    expected = [whole(step) for step in range(60)]
    np.testing.assert_array_equal(
        np.sort(np.concatenate([batch["indices"] for batch in expected[:50]]))[:180], np.arange(180)
    )
    state = None
    for start, stop in ((0, 5), (5, 9), (9, 33), (33, 60)):
        stream = stream_of(source_of(kind, tmp_path))
        if state is not None:
            stream.load_state_dict(json.loads(state))
        for step in range(start, stop):
            batch = stream(step)
            np.testing.assert_array_equal(batch["indices"], expected[step]["indices"])
            np.testing.assert_array_equal(batch["ids"], expected[step]["ids"])
        state = json.dumps(stream.state_dict())
        assert len(state) < 3000


def test_every_position_can_be_resumed(tmp_path):
    """Window 5 over 20 blocks, saved inside and between windows, at the end of the texts too."""
    lines = LINES[:12]
    options = {"num_eval_samples": 0, "batch_size": 1}
    whole = stream_of(source_of("files", tmp_path, lines), **options)
    states, expected = [], []
    for step in range(45):
        states.append(json.loads(json.dumps(whole.state_dict())))
        expected.append(whole(step)["ids"][0])
    for start, state in enumerate(states):
        stream = stream_of(source_of("files", tmp_path, lines), **options)
        stream.load_state_dict(state)
        assert stream.epoch(start) == whole.epoch(start)
        for step in range(start, min(start + 8, 45)):
            np.testing.assert_array_equal(stream(step)["ids"][0], expected[step])


def test_one_stream_goes_back(tmp_path):
    stream = stream_of(source_of("files", tmp_path))
    beginning = json.loads(json.dumps(stream.state_dict()))
    expected = [stream(step)["ids"] for step in range(40)]
    saved = stream.state_dict(20)  # a loop that reads ahead saves an earlier step
    stream.load_state_dict(saved)
    np.testing.assert_array_equal(stream(20)["ids"], expected[20])
    stream.load_state_dict(beginning)
    for step in range(40):
        np.testing.assert_array_equal(stream(step)["ids"], expected[step])


@pytest.mark.parametrize("kind", ["files", "one file"])
def test_processes_see_all_texts_once(tmp_path, kind):
    """Two files go to a process each; of one file each process takes every other line."""
    seen: Counter = Counter()
    evaluations = []
    for index in range(2):
        stream = stream_of(source_of(kind, tmp_path), process_index=index, process_count=2)
        evaluations.append(stream.evaluation()["input_ids"][:])
        blocks = {}
        step = 0
        while stream.epoch(step) < 1:
            batch = stream(step)
            assert batch["ids"].shape == (2, BLOCK)
            assert (batch["indices"] % 2 == index).all()
            blocks |= {int(number): block for number, block in zip(batch["indices"], batch["ids"])}
            step += 1
        seen.update(np.concatenate(list(blocks.values())).tolist())
    assert evaluations[0] == evaluations[1]
    expected = Counter(tokens_of(LINES[8:]).tolist())
    # The blocks of the last batches reach into the next epoch, the left-over tokens are not seen yet.
    assert sum((expected - seen).values()) <= 2 * BLOCK
    assert sum((seen - expected).values()) <= 2 * 4 * BLOCK


def test_masked_batches_like_those_of_files(tmp_path):
    tokenizer = tokenizer_of("roberta")
    masking = MlmMasking.from_tokenizer(tokenizer, max_length=BLOCK, whole_word=True)
    collate = MlmCollate.from_tokenizer(tokenizer, masking=masking)
    options = {"tokenizer": tokenizer, "collate": collate, "block": BLOCK, "batch_size": 4, "vocab_size": 500}
    stream = TextStream(source_of("files", tmp_path), **options, whole_word=True, num_eval_samples=10)
    held_out = stream.evaluation()
    evaluation = Batches(held_out, collate=collate, batch_size=4, shuffle=False, max_length=BLOCK)(0)
    batch = stream(0)
    assert {name: values.shape for name, values in batch.items()} == {
        name: values.shape for name, values in evaluation.items()
    }
    assert batch["masked_weights"].any()
    resumed = TextStream(source_of("files", tmp_path), **options, whole_word=True, num_eval_samples=10)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for name, values in stream(1).items():
        np.testing.assert_array_equal(resumed(1)[name] if name == "input_ids" else values, values)


def test_streams_that_are_too_short(tmp_path):
    with pytest.raises(DataError, match="only 50 texts, and --num_eval_samples takes the first 51"):
        stream_of(source_of("files", tmp_path), num_eval_samples=51)
    with pytest.raises(DataError, match="no texts left to train on after the 50"):
        stream_of(source_of("files", tmp_path), num_eval_samples=50)(0)
    count = len(tokens_of(LINES[49:]))
    with pytest.raises(DataError, match=f"{count} tokens to train on, less than one block of 64.*at most {count}"):
        stream_of(source_of("files", tmp_path), num_eval_samples=49, block=64)(0)
    with pytest.raises(UsageError, match="num_eval_samples"):
        stream_of(source_of("files", tmp_path), num_eval_samples=0).evaluation()


def test_wrong_use(tmp_path):
    stream = stream_of(source_of("files", tmp_path))
    with pytest.raises(UsageError, match="step 0 is next, not 3"):
        stream(3)
    with pytest.raises(UsageError, match="step 7 is not kept"):
        stream.state_dict(7)
    with pytest.raises(CheckpointError, match="same settings"):
        stream_of(source_of("files", tmp_path), window=6).load_state_dict(stream.state_dict())
    with pytest.raises(UsageError, match="batch of 3 rows cannot be split over 2"):
        stream_of(source_of("files", tmp_path), batch_size=3, process_count=2)
    with pytest.raises(DataError, match="beyond the model's vocabulary of 100"):
        stream_of(source_of("files", tmp_path), vocab_size=100)(0)


@pytest.mark.parametrize("kind", ["files", "one file", "parquet folder", "saved"])
def test_without_held_out_texts_the_first_is_trained_on(kind, tmp_path):
    """In the first epoch and in the next ones."""
    lines = LINES[:3]
    stream = stream_of(source_of(kind, tmp_path, lines), num_eval_samples=0, window=1, block=1, batch_size=1)
    wanted = tokens_of(lines).tolist()
    found = [int(stream(step)["ids"][0, 0]) for step in range(2 * len(wanted))]
    assert found == wanted * 2
