"""`distaff train ner` and `distaff eval ner`: what is learnt, measured, written and refused."""

import json

import datasets
import jax
import numpy as np
import pytest

from distaff import pipeline
from distaff.cli import main
from distaff.data.pieces import softmax
from distaff.tasks import ner
from distaff.tasks.tokenizer import TokenizerFlags
from distaff.tasks.tokenizer import run as train_tokenizer
from recipe_cases import as_if_killed, one_line, results, settle_vocabulary

NAMES = {"Ada": "B-PER", "Lovelace": "I-PER", "Basel": "B-LOC", "Uri": "B-LOC", "Höngg": "I-LOC"}
WORDS = ("saw", "the", "green", "hill", "and", "went", "home", "again", ".")
SHAPE = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,max_position_embeddings=64"


def drawn(count, seed):
    """Sentences of words and names, each with a tag of its own."""
    rng = np.random.default_rng(seed)
    found = [rng.choice([*NAMES, *WORDS], rng.integers(3, 14)).tolist() for _ in range(count)]
    return [(words, [NAMES.get(word, "O") for word in words]) for words in found]


def columns(sentences):
    return "\n".join("".join(f"{word}\t{tag}\n" for word, tag in zip(*each)) for each in sentences)


def rows(sentences):
    return "".join(json.dumps({"tokens": words, "ner_tags": tags}) + "\n" for words, tags in sentences)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for name, count, seed in (("train", 120, 0), ("validation", 13, 1), ("test", 11, 2)):
            (folder / f"{name}.conll").write_text(columns(drawn(count, seed)))
            (folder / f"{name}.jsonl").write_text(rows(drawn(count, seed)))
        (folder / "texts.txt").write_text("\n".join(" ".join(words) for words, _ in drawn(60, 0)))
        for name, algorithm in (("bert", "wordpiece"), ("roberta", "byte-level-bpe")):
            output = str(folder / f"{name}-tokenizer")
            train_tokenizer(
                TokenizerFlags(
                    train_file=str(folder / "texts.txt"), algorithm=algorithm, vocab_size=290, output_dir=output
                )
            )
        settle_vocabulary(folder / "bert-tokenizer", [*NAMES, *WORDS])
        yield folder


def run(command, corpus, *flags):
    files = ("--validation_file", corpus / "validation.conll")
    training = ()
    if command == "train":
        training = (
            *("--train_file", corpus / "train.conll", "--config_overrides", SHAPE),
            *("--per_device_train_batch_size", 2, "--report_to", "none", "--learning_rate", 5e-3, "--max_steps", 30),
        )
        if "--model_name_or_path" not in flags and "--model_type" not in flags:
            training += ("--model_type", "bert", "--tokenizer_name", corpus / "bert-tokenizer")
    return main([command, "ner", *map(str, (*files, *training, *flags))])


@pytest.fixture(scope="module")
def trained(corpus):
    """A run with predictions, and what it wrote."""
    folder = corpus / "trained"
    flags = ("--test_file", corpus / "test.conll", "--do_predict", "--return_entity_level_metrics")
    assert run("train", corpus, "--output_dir", folder, *flags) == 0
    return folder


def predictions(folder):
    return [json.loads(line) for line in (folder / "predict_results.jsonl").read_text().splitlines()]


