"""Files to texts and texts to rows of ids, with the errors of bad files."""

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import multiprocess
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from distaff.core.errors import DataError, UsageError
from distaff.data import encode
from distaff.data import text as text_module
from distaff.data.hub_text import split_names
from distaff.data.text import check_ids, load_texts, split_validation, tokenize_blocks, tokenize_lines
from text_cases import reference_lines, tokenizer_of

AWKWARD = [
    "  leading and trailing  ",
    "tab\there, bell \x07, nul \x00 end",
    "smile 😀 👩‍👩‍👧",
    "שלום עולם",
    "a\u2028b\x85c\x0cd\x1ce",
    "é é",
]


@pytest.fixture
def load(tmp_path):
    """Load files written from {name: content}, strings or bytes."""

    def load(content, **options):
        paths = []
        for name, data in content.items():
            path = tmp_path / name
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
            paths.append(str(path))
        return load_texts(files=paths, cache_dir=tmp_path / "cache", **options)

    return load


def texts_of(dataset):
    return [row["text"] for row in dataset]


@pytest.mark.parametrize("streaming", [False, True])
def test_awkward_lines(load, caplog, streaming):
    content = "\ufeff" + "\r\n".join([*AWKWARD[:3], "", "   \t", *AWKWARD[3:]]) + "\n" + "last line, no ending"
    with caplog.at_level(logging.INFO, "distaff"):
        dataset = load({"a.txt": content}, streaming=streaming)
        assert texts_of(dataset) == [*AWKWARD, "last line, no ending"]
    assert "7 texts, 2 blank rows left out" in caplog.text
    for kind in ("bert", "roberta"):
        tokenizer = tokenizer_of(kind)
        if not streaming:
            rows = tokenize_lines(dataset, tokenizer=tokenizer, max_length=64)
            assert rows["input_ids"][:] == [tokenizer(text)["input_ids"] for text in texts_of(dataset)]


def test_lone_carriage_return_ends_a_line_as_in_python(load, tmp_path):
    content = b"one\rtwo\r\nthree\n\rfour"
    assert texts_of(load({"a.txt": content})) == ["one", "two", "three", "four"]
    assert (tmp_path / "a.txt").read_text().splitlines() == ["one", "two", "three", "", "four"]


def test_formats_say_the_same(load, tmp_path):
    records = [{"id": index, "other": f"no {index}", "text": f"tëxt, {index}"} for index in range(5)]
    expected = [record["text"] for record in records]
    lines = "\n".join(map(json.dumps, records))
    files = {
        "a.jsonl": lines,
        "lines.json": lines,
        "list.json": json.dumps(records, indent=1),
        "data.json": json.dumps({"data": records}),
        "a.csv": "id,other,text\n" + "\n".join(f'{r["id"]},{r["other"]},"{r["text"]}"' for r in records),
    }
    for name, content in files.items():
        assert texts_of(load({name: content})) == expected, name
        assert texts_of(load({name: content}, text_column="other")) == [record["other"] for record in records]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    assert texts_of(load_texts(files=str(tmp_path / "a.parquet"), cache_dir=tmp_path / "cache")) == expected


def test_first_column_of_strings_is_the_default(load):
    assert texts_of(load({"a.jsonl": '{"n": 1, "line": "x"}\n\n{"n": 2, "line": null}\n{"n": 3, "line": "y"}'})) == [
        "x",
        "y",
    ]
    assert texts_of(load({"a.csv": 'line\n"two\nlines"\n\nx'})) == ["two\nlines", "x"]


def test_comma_lists_globs_and_limits(load, tmp_path):
    load({"b.txt": "b", "a.txt": "a", "c,d.txt": "c"})
    cache = {"cache_dir": tmp_path / "cache"}
    assert texts_of(load_texts(files=f"{tmp_path}/b.txt,{tmp_path}/a.txt", **cache)) == ["b", "a"]
    assert texts_of(load_texts(files=[f"{tmp_path}/[ab].txt", f"{tmp_path}/c,d.txt"], **cache)) == ["a", "b", "c"]
    assert texts_of(load_texts(files=f"{tmp_path}/*.txt", max_samples=2, **cache)) == ["a", "b"]
    assert texts_of(load_texts(files=f"{tmp_path}/*.txt", max_samples=2, streaming=True)) == ["a", "b"]


