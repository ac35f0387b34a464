"""Pipelines answer as those of Transformers, and take their inputs in every form."""

import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import distaff
from distaff import pipeline
from distaff.cli import main
from distaff.core.errors import CheckpointError, DataError, UsageError
from distaff.pipelines import PIPELINES
from golden import pipeline_cases as golden
from recipe_cases import one_line

STORED = golden.read()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    return {name: golden.write(name, keys, folder / name) for name, keys in STORED["keys"].items()}


@pytest.fixture(scope="module")
def opened(folders):
    made = {}

    def get(task, model):
        if (task, model) not in made:
            made[task, model] = pipeline(task, str(folders[model]), batch_size=4)
        return made[task, model]

    return get


def assert_same(found, expected, where=""):
    """The same fields in the same order, numbers within the tolerance."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}/{number}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("case", golden.CASES)
def test_answers_are_those_of_transformers(opened, case):
    task, model, inputs, settings = golden.CASES[case]
    call, expected = opened(task, model), STORED["answers"][case]
    if settings.get("is_split_into_words"):
        # Transformers wraps the answer to one split sentence once more.
        expected = [answer[0] for answer in expected]
    together = call(inputs, **settings)
    assert_same(together, expected)
    json.dumps(together)
    assert_same([call(each, **settings) for each in inputs], expected)


@pytest.mark.parametrize("case", ["bert-tags-first", "features-bert", "mask", "labels", "pairs-bert-nli", "text"])
def test_a_call_may_say_how_many_are_computed_together(opened, case):
    task, model, inputs, settings = golden.CASES[case]
    call = opened(task, model)
    assert_same(call(inputs, batch_size=1, **settings), STORED["answers"][case])
    assert call.batch_size == 4
    with pytest.raises(UsageError, match="batch_size is 0"):
        call(inputs, batch_size=0, **settings)


@pytest.mark.parametrize("case", ["bert-tags-first", "features-bert", "mask", "labels", "text"])
def test_an_object_is_no_list_of_texts(opened, case):
    """Its keys are not what is meant."""
    task, model, inputs, settings = golden.CASES[case]
    with pytest.raises(UsageError, match="dict is neither a text nor several"):
        opened(task, model)({"text": inputs[0]}, **settings)


@pytest.mark.parametrize("case", ["bert-tags-first", "features-bert", "mask", "classes-bert-nli", "labels", "text"])
def test_half_of_a_character_is_refused(opened, case):
    task, model, inputs, settings = golden.CASES[case]
    with pytest.raises(DataError, match=r"Input 1 holds half of a surrogate pair \('\\ud800'\)"):
        opened(task, model)([inputs[0], "\ud800"], **settings)


def test_one_many_a_generator_and_a_file(opened, tmp_path):
    tag = opened("token-classification", "bert-tags")
    texts = [text.replace("\t", " ") for text in golden.TEXTS * 20]
    expected = tag(texts)
    found = tag(text for text in texts)
    assert iter(found) is found
    assert_same(list(found), expected)
    assert_same(list(tag(tuple(texts[:3]))), expected[:3])
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts))
    assert_same(list(tag(path)), expected)
    assert tag([]) == []
    with pytest.raises(UsageError, match="type int is neither a text nor several"):
        tag(7)
    with pytest.raises(DataError, match="Input 1 is of type NoneType"):
        tag(["a", None])
    path.write_bytes(b"Z\xfcrich\n")
    with pytest.raises(DataError, match="line 1: byte 0xfc"):
        list(tag(path))


def test_the_size_of_batches_changes_nothing(folders):
    expected = pipeline("token-classification", str(folders["bert-tags"]), batch_size=1)(golden.TEXTS)
    for size in (3, 16):
        tag = pipeline("token-classification", str(folders["bert-tags"]), batch_size=size)
        assert_same(tag(golden.TEXTS), expected)


def test_a_mesh_changes_nothing(folders):
    settings = {"mesh": "data=2,tensor=4", "attn_implementation": "blocks"}
    found = pipeline("token-classification", str(folders["bert-tags"]), **settings)
    assert found.model.mesh.shape["tensor"] == 4
    assert found.model.module.attn_implementation == "blocks"
    kernel = found.model.params["bert"]["encoder"]["0"]["mlp"]["up"]["kernel"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 4
    assert_same(found(golden.TEXTS), pipeline("token-classification", str(folders["bert-tags"]))(golden.TEXTS))


@pytest.mark.parametrize("strategy", golden.STRATEGIES)
def test_a_text_over_the_limit_is_answered_whole(opened, strategy):
    tag = opened("token-classification", "bert-tags")
    text = " ".join(["Anna is in Basel", "Zürich"] * 12)
    options = {"aggregation_strategy": strategy, "ignore_labels": []}
    assert len(tag.tokenizer(text)["input_ids"]) > 2 * tag.longest_input
    found = tag(text, **options)
    assert found[-1]["end"] == len(text)
    # Nothing is named twice, nothing left out, wherever the parts meet.
    assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(found))
    covered = {place for each in found for place in range(each["start"], each["end"])}
    assert covered >= {place for place, letter in enumerate(text) if letter != " "}
    if strategy == "none":
        assert [each["index"] for each in found] == list(range(1, len(found) + 1))


def test_words_that_vanish_leave_the_places_of_others(opened):
    tag = opened("token-classification", "bert-tags")
    words = ["Anna", "\n", "", "Basel"]
    found = tag(words, is_split_into_words=True, ignore_labels=[])
    text = " ".join(words)
    assert [text[each["start"] : each["end"]] for each in found] == ["A", "n", "n", "a", "Basel"]


def test_settings_of_token_classification(opened, folders):
    tag = opened("token-classification", "bert-tags")
    with pytest.raises(UsageError, match="aggregation_strategy 'best' is none of none, simple"):
        tag("a", aggregation_strategy="best")
    assert_same(tag("Anna", aggregation_strategy="SIMPLE"), tag("Anna", aggregation_strategy="simple"))
    every = tag("Anna", ignore_labels=[])
    kind = every[0]["entity"]
    assert_same(tag("Anna", ignore_labels=kind), [each for each in every if each["entity"] != kind])
    assert_same(tag("Anna", ignore_labels=None), tag("Anna"))
    with pytest.raises(UsageError, match="did you mean 'aggregation_strategy'"):
        tag("a", agregation_strategy="first")
    with pytest.raises(UsageError, match="no setting 'device'"):
        pipeline("ner", str(folders["bert-tags"]), device=0)
    with pytest.raises(UsageError, match="batch_size is 0"):
        pipeline("ner", str(folders["bert-tags"]), batch_size=0)
    with pytest.raises(UsageError, match="loaded already: leave dtype out"):
        pipeline("ner", tag.model, tokenizer=tag.tokenizer, dtype="bfloat16")
    with pytest.raises(UsageError, match="do not belong together"):
        pipeline("ner", str(folders["bert-tags"]), tokenizer=str(folders["roberta"]))
    again = pipeline("ner", tag.model, tokenizer=tag.tokenizer, aggregation_strategy="first")
    assert_same(again("Anna"), tag("Anna", aggregation_strategy="first"))


def test_a_tokenizer_without_places_answers_for_pieces_alone(opened, tmp_path):
    from transformers import Wav2Vec2CTCTokenizer

    letters = ["<pad>", "<unk>", "|", "<s>", "</s>", *"abcd"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    slow = Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    tag = pipeline("ner", opened("ner", "bert-tags").model, tokenizer=slow, ignore_labels=[])
    found = tag("ab d")
    assert [(each["word"], each["index"], each["start"], each["end"]) for each in found] == [
        ("a", 0, None, None), ("b", 1, None, None), ("|", 2, None, None), ("d", 3, None, None),
    ]  # fmt: skip
    for options in ({"aggregation_strategy": "first"}, {"is_split_into_words": True}):
        with pytest.raises(UsageError, match="Wav2Vec2CTCTokenizer does not tell which word"):
            tag(["ab"], **options)


def test_features_that_do_not_fit(opened):
    features = opened("feature-extraction", "bert")
    with pytest.raises(DataError, match="longer than the 48 of the model: shorten it, or pass truncation=True"):
        features("a " * 60)
    assert features("a " * 60, truncation=True, return_tensors=True).shape == (1, 48, 32)


# The task of a model.


def test_the_task_is_found(folders, tmp_path):
    for model, task in {
        "bert-tags": "token-classification",
        "bert": "feature-extraction",
        "bert-mask": "fill-mask",
        "gpt2": "text-generation",
    }.items():
        found = pipeline(model=str(folders[model]))
        assert isinstance(found, PIPELINES[task]), model
        again = pipeline(model=found.model, tokenizer=found.tokenizer)
        assert isinstance(again, PIPELINES[task]), model
    config = json.loads((folders["bert"] / "config.json").read_text())
    for names, said in ((["BertForNextSentencePrediction"], "model of no task"), ([], "names no architectures")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(UsageError, match=said):
            pipeline(model=str(tmp_path))
    with pytest.raises(UsageError, match="needs a model"):
        pipeline("fill-mask")


# Vectors of sentences.


@pytest.fixture
def sentences(folders, tmp_path):
    """`sentences(pooling, normalize=...)` opens a copy of the model with files of sentence-transformers."""

    def get(pooling, **options):
        folder = golden.write("bert", STORED["keys"]["bert"], tmp_path / "sentences")
        golden.write_pooling(folder, pooling, **options)
        return pipeline(model=str(folder))

    return get


@pytest.mark.parametrize("name", golden.POOLING)
def test_vectors_are_pooled_as_the_files_say(sentences, name):
    expected = np.array(STORED["vectors"][name])
    plain = sentences(golden.POOLING[name], normalize=False)
    np.testing.assert_allclose(plain.embed(golden.TEXTS), expected, atol=TOLERANCE)
    of_length_1 = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    found = sentences(golden.POOLING[name], normalize=True).embed(golden.TEXTS)
    np.testing.assert_allclose(found, of_length_1, atol=TOLERANCE)
    assert found.dtype == np.float32
    scores = plain(golden.TEXTS[0], golden.TEXTS[1:])
    np.testing.assert_allclose(scores, of_length_1[1:] @ of_length_1[0], atol=TOLERANCE)
    asked = {"source_sentence": golden.TEXTS[0], "sentences": golden.TEXTS[1:]}
    assert plain(asked) == scores
    assert plain([asked, asked]) == [scores, scores]


def test_without_such_files_it_is_the_mean_of_length_1(folders):
    similar = pipeline("sentence-similarity", str(folders["bert"]))
    expected = np.array(STORED["vectors"]["mean"])
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(similar.embed(golden.TEXTS), expected, atol=TOLERANCE)
    np.testing.assert_array_equal(similar.embed(golden.TEXTS[0]), similar.embed(golden.TEXTS[:1])[0])


def test_sentences_are_cut_where_the_model_was_trained_to(sentences, caplog):
    similar = sentences(golden.POOLING["mean"], normalize=True, limit=8)
    vectors = similar.embed(["a b c d e n r s t", "a b c d e n z z z z"])
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert "2 of 2 texts are longer than 8 tokens and were cut" in caplog.text


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("dot", lambda one, other: one @ other),
        ("euclidean", lambda one, other: -np.linalg.norm(one - other)),
        ("manhattan", lambda one, other: -np.abs(one - other).sum()),
    ],
)
def test_the_similarity_that_the_files_name(sentences, tmp_path, name, formula):
    sentences(golden.POOLING["mean"], normalize=False)
    (tmp_path / "sentences" / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": name}))
    similar = pipeline(model=str(tmp_path / "sentences"))
    one, other = similar.embed(["a b", "c"])
    assert similar("a b", ["c"]) == pytest.approx([formula(one, other)], rel=1e-5)


def test_what_cannot_be_compared_is_refused(sentences, tmp_path):
    similar = sentences(golden.POOLING["mean"], normalize=True)
    for asked in ("a", {"source_sentence": "a"}):
        with pytest.raises(DataError, match="needs a source and sentences"):
            similar(asked)
    for several in ("abc", []):
        with pytest.raises(DataError, match="list of at least one text"):
            similar("a", several)
    with pytest.raises(UsageError, match="no texts"):
        similar.embed([])
    with pytest.raises(CheckpointError, match="pools by nothing"):
        sentences({}, normalize=True)
    with pytest.raises(CheckpointError, match="include_prompt"):
        sentences({"pooling_mode": "mean", "include_prompt": False}, normalize=True)
    folder = tmp_path / "sentences"
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="which says how tokens become a vector"):
        pipeline(model=str(folder))
    dense = [{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "2_Dense", "type": "x.Dense"}]
    (folder / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(CheckpointError, match="has Dense, which distaff has not"):
        pipeline(model=str(folder))


def test_encoders_that_write_have_no_features(tmp_path):
    from transformers import T5Config

    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    distaff.FlaxT5Model(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="is an encoder-decoder"):
        pipeline("feature-extraction", str(tmp_path))


def test_files_of_pathlib_are_texts_and_folders_are_models(folders):
    similar = pipeline("sentence-similarity", Path(folders["bert"]))
    assert similar("a", ["a"]) == pytest.approx([1.0])


# The command line.


def printed(capsys, *words):
    assert main(["predict", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_of_json_for_each_text(opened, folders, tmp_path, capsys, monkeypatch):
    tag = opened("token-classification", "bert-tags")
    command = ("token-classification", folders["bert-tags"], "--json", "--aggregation_strategy", "first")
    texts = ["Anna is in Basel.", "Zürich"]
    expected = [{"text": text, "entities": tag(text, aggregation_strategy="first")} for text in texts]
    assert_same(printed(capsys, *command[:2], *texts, *command[2:]), expected)
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [texts[0], "", texts[1]]))
    assert main(["predict", *map(str, command), "--file", str(path)]) == 0
    shown = capsys.readouterr()
    assert_same([json.loads(line) for line in shown.out.splitlines()], expected)
    assert "texts.jsonl: 1 blank rows have no answer." in shown.err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert_same(printed(capsys, *command), expected)
    (row,) = printed(capsys, "feature-extraction", folders["bert"], "a")
    assert np.shape(row["features"]) == (1, 3, 32)
    rows = printed(capsys, "sentence-similarity", folders["bert"], "a", "a", "b c", "--json")
    assert [row["text"] for row in rows] == ["a", "b c"]
    assert rows[0]["score"] == pytest.approx(1)


def test_what_is_printed_to_be_read(folders, capsys):
    assert main(["predict", "token-classification", str(folders["bert-tags"]), "Anna"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Anna"
    assert all(re.fullmatch(r"  \S+  [\w-]+  \d\.\d{3}  \(\d-\d\)", line) for line in lines[1:])
    assert len(lines) > 1
    assert main(["predict", "sentence-similarity", str(folders["bert"]), "a", "a"]) == 0
    assert capsys.readouterr().out == "1.0000  a\n"
    assert main(["predict", "text-generation", str(folders["gpt2"]), "a", "--max_new_tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("a")


def test_texts_that_are_not_there(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    command = ("predict", "token-classification", str(folders["bert-tags"]))
    for words, said in (
        ((), "There is no text"),
        (("a", "--file", "b.txt"), "leave --file out, or the texts"),
        (("--file", str(tmp_path / "b.txt")), "There is no file"),
        (("a", "--text_column", "b"), "is a column of --file"),
        (("a", "--aggregation_strategy", "best"), "is none of none, simple"),
    ):
        assert main([*command, *words]) in (1, 2)
        assert said in one_line(capsys)
    similar = ("predict", "sentence-similarity", str(folders["bert"]))
    assert main([*similar, "a"]) == 2
    assert "nothing to compare with" in one_line(capsys)
    assert main([*similar, "--file", "b.txt"]) == 2
    assert "one text is needed" in one_line(capsys)