def test_it_learns_measures_and_predicts(corpus, trained):
    found = results(trained, "all")
    assert found["eval_f1"] > 0.95
    assert found["eval_LOC_number"] + found["eval_PER_number"] > 20
    assert found["predict_f1"] > 0.95
    assert found["predict_samples"] == 11
    config = json.loads((trained / "config.json").read_text())
    assert config["id2label"] == dict(zip("01234", ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]))
    wanted, answers = drawn(11, 2), predictions(trained)
    assert [answer["tokens"] for answer in answers] == [words for words, _ in wanted]
    assert all(len(answer["tags"]) == len(answer["scores"]) == len(answer["tokens"]) for answer in answers)
    assert (trained / "predict_results.conll").read_text() == "".join(
        columns([(answer["tokens"], answer["tags"])]) + "\n" for answer in answers
    )
    hits = [tag == right for answer, (_, tags) in zip(answers, wanted) for tag, right in zip(answer["tags"], tags)]
    assert np.mean(hits) == pytest.approx(found["predict_accuracy"])
    card = (trained / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card


def test_the_pipeline_says_what_the_run_predicted(trained):
    tag = pipeline(model=str(trained), aggregation_strategy="first", ignore_labels=[])
    for answer in predictions(trained):
        found = tag(answer["tokens"], is_split_into_words=True)
        kinds = [tag.partition("-")[2] or "O" for tag in answer["tags"]]
        starts = [name != before for before, name in zip([None, *kinds], kinds)]
        begun = [tag.startswith("B-") or start for tag, start in zip(answer["tags"], starts)]
        assert [each["entity_group"] for each in found] == [kind for kind, begins in zip(kinds, begun) if begins]


@pytest.mark.parametrize(("devices", "size"), [(1, 1), (1, 3), (2, 3), (4, 1), (4, 8), (8, 32)])
def test_figures_and_predictions_do_not_depend_on_batches(corpus, trained, tmp_path, run_on, devices, size):
    run_on(devices)
    flags = ("--model_name_or_path", trained, "--output_dir", tmp_path, "--per_device_eval_batch_size", size)
    predict = ("--test_file", corpus / "test.jsonl", "--do_predict", "--return_entity_level_metrics")
    assert run("eval", corpus, *flags, *predict) == 0
    found, expected = results(tmp_path, "all"), results(trained, "all")
    for name, value in found.items():
        assert value == pytest.approx(expected[name], abs=1e-6), name
    for one, other in zip(predictions(tmp_path), predictions(trained), strict=True):
        assert one["tags"] == other["tags"]
        np.testing.assert_allclose(one["scores"], other["scores"], atol=2e-6)


def test_long_sentences_have_a_tag_for_each_word(corpus, trained, tmp_path):
    """T76: words that vanish, rows of a few pieces, a row without words: each keeps its place."""
    odd = ["Ada", "\n", "saw", "", "Zürich-Höngg", "🙂", "Basel"]
    sentences = [odd, [], odd * 9]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"tokens": words}) + "\n" for words in sentences))
    flags = ("--model_name_or_path", trained, "--output_dir", tmp_path, "--test_file", path, "--do_predict")
    assert main(["eval", "ner", *map(str, flags), "--max_seq_length", "10"]) == 0
    found = predictions(tmp_path)
    assert [answer["tokens"] for answer in found] == sentences
    for answer in found:
        vanished = [word in ("\n", "") for word in answer["tokens"]]
        assert [score == 0 for score in answer["scores"]] == vanished
        assert all(tag == "O" for tag, gone in zip(answer["tags"], vanished) if gone)
        named = {word: tag for word, tag in zip(answer["tokens"], answer["tags"]) if word in ("Ada", "Basel")}
        assert {tag.partition("-")[2] for tag in named.values()} <= {"PER", "LOC"}
    assert results(tmp_path, "predict") == {"predict_samples": 3}
    text = (tmp_path / "predict_results.conll").read_text()
    assert text.count("\n") == sum(map(len, sentences)) + 3
    assert "\\n\tO\n" in text


def test_predictions_as_a_table(corpus, trained, tmp_path):
    flags = ("--model_name_or_path", trained, "--output_dir", tmp_path, "--test_file", corpus / "test.conll")
    assert main(["eval", "ner", *map(str, flags), "--do_predict", "--predictions_format", "csv"]) == 0
    lines = (tmp_path / "predict_results.csv").read_text().splitlines()
    assert lines[0] == "sentence,word,tag,score"
    answers = predictions(trained)
    assert len(lines) - 1 == sum(len(answer["tokens"]) for answer in answers)
    assert lines[1].split(",")[:3] == ["0", answers[0]["tokens"][0], answers[0]["tags"][0]]


def test_words_of_bytes_are_read_as_behind_a_space(corpus, tmp_path):
    flags = ("--model_type", "roberta", "--tokenizer_name", corpus / "roberta-tokenizer", "--output_dir", tmp_path)
    predict = ("--test_file", corpus / "test.conll", "--do_predict")
    assert run("train", corpus, *flags, *predict) == 0
    assert results(tmp_path)["eval_f1"] > 0.4
    tag = pipeline(model=str(tmp_path), ignore_labels=[])
    for answer in predictions(tmp_path)[:3]:
        # The text has the pieces that the words had, its first word too.
        text, words = tag(" ".join(answer["tokens"])), tag(answer["tokens"], is_split_into_words=True)
        assert [each["entity"] for each in text] == [each["entity"] for each in words]
        assert text[0]["word"].startswith("Ġ")