def test_files_are_read_once_and_again_when_they_change(load, tmp_path, monkeypatch):
    assert texts_of(load({"a.txt": "one"})) == ["one"]
    assert texts_of(load({"a.txt": "one\ntwo"})) == ["one", "two"]

    def refuse(*args, **options):
        raise AssertionError

    load({"a.txt": "one\ntwo\nthree"})
    monkeypatch.setattr(text_module, "read_texts", refuse)
    again = load_texts(files=str(tmp_path / "a.txt"), cache_dir=tmp_path / "cache")
    assert texts_of(again) == ["one", "two", "three"]
    assert len(again.cache_files) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\n  \n\r\n", "has no text: 3 blank rows"),
        ("a.csv", b"text\n", "has no text"),
        ("a.json", b"[]", "has no text"),
        ("a.txt", b"ok\nb\xffd\n", r"line 2: byte 0xff at offset 4 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "c"\n', "line 3: not valid JSON"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n{"text": "c"\n', "line 3: not valid JSON"),
        ("a.json", b'[{"text": "a"},\n{"text": "b"},\n{"text" "c"}]', "line 3: not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"other": "b"}', "line 2: no column 'text', only other"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "line 2: the text is of type int"),
        ("a.json", b'[{"text": "a"}, {"text": ["b"]}]', "row 2: the text is of type list"),
        ("a.jsonl", b'{"n": 1, "m": 2}', "no column of text: it has n, m"),
        ("a.jsonl", b'"just a string"', "line 1: a str where an object"),
        ("a.json", b"3", "holds a int"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2: JSON that cannot be read"),
        ("a.json", b"[" * 100_000, "line 1: JSON that cannot be read"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1: JSON that cannot be read"),
        ("a.json", b'[{"text": "a", "n": ' + b"9" * 5000 + b"}]", "line 1: JSON that cannot be read"),
        (
            "a.jsonl",
            b'{"text": "\\ud83d\\ude00"}\n{"text": "half \\ud800 pair"}',
            "a.jsonl, line 2: half of a surrogate pair",
        ),
        ("a.csv", b"text,n\na,1\nb,c,2\n", "line 3: 3 fields where the header has 2"),
        ("a.csv", b'text\n"never closed\n', "not valid CSV"),
        ("a.parquet", b"PAR1 not really", "not a Parquet file"),
    ],
)
def test_bad_files(load, name, content, words):
    with pytest.raises(DataError, match=words) as caught:
        load({name: content})
    assert "\n" not in str(caught.value)


def test_bad_names_and_columns(load, tmp_path):
    with pytest.raises(DataError, match=r"no file '.*none\.txt'"):
        load_texts(files=str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="is a folder"):
        load_texts(files=str(tmp_path))
    with pytest.raises(DataError, match="No file matches"):
        load_texts(files=str(tmp_path / "*.nothing"))
    with pytest.raises(UsageError, match=r"'\.docx', which is none of \.txt, \.jsonl"):
        load({"a.docx": "x"})
    with pytest.raises(DataError, match="no column 'body': it has title, text"):
        load({"a.csv": "title,text\na,b"}, text_column="body")
    with pytest.raises(UsageError, match="no column 'body'"):
        load({"a.txt": "x"}, text_column="body")
    with pytest.raises(UsageError, match="one of --train_file and --dataset_name"):
        load_texts()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'n' is of type int64"):
        load_texts(files=str(tmp_path / "a.parquet"), text_column="n", cache_dir=tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set HF_HOME"):
        load_texts(files=str(load({"a.txt": "x"}) and tmp_path / "a.txt"), cache_dir=tmp_path / "file")


def test_saved_folders_and_datasets_that_are_not_there(tmp_path):
    dataset = datasets.Dataset.from_dict({"n": [1, 2, 3, 4], "body": ["a", " ", None, "b"]})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "many")
    assert texts_of(load_texts(dataset_name=str(tmp_path / "one"))) == ["a", "b"]
    assert texts_of(load_texts(dataset_name=str(tmp_path / "many"), streaming=True)) == ["a", "b"]
    with pytest.raises(UsageError, match="no split 'test': it has train"):
        load_texts(dataset_name=str(tmp_path / "many"), split="test")
    with pytest.raises(DataError, match=r"no column 'n' of strings: it has n \(.*int64.*\), body"):
        load_texts(dataset_name=str(tmp_path / "one"), text_column="n")
    with pytest.raises(DataError, match="cannot be reached"):
        load_texts(dataset_name="some-org/no-such-dataset", cache_dir=tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "from load_dataset"}\n')
    assert texts_of(load_texts(dataset_name=str(folder), cache_dir=tmp_path / "cache")) == ["from load_dataset"]
    with pytest.raises(UsageError, match="cannot be loaded as asked"):
        load_texts(dataset_name=str(folder), split="nothing", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("readme", ["", "---\nconfigs:\n- config_name: one\n  data_files: train.jsonl\n---\n"])
def test_a_folder_of_files_is_read_again_when_it_changes(tmp_path, readme):
    """`datasets` would take what a folder of the same name, or the same one, held before."""
    for place, text in (("a", "first"), ("a", "second"), ("b", "third")):
        folder = tmp_path / place / "set"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(readme)
        (folder / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
        assert texts_of(load_texts(dataset_name=str(folder), cache_dir=tmp_path / "cache")) == [text]


def test_categories_of_pandas_are_strings(tmp_path):
    table = pa.table({"text": pa.array(["a", "b", None, "a"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts_of(load_texts(files=str(tmp_path / "a.parquet"), cache_dir=tmp_path / "cache")) == ["a", "b", "a"]


def test_more_names_than_a_name_may_be_long(tmp_path):
    for number in range(30):
        (tmp_path / f"file-{number}.txt").write_text(f"{number}\n")
    names = ",".join(str(tmp_path / f"file-{number}.txt") for number in range(30))
    assert len(load_texts(files=names, cache_dir=tmp_path / "cache")) == 30
    with pytest.raises(DataError, match="There is no file"):
        load_texts(files="x" * 300 + ".txt")


def test_split_names(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": ["a"]})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, validation=dataset).save_to_disk(tmp_path / "many")
    assert split_names(str(tmp_path / "one")) == ["train"]
    assert split_names(str(tmp_path / "many")) == ["train", "validation"]
    with pytest.raises(DataError, match="cannot be reached"):
        split_names("some-org/no-such-dataset")


def test_a_stream_names_the_line_too(load):
    stream = load({"a.jsonl": '{"text": "a"}\n{"text": "b"}\n{"text": "c"\n'}, streaming=True)
    with pytest.raises(DataError, match="line 3: not valid JSON"):
        texts_of(stream)


def test_a_tokenizer_in_python(load):
    """ByT5's has no Rust part: no vocabulary file, no words."""
    tokenizer = ByT5Tokenizer()
    dataset = load({"a.txt": "short\na longer line"})
    rows = tokenize_lines(dataset, tokenizer=tokenizer, max_length=8)["input_ids"][:]
    assert rows == [tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in texts_of(dataset)]
    assert len(tokenize_blocks(dataset, tokenizer=tokenizer, block=10)) == 2
    with pytest.raises(UsageError, match="ByT5Tokenizer does not tell"):
        tokenize_lines(dataset, tokenizer=tokenizer, max_length=8, whole_word=True)


def test_workers_load_no_jax():
    """Each worker process of the tokenisation imports this module."""
    code = "import sys, distaff.data.text; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_validation_split(load):
    dataset = load({"a.txt": "\n".join(map(str, range(200)))})
    train, validation = split_validation(dataset, percentage=5)
    assert texts_of(validation) == [str(number) for number in range(10)]
    assert len(train) == 190
    train, validation = split_validation(dataset.select(range(2)), percentage=1)
    assert (len(train), len(validation)) == (1, 1)
    with pytest.raises(DataError, match="1 text cannot be split"):
        split_validation(dataset.select(range(1)), percentage=5)
    with pytest.raises(UsageError, match="between 1 and 99"):
        split_validation(dataset, percentage=100)


@pytest.mark.parametrize(("kind", "begin", "end"), [("bert", "[CLS]", "[SEP]"), ("roberta", "<s>", "</s>")])
def test_layouts(load, caplog, kind, begin, end):
    """Line mode: specials around each row. Joined mode: around each text, none doubled, wherever the cuts fall."""
    tokenizer = tokenizer_of(kind)
    first, last = tokenizer.convert_tokens_to_ids([begin, end])
    dataset = load({"a.txt": "\n".join(reference_lines()[:100])})
    with caplog.at_level(logging.INFO, "distaff"):
        lines = tokenize_lines(dataset, tokenizer=tokenizer, max_length=16)["input_ids"][:]
        blocks = tokenize_blocks(dataset, tokenizer=tokenizer, block=16)["input_ids"][:]
    alone = [tokenizer(text)["input_ids"] for text in reference_lines()[:100]]
    assert all(row[0] == first and row[-1] == last and len(row) <= 16 for row in lines)
    assert lines == [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in reference_lines()[:100]]
    assert f"{sum(len(row) > 16 for row in alone)} were longer than 16 tokens" in caplog.text
    joined = np.concatenate(alone)
    assert np.concatenate(blocks).tolist() == joined[: len(joined) // 16 * 16].tolist()
    assert f"the last {len(joined) % 16} of {len(joined)} tokens" in caplog.text
    specials = joined[np.isin(joined, [first, last])]
    assert specials.tolist() == [first, last] * 100


@pytest.mark.parametrize("side", ["right", "left"])
def test_cut_like_the_tokenizer_cuts(load, side):
    for kind in ("bert", "roberta"):
        tokenizer = tokenizer_of(kind)
        tokenizer.truncation_side = side
        names = [tokenizer.cls_token, tokenizer.sep_token, tokenizer.mask_token]
        texts = [f"{name} several words {name} and more {name}" * repeat for name in names for repeat in range(1, 4)]
        rows = tokenize_lines(load({"a.txt": "\n".join(texts)}), tokenizer=tokenizer, max_length=9)
        assert rows["input_ids"][:] == [tokenizer(text, truncation=True, max_length=9)["input_ids"] for text in texts]


def test_blocks_do_not_depend_on_batches_or_workers(load, monkeypatch):
    """1,003 lines, whose last three give less than a block."""
    tokenizer = tokenizer_of("bert")
    dataset = load({"a.txt": "\n".join(f"line {index}" for index in range(1000)) + "\na\nb\nc"})
    expected = tokenize_blocks(dataset, tokenizer=tokenizer, block=16, whole_word=True)
    assert {len(row) for row in expected["input_ids"]} == {16}
    monkeypatch.setattr(text_module, "_BATCH_ROWS", 7)
    for workers in (None, 2):
        got = tokenize_blocks(
            dataset, tokenizer=tokenizer, block=16, whole_word=True, num_proc=workers, overwrite_cache=True
        )
        assert got["input_ids"][:] == expected["input_ids"][:]
        assert got["word_start"][:] == expected["word_start"][:]
    in_memory = datasets.Dataset.from_dict({"text": texts_of(dataset)})
    assert tokenize_blocks(in_memory, tokenizer=tokenizer, block=16)["input_ids"][:] == expected["input_ids"][:]


def test_workers_do_not_hear_ctrl_c():
    """It reaches them too, and they would say so in tracebacks."""
    heard = "import signal, sys; sys.exit(signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with text_module._spawned_workers():
        worker = multiprocess.Process(target=exec, args=(heard,))
        worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_word_starts(load):
    tokenizer = tokenizer_of("bert")
    dataset = load({"a.txt": "Statements, unparenthesised expressions\nxyzzyxyzzy " + "word " * 30})
    rows = tokenize_lines(dataset, tokenizer=tokenizer, max_length=24, whole_word=True)
    for row in rows:
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert len(tokens) <= 24
        assert row["word_start"] == [int(not token.startswith("##")) for token in tokens]


def test_tokens_are_cached(load, monkeypatch):
    tokenizer = tokenizer_of("roberta")
    dataset = load({"a.txt": "one\ntwo, a longer line\nthree"})
    expected = tokenize_lines(dataset, tokenizer=tokenizer, max_length=5)["input_ids"][:]
    blocks = tokenize_blocks(dataset, tokenizer=tokenizer, block=5)["input_ids"][:]

    def refuse(*args, **options):
        raise AssertionError

    # The same settings do not tokenise again, in this process and with a tokenizer that was used otherwise since.
    monkeypatch.setattr(encode, "_lists", refuse)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=3)
    assert tokenize_lines(dataset, tokenizer=tokenizer, max_length=5)["input_ids"][:] == expected
    assert tokenize_blocks(dataset, tokenizer=tokenizer_of("roberta"), block=5)["input_ids"][:] == blocks
    with pytest.raises(AssertionError):
        tokenize_lines(dataset, tokenizer=tokenizer, max_length=6)
    with pytest.raises(AssertionError):
        tokenize_lines(dataset, tokenizer=tokenizer, max_length=5, overwrite_cache=True)


def test_less_than_a_block(load):
    dataset = load({"train.txt": "just five words of text"})
    tokenizer = tokenizer_of("bert")
    count = len(tokenizer("just five words of text")["input_ids"])
    with pytest.raises(
        DataError, match=f"has {count} tokens, less than one block of 64: .* at most {count}, or use --line_by_line"
    ):
        tokenize_blocks(dataset, tokenizer=tokenizer, block=64)
    assert len(tokenize_blocks(dataset, tokenizer=tokenizer, block=count)) == 1
    assert len(tokenize_lines(dataset, tokenizer=tokenizer, max_length=64)) == 1
    with pytest.raises(UsageError, match="max_seq_length of 3 or more"):
        tokenize_lines(dataset, tokenizer=tokenizer, max_length=2)


def test_ids_beyond_the_vocabulary(load):
    dataset = load({"a.txt": "\n".join(reference_lines()[:300])})
    rows = tokenize_lines(dataset, tokenizer=tokenizer_of("bert"), max_length=32)
    check_ids(rows, vocab_size=400)
    ids = rows["input_ids"][:]
    row = next(index for index, values in enumerate(ids) if max(values) >= 350)
    position = next(index for index, value in enumerate(ids[row]) if value >= 350)
    message = f"Row {row} has id {ids[row][position]} at position {position}, beyond the model's vocabulary of 350"
    with pytest.raises(DataError, match=re.escape(message)):
        check_ids(rows, vocab_size=350)


MEGABYTE = """
import resource, sys
sys.path.insert(0, {tests!r})
from text_cases import tokenizer_of
from distaff.data.text import load_texts, tokenize_blocks, tokenize_lines
def run(name):
    data = load_texts(files=name, cache_dir={cache!r})
    if {mode!r} == "blocks":
        return tokenize_blocks(data, tokenizer=tokenizer_of("roberta"), block=128)
    return tokenize_lines(data, tokenizer=tokenizer_of("roberta"), max_length=128, whole_word=True)
run({small!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = run({large!r})
print(len(rows), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("mode", ["blocks", "lines"])
def test_a_line_of_a_megabyte(tmp_path, mode):
    text = " ".join(reference_lines())
    text = (text * (1 + 1_000_000 // len(text)))[:1_000_000]
    (tmp_path / "large.txt").write_text("short\n" + text + "\nshort\n")
    (tmp_path / "small.txt").write_text("some words\n" * 100)
    script = MEGABYTE.format(
        tests=str(Path(__file__).parent),
        cache=str(tmp_path / "cache"),
        mode=mode,
        small=str(tmp_path / "small.txt"),
        large=str(tmp_path / "large.txt"),
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rows, megabytes = run.stdout.split()
    assert float(megabytes) < 300
    tokenizer = tokenizer_of("roberta")
    tokens = sum(len(tokenizer(part)["input_ids"]) for part in ("short", text, "short"))
    assert int(rows) == (tokens // 128 if mode == "blocks" else 3)