def test_other_labels_make_the_head_new(corpus, trained, tmp_path, capsys):
    path = tmp_path / "other.conll"
    path.write_text(columns([(words, [tag.replace("LOC", "GPE") for tag in tags]) for words, tags in drawn(20, 3)]))
    flags = ("--model_name_or_path", trained, "--max_steps", 1, "--train_file", path)
    assert run("train", corpus, *flags, "--validation_file=", "--output_dir", tmp_path / "out") == 0
    assert "the labels are now those of the data: B-GPE" in capsys.readouterr().err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["label2id"]) == ["B-GPE", "B-PER", "I-GPE", "I-PER", "O"]
    # Fewer tags than the model knows leave its labels as they are.
    path.write_text(columns([(["Ada"], ["B-PER"]), (["saw"], ["O"])]))
    assert run("train", corpus, *flags, "--validation_file=", "--output_dir", tmp_path / "few") == 0
    assert len(json.loads((tmp_path / "few" / "config.json").read_text())["id2label"]) == 5


def test_a_head_of_more_labels_is_new_where_that_is_asked_for(corpus, trained, tmp_path, capsys):
    path = tmp_path / "other.conll"
    path.write_text(columns([*drawn(20, 3), (["Ada"], ["B-ORG"])]))
    flags = ("--model_name_or_path", trained, "--max_steps", 1, "--train_file", path, "--validation_file=")
    assert run("train", corpus, *flags, "--output_dir", tmp_path / "out") == 2
    line = one_line(capsys)
    assert "The checkpoint tells 5 labels apart (B-LOC, B-PER, I-LOC, and 2 more), and the data have 6" in line
    assert "--ignore_mismatched_sizes" in line
    assert run("train", corpus, *flags, "--output_dir", tmp_path / "out", "--ignore_mismatched_sizes") == 0


def test_the_best_step_is_kept_by_the_figure_of_a_type(corpus, tmp_path):
    flags = ("--eval_steps", 5, "--load_best_model_at_end", "--metric_for_best_model", "LOC_f1")
    run_flags = (*flags, "--return_entity_level_metrics", "--output_dir", tmp_path)
    assert run("train", corpus, *run_flags) == 0
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = max(row["eval_LOC_f1"] for row in logged if "eval_LOC_f1" in row)
    assert results(tmp_path)["eval_LOC_f1"] == best


def test_a_type_that_the_evaluation_lacks_is_no_better_than_any(corpus, trained, tmp_path, capsys):
    (tmp_path / "few.conll").write_text("the\tO\nhill\tO\n")
    flags = ("--eval_steps", 1, "--load_best_model_at_end", "--metric_for_best_model", "PER_f1", "--max_steps", 2)
    words = (*flags, "--return_entity_level_metrics", "--learning_rate", 0, "--output_dir", tmp_path / "out")
    fixed = ("--model_name_or_path", trained, "--validation_file", tmp_path / "few.conll")
    assert run("train", corpus, *words, *fixed) == 0
    assert "No step is the best by PER_f1: the parameters of the last one are taken" in capsys.readouterr().err
    assert results(tmp_path / "out")["eval_PER_f1"] is None


def test_stopped_and_resumed_is_as_uninterrupted(corpus, tmp_path):
    flags = ("--save_steps", 4, "--logging_steps", 2, "--max_steps", 8)
    assert run("train", corpus, *flags, "--output_dir", tmp_path / "whole") == 0
    as_if_killed(tmp_path / "whole", tmp_path / "parts", step=4)
    assert run("train", corpus, *flags, "--output_dir", tmp_path / "parts", "--resume_from_checkpoint") == 0
    for name in ("model.safetensors", "eval_results.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


# Loss.


class Fixed:
    """A module whose logits are given."""

    def __init__(self, logits):
        self.logits = logits

    def apply(self, variables, input_ids, attention_mask, **options):
        return type("Output", (), {"logits": self.logits})


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_a_sum_over_labelled_pieces(smoothing):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, 3)).astype(np.float32)
    labels, weights = rng.integers(0, 3, (2, 4)), np.array([[1, 0, 1, 1], [0, 0, 0, 0]], np.float32)
    batch = {"input_ids": labels, "attention_mask": labels, "labels": labels, "label_weights": weights}
    loss, weight = ner.ner_loss(Fixed(logits), {}, batch, None, label_smoothing=smoothing)["loss"]
    scores = np.log(softmax(logits))
    each = -(1 - smoothing) * np.take_along_axis(scores, labels[..., None], -1)[..., 0] - smoothing * scores.mean(-1)
    assert float(loss) == pytest.approx((each * weights).sum(), rel=1e-5)
    assert float(weight) == 3
    none = ner.ner_loss(Fixed(logits), {}, {**batch, "label_weights": weights * 0}, None)["loss"]
    assert [float(part) for part in none] == [0, 0]


def test_padded_and_bucketed_rows_have_one_loss_and_gradient(corpus, trained):
    from distaff import FlaxBertForTokenClassification

    model = FlaxBertForTokenClassification.from_pretrained(trained)
    found = []
    for pad in (False, True):
        flags = ner.NerFlags(
            model_name_or_path=str(trained),
            train_file=str(corpus / "train.conll"),
            do_eval=False,
            pad_to_max_length=pad,
            group_by_length=False,  # the same rows
            max_seq_length=48,
        )
        tuning = ner.prepare(flags, (16, 16))
        batch = tuning.train(0)

        def mean(params, batch=batch, tuning=tuning):
            total, weight = tuning.loss_fn(params, batch, None)["loss"]
            return total / weight

        found.append((batch["input_ids"].shape[1], *jax.value_and_grad(mean)(model.params)))
    (short, loss, gradient), (long, padded_loss, padded_gradient) = found
    assert short < long == 48
    assert float(loss) == pytest.approx(float(padded_loss), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(padded_gradient)):
        np.testing.assert_allclose(one, other, atol=1e-5)


# What is refused.


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.conll", "Ada\tB-PER\nUri\tS-LOC\n", r"a.conll, line 1, word 2 ('Uri'): the tag 'S-LOC' is none of"),
        ("a.conll", "Ada\tB-GOD\n", "the tag 'B-GOD' is none of the model's 5"),
        ("a.jsonl", '{"tokens": ["a", "b"], "ner_tags": ["O"]}\n', "line 1: 2 words and 1 tags"),
        ("a.conll", "\n\n", "has no sentence"),
        ("a.conll", "Z\xfcrich\tO\n".encode("latin-1"), "line 1: byte 0xfc at offset 1 is not UTF-8"),
    ],
)  # fmt: skip
def test_bad_sentences_end_before_anything_is_written(corpus, trained, tmp_path, capsys, name, content, said):
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for command, flags in (
        ("train", ("--validation_file", path, "--output_dir", out)),
        ("eval", ("--validation_file", path, "--model_name_or_path", trained)),
        ("eval", ("--do_predict", "--test_file", path, "--model_name_or_path", trained, "--output_dir", out)),
    ):
        assert run(command, corpus, *flags) == 1
        assert said in one_line(capsys)
    assert not list(out.iterdir())


def test_one_tag_is_nothing_to_learn(corpus, tmp_path, capsys):
    (tmp_path / "few.conll").write_text("Ada\tO\nsaw\tO\n")
    assert run("train", corpus, "--train_file", tmp_path / "few.conll", "--output_dir", tmp_path / "out") == 1
    assert "All training words have the tag 'O'" in one_line(capsys)


def test_the_recipe_that_a_run_wrote_is_one(corpus, trained, tmp_path, capsys):
    """What `recipe.yaml` holds trains the same again, and evaluates."""
    recipe = str(trained / "recipe.yaml")
    assert main(["train", "ner", recipe, "--output_dir", str(tmp_path), "--do_predict", "False"]) == 0
    assert results(tmp_path) == results(trained)
    assert main(["eval", "ner", recipe, "--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path)]) == 0
    assert predictions(tmp_path) == predictions(trained)


def test_a_tokenizer_without_words_is_refused(corpus, trained, tmp_path, capsys):
    """T76: one that cannot tell of which word a piece is."""
    from transformers import Wav2Vec2CTCTokenizer

    letters = ["<pad>", "<unk>", "|", "<s>", "</s>", *"abcd"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(tmp_path / "slow")
    assert run("eval", corpus, "--model_name_or_path", trained, "--tokenizer_name", tmp_path / "slow") == 2
    assert "Wav2Vec2CTCTokenizer does not tell which word" in one_line(capsys)


def test_flags_that_cannot_be(corpus, trained, capsys):
    assert run("eval", corpus) == 2
    assert "nothing to evaluate" in one_line(capsys)
    assert run("eval", corpus, "--model_name_or_path", trained, "--do_predict") == 2
    assert "--output_dir" in one_line(capsys)
    flags = ("--model_name_or_path", trained, "--do_predict", "--output_dir", corpus / "nowhere")
    assert run("eval", corpus, *flags) == 2
    assert "give --test_file" in one_line(capsys)
    assert run("eval", corpus, "--model_name_or_path", trained, "--max_seq_length", 65) == 2
    assert "more than the 64 positions" in one_line(capsys)
    assert run("eval", corpus, "--model_name_or_path", trained, "--max_seq_length", 2) == 2
    assert "this tokenizer needs 3" in one_line(capsys)
