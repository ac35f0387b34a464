"""`distaff train glue`: classes and numbers for texts, from a table to predictions."""

import json
import math
from dataclasses import replace

import datasets
import jax
import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import AutoConfig

import distaff
from battery.family import assert_trees_equal
from distaff import pipeline
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.data.labelled import LabelledColumns, has_types, load_labelled, tokenize_labelled
from distaff.hub import open_tokenizer
from distaff.tasks import _finetune as finetune
from distaff.tasks import glue
from distaff.tasks._class_scores import class_figures, number_figures
from distaff.train import FitResult, Selection, collect
from distaff.train.best import Best
from labelled_cases import KINDS, SHAPE, make_tokenizer, predicted, results, rows, run, write
from recipe_cases import as_if_killed, logged, one_line


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files of classes, and a tokenizer."""
    folder = tmp_path_factory.mktemp("glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        make_tokenizer(folder)
        for name, count, seed in (("train", 64, 0), ("validation", 21, 1), ("test", 5, 2)):
            write(folder / f"{name}.tsv", rows(count, seed))
        yield folder


def scratch(corpus, *, kind="bert", shape=SHAPE):
    """Flags of a tiny model from scratch."""
    return ("--model_type", kind, "--config_overrides", shape, "--tokenizer_name", corpus / "tokenizer")


@pytest.fixture(scope="module")
def trained(corpus):
    """A run that learns its 64 rows, with all that a run can write."""
    folder = corpus / "trained"
    words = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "validation.tsv")
    more = ("--do_predict", "--test_file", corpus / "test.tsv", "--load_best_model_at_end")
    steps = ("--max_steps", 120, "--eval_steps", 40, "--save_steps", 60, "--save_total_limit", 1)
    numbers = ("--learning_rate", 1e-2, "--logging_steps", 20, "--metric_for_best_model", "loss")
    assert run("train", "--output_dir", folder, *scratch(corpus), *words, *more, *steps, *numbers) == 0
    return folder


def test_it_learns_and_says_what_it_learnt(corpus, trained):
    figures = results(trained)
    assert figures["eval_accuracy"] == 1.0
    assert figures["eval_f1"] == figures["eval_matthews_correlation"] == 1.0
    config = AutoConfig.from_pretrained(trained)
    assert config.id2label == dict(enumerate(KINDS))
    assert config.problem_type == "single_label_classification"
    assert config.architectures == ["BertForSequenceClassification"]


def test_five_rows_in_five_predictions_out(corpus, trained):
    given, found = rows(5, 2), predicted(trained)
    assert [row["prediction"] for row in found] == [row["label"] for row in given]
    assert [row["index"] for row in found] == list("01234")
    for row in found:
        shares = [float(row[f"probability_{kind}"]) for kind in KINDS]
        assert abs(sum(shares) - 1) < 1e-6
        assert KINDS[int(np.argmax(shares))] == row["prediction"]
    assert results(trained, "predict")["predict_accuracy"] == 1.0


def test_evaluation_alone_gives_the_same(corpus, trained, tmp_path, capsys):
    words = ("--model_name_or_path", trained, "--validation_file", corpus / "validation.tsv", "--output_dir", tmp_path)
    more = ("--do_predict", "--test_file", corpus / "test.tsv", "--predictions_format", "jsonl")
    assert run("eval", *words, *more) == 0
    assert "eval_accuracy = 1" in capsys.readouterr().out
    for name, value in results(tmp_path).items():
        assert value == pytest.approx(results(trained)[name], abs=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "predict_results.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [row["prediction"] for row in predicted(trained)]


def test_stopped_and_resumed_equals_at_once(corpus, trained, tmp_path):
    """The best step, which may lie before the resume, too."""
    parts = tmp_path / "parts"
    words = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "validation.tsv")
    steps = ("--max_steps", 120, "--eval_steps", 40, "--save_steps", 60)
    numbers = (
        "--learning_rate",
        1e-2,
        "--logging_steps",
        20,
        "--load_best_model_at_end",
        "--metric_for_best_model",
        "loss",
    )
    flags = (*scratch(corpus), *words, *steps, *numbers)
    whole = tmp_path / "whole"
    assert run("train", "--output_dir", whole, *flags) == 0
    as_if_killed(whole, parts, step=60)
    assert run("train", "--output_dir", parts, *flags, "--resume_from_checkpoint") == 0
    assert logged(parts) == logged(whole)
    assert (
        results(parts, "all")["best_step"] == results(whole, "all")["best_step"] == results(trained, "all")["best_step"]
    )
    loaded = [distaff.FlaxBertForSequenceClassification.from_pretrained(folder).params for folder in (whole, parts)]
    assert_trees_equal(*loaded)
    assert_trees_equal(loaded[0], distaff.FlaxBertForSequenceClassification.from_pretrained(trained).params)


def test_frozen_modules_stay(corpus, trained, tmp_path):
    words = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "validation.tsv")
    more = ("--freeze", "embeddings", "encoder.0.attention", "--max_steps", 2, "--weight_decay", 0.5)
    assert run("train", "--output_dir", tmp_path / "out", "--model_name_or_path", trained, *words, *more) == 0
    before, after = (
        flatten(distaff.FlaxBertForSequenceClassification.from_pretrained(folder).params)
        for folder in (trained, tmp_path / "out")
    )
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed
    assert [path for path in changed if "embeddings" in path or "encoder/0/attention/" in path] == []


def test_numbers(corpus, tmp_path):
    """Two texts, labels 0.0 to 5.0: one output, squared error, the correlations of scipy (T71)."""
    rng = np.random.default_rng(0)
    shown = [
        {"sentence1": row["sentence"], "sentence2": other["sentence"], "label": float(rng.integers(0, 51)) / 10}
        for row, other in zip(rows(24, 3), rows(24, 4))
    ]
    train, validation = write(tmp_path / "a.csv", shown[:16]), write(tmp_path / "b.jsonl", shown[16:])
    words = ("--train_file", train, "--validation_file", validation, "--max_steps", 3)
    more = ("--do_predict", "--test_file", validation)
    assert run("train", "--output_dir", tmp_path / "out", *scratch(corpus), *words, *more) == 0
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.num_labels, config.problem_type) == (1, "regression")
    found = [float(row["prediction"]) for row in predicted(tmp_path / "out")]
    wanted = [row["label"] for row in shown[16:]]
    figures = results(tmp_path / "out")
    assert figures["eval_pearson"] == pytest.approx(scipy.stats.pearsonr(found, wanted).statistic, abs=1e-6)
    assert figures["eval_spearmanr"] == pytest.approx(scipy.stats.spearmanr(found, wanted).statistic, abs=1e-6)
    assert figures["eval_mse"] == pytest.approx(np.mean((np.array(found) - wanted) ** 2), abs=1e-5)


def test_constant_predictions_have_no_correlation(corpus, tmp_path, capsys):
    """null where it is written, with a note (T71)."""
    words = ("--train_file", write(tmp_path / "a.csv", [{"text": "the cat", "label": 0.5}] * 8))
    split = ("--validation_split_percentage", 50, "--max_steps", 1)
    assert run("train", "--output_dir", tmp_path / "out", *scratch(corpus), *words, *split) == 0
    assert results(tmp_path / "out")["eval_pearson"] is None
    assert "the predictions are all the same; it is written as null" in capsys.readouterr().err
    assert "NaN" not in (tmp_path / "out" / "all_results.json").read_text()


def test_what_is_not_defined_stays_so_where_a_finished_run_is_gone_on_with(corpus, tmp_path):
    words = ("--train_file", write(tmp_path / "a.csv", [{"text": "the cat", "label": 0.5}] * 8), "--max_steps", 1)
    flags = ("--output_dir", tmp_path / "out", *scratch(corpus), *words, "--validation_file", tmp_path / "a.csv")
    assert run("train", *flags) == 0
    first = results(tmp_path / "out")
    assert run("train", *flags, "--resume_from_checkpoint") == 0
    assert results(tmp_path / "out") == first
    assert first["eval_pearson"] is None


def test_the_card_has_the_figures_of_the_step_that_is_taken(trained):
    """And the log those of all evaluations."""
    card = (trained / "README.md").read_text()
    names = ("loss", "accuracy", "f1", "matthews_correlation")
    assert all(f"| {name} | {results(trained)[f'eval_{name}']:.5g} |" in card for name in names)
    assert f"| step | epoch | {' | '.join(f'eval_{name}' for name in names)} |" in card
    rows = [row for row in logged(trained) if "eval_f1" in row]
    assert len(rows) == 3
    for row in rows:
        figures = " | ".join(f"{row[f'eval_{name}']:.5g}" for name in names)
        assert f"| {row['step']} | {row['epoch']:.5g} | {figures} |" in card


def test_figures_of_the_last_step_do_not_stand_beside_those_of_the_best(tmp_path):
    """An evaluation may have figures that another lacks: of types that no span is of."""
    best = Best(Selection(metric="eval_f1"), step=2, metrics={"epoch": 1.0, "eval_f1": 0.5})
    last = {"epoch": 2.0, "loss": 0.1, "eval_f1": 0.4, "eval_PER_f1": 0.3}
    result = FitResult(state=None, step=4, metrics=last, interrupted=None, compilations={}, best=best)
    assert finetune._measured(result, tmp_path) == {"epoch": 1.0, "loss": 0.1, "eval_f1": 0.5, "best_step": 2}
    result = replace(result, best=Best(Selection(metric="eval_f1", reload=False), step=2, metrics=best.metrics))
    assert finetune._measured(result, tmp_path) == last


def test_figures_are_those_of_the_libraries():
    rng = np.random.default_rng(0)
    for classes in (2, 3):
        logits, wanted = rng.normal(size=(50, classes)), rng.integers(0, classes, 50)
        found = class_figures(logits, wanted)
        assert found["accuracy"] == np.mean(logits.argmax(1) == wanted)
        average = "binary" if classes == 2 else "macro"
        assert found["f1"] == pytest.approx(f1_score(wanted, logits.argmax(1), average=average), abs=1e-12)
        assert found["matthews_correlation"] == pytest.approx(matthews_corrcoef(wanted, logits.argmax(1)), abs=1e-12)
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert found["loss"] == pytest.approx(-logs[np.arange(50), wanted].mean())
    # The worked example: 3 of 4 right, 2 true positives, 1 false one.
    logits = np.array([[0, 1], [0, 1], [0, 1], [1, 0]])
    assert class_figures(logits, np.array([1, 1, 0, 0]))["f1"] == pytest.approx(0.8)
    one = number_figures(np.array([1.0]), np.array([2.0]))
    assert (one["mse"], math.isnan(one["pearson"])) == (1.0, True)


@pytest.fixture(scope="module")
def tuning(corpus, trained):
    """What the recipe makes of the trained model, by the rows of a batch."""

    def make(size, **settings):
        words = {"model_name_or_path": str(trained), "validation_file": str(corpus / "validation.tsv")}
        flags = glue.GlueFlags(**words, do_train=False, **settings)
        flags.check()
        return glue.prepare(flags, (size, size))

    return make


def test_figures_are_the_same_for_any_batch_and_number_of_devices(tuning, run_on):
    found, said = [], []
    for size in (1, 3, 8, 32):
        for devices in (1, 2, 4):
            run_on(devices)
            made = tuning(size, pad_to_max_length=size == 3, max_seq_length=32)
            mesh, held_out = make_mesh(devices=jax.devices()[:devices]), made.evaluations[""]
            found.append(finetune.figures(made, held_out, made.model.params, None, mesh, "{}"))
            outputs = collect(made.forward, params=made.model.params, batches=held_out.batches, mesh=mesh)
            said.append(list(made.predict(outputs, held_out)))
    for figures, answers in zip(found[1:], said[1:]):
        assert figures == pytest.approx(found[0], abs=1e-6)
        for answer, first in zip(answers, said[0], strict=True):
            assert answer == first | {name: pytest.approx(first[name], abs=1e-6) for name in first if "_" in name}


def test_the_pipeline_says_what_the_run_predicted(corpus, trained, tmp_path):
    """Of texts and of pairs, which have token types, and of an empty text; a regression says its number."""
    shown = rows(6, 5)
    pairs = [{"sentence1": row["sentence"], "sentence2": other["sentence"]} for row, other in zip(shown, shown[::-1])]
    texts = [*({"sentence": row["sentence"]} for row in shown), {"sentence": ""}]
    number = tmp_path / "number"
    words = (
        "--train_file",
        write(tmp_path / "a.csv", [row | {"label": 0.5 + index} for index, row in enumerate(pairs)]),
    )
    flags = ("--do_eval", "False", "--max_steps", 1, "--output_dir", number)
    assert run("train", *scratch(corpus), *words, *flags) == 0
    for folder, content in ((trained, pairs), (trained, texts), (number, pairs)):
        path = write(tmp_path / "test.jsonl", content)
        words = ("--do_eval", "False", "--do_predict", "--test_file", path, "--output_dir", tmp_path / "out")
        assert run("eval", "--model_name_or_path", folder, *words) == 0
        given = [dict(zip(("text", "text_pair"), row.values())) for row in content]
        answers = pipeline("text-classification", folder)(given, top_k=None)
        for row, answer in zip(predicted(tmp_path / "out"), answers, strict=True):
            if folder == number:
                assert float(row["prediction"]) == pytest.approx(answer[0]["score"], abs=1e-6)
                continue
            assert row["prediction"] == answer[0]["label"]
            for each in answer:
                assert float(row[f"probability_{each['label']}"]) == pytest.approx(each["score"], abs=1e-6)


@pytest.mark.parametrize("pad_to_max_length", [True, False])
def test_the_loss_is_the_weighted_mean_of_its_rows(corpus, trained, pad_to_max_length):
    """Class weights and label smoothing as PyTorch's CrossEntropyLoss has them, whatever rows are padded to."""
    flags = glue.GlueFlags(
        model_name_or_path=str(trained),
        train_file=str(corpus / "train.tsv"),
        class_weights=["1", "2", "4"],
        label_smoothing_factor=0.1,
        pad_to_max_length=pad_to_max_length,
        do_eval=False,
    )
    made = glue.prepare(flags, (40, 8))
    # The last batch, which is not full; rows of similar lengths come together in any order.
    batch = min((made.train(step) for step in range(2)), key=lambda batch: batch["weights"].sum())
    sums = made.loss_fn(made.model.params, {name: jax.numpy.asarray(rows) for name, rows in batch.items()}, None)
    logits = np.asarray(glue.logits_of(made.model, made.model.params, batch, None), np.float64)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    own = logs[np.arange(40), batch["targets"]]
    weights = np.array([1, 2, 4])[batch["targets"]] * batch["weights"]
    losses = -(0.9 * own + 0.1 * logs.mean(1))
    assert batch["weights"].sum() == 24
    assert float(sums["loss"][0]) == pytest.approx((losses * weights).sum(), rel=1e-5)
    assert float(sums["loss"][1]) == pytest.approx(weights.sum())
    flags.class_weights = ["balanced"]
    counts = np.bincount(load_targets(made))
    weights = glue.class_weights_of(flags, made_labels(), load_targets(made))
    np.testing.assert_allclose(np.array(weights) * counts, 64 / 3)


def load_targets(made):
    return np.concatenate([made.train(step)["targets"][made.train(step)["weights"] > 0] for step in range(2)])


def made_labels():
    return glue.Labels(KINDS)


@pytest.mark.parametrize("flags", [("--max_train_samples", 2), ("--validation_split_percentage", 40)])
def test_classes_are_those_of_all_training_rows(corpus, tmp_path, flags):
    """Of those that a limit leaves out, and of those that are split off."""
    labels = ("bad", "good", "mixed", "last", "rare")
    train = write(tmp_path / "a.csv", [{"text": f"the {label}", "label": label} for label in labels])
    words = ("--train_file", train, "--max_steps", 1, "--output_dir", tmp_path / "out", *flags)
    evaluated = ("--validation_file", train) if flags[0] == "--max_train_samples" else ()
    assert run("train", *scratch(corpus), *words, *evaluated) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == dict(enumerate(sorted(labels)))


@pytest.mark.parametrize("labels", [("new", "other"), ("new", "other", "more", "most"), ("0.5", "1.5")])
def test_a_head_of_other_classes_is_new_where_that_is_asked_for(trained, tmp_path, capsys, labels):
    train = write(tmp_path / "a.csv", [{"text": "the cat", "label": label} for label in labels])
    words = ("--model_name_or_path", trained, "--train_file", train, "--do_eval", "False", "--max_steps", 1)
    assert run("train", "--output_dir", tmp_path / "out", *words) == 2
    line = one_line(capsys)
    assert "The checkpoint tells 3 labels apart (bad, good, mixed), and the data have" in line
    assert "begin with a new head by --ignore_mismatched_sizes" in line
    assert not list((tmp_path / "out").iterdir())
    assert run("train", "--output_dir", tmp_path / "out", *words, "--ignore_mismatched_sizes") == 0
    numbers = labels[0] == "0.5"
    assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == (1 if numbers else len(labels))


def test_both_sets_of_mnli(corpus, tmp_path):
    """A folder with the splits and the class names of the Hub's."""
    names = ["entailment", "neutral", "contradiction"]
    features = datasets.Features(
        {
            "premise": datasets.Value("string"),
            "hypothesis": datasets.Value("string"),
            "label": datasets.ClassLabel(names=names),
            "idx": datasets.Value("int32"),
        }
    )

    def split(count, seed, *, known=True):
        shown = rows(count, seed)
        return datasets.Dataset.from_dict(
            {
                "premise": [row["sentence"] for row in shown],
                "hypothesis": [row["sentence"][::-1] for row in shown],
                "label": [index % 3 if known else -1 for index in range(count)],
                "idx": list(range(count)),
            },
            features=features,
        )

    parts = {
        "train": split(8, 0),
        "validation_matched": split(5, 1),
        "validation_mismatched": split(6, 2),
        "test_matched": split(3, 3, known=False),
        "test_mismatched": split(4, 4, known=False),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "mnli")
    words = ("--task_name", "mnli", "--dataset_name", tmp_path / "mnli", "--max_steps", 1, "--do_predict")
    assert run("train", "--output_dir", tmp_path / "out", *scratch(corpus), *words) == 0
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_f1_mm"} <= results(tmp_path / "out").keys()
    assert results(tmp_path / "out", "predict") == {"predict_samples": 3, "predict_samples_mm": 4}
    assert len(predicted(tmp_path / "out")) == 3
    assert len(predicted(tmp_path / "out", "predict_results_mm.csv")) == 4
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == dict(enumerate(names))


@pytest.mark.parametrize("count", [1, 2])
def test_sets_of_a_row_or_two(corpus, tmp_path, count):
    """They fill a batch up and weigh what they weigh (T74)."""
    train = write(tmp_path / "train.csv", [{"sentence": "bad", "label": "bad"}, {"sentence": "good", "label": "good"}])
    few = write(tmp_path / "few.csv", rows(8, 7, kinds=("good",))[:count])
    words = ("--train_file", train, "--validation_file", few, "--do_predict", "--test_file", few, "--max_steps", 1)
    shape = (*scratch(corpus), "--per_device_eval_batch_size", 32)
    code = run("train", "--output_dir", tmp_path / "out", *shape, *words)
    assert code == 0
    assert len(predicted(tmp_path / "out")) == count
    assert results(tmp_path / "out")["eval_accuracy"] in (0.0, 0.5, 1.0)


def test_one_training_row_is_refused_where_it_cannot_be_learnt(corpus, tmp_path, capsys):
    one = write(tmp_path / "one.csv", rows(1))
    words = ("--output_dir", tmp_path / "out", *scratch(corpus), "--train_file", one)
    assert run("train", *words) == 1
    assert "give a --validation_file" in one_line(capsys)
    assert run("train", *words, "--validation_file", one) == 1
    assert "a classifier needs two classes or more" in one_line(capsys)


@pytest.mark.parametrize("kind", ["roberta", "electra", "bart"])
def test_other_families(corpus, tmp_path, kind):
    shape = {
        "roberta": SHAPE,
        "electra": f"{SHAPE},embedding_size=32",
        "bart": "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,"
        "encoder_ffn_dim=32,decoder_ffn_dim=32,max_position_embeddings=64,eos_token_id=3",
    }[kind]
    words = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "validation.tsv", "--max_steps", 2)
    model = scratch(corpus, kind=kind, shape=shape)
    assert run("train", "--output_dir", tmp_path / "out", *model, *words) == 0
    assert 0 <= results(tmp_path / "out")["eval_accuracy"] <= 1


# Data.


@pytest.mark.parametrize("names", [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]])
def test_pairs_have_types_where_the_tokenizer_has_them(corpus, tmp_path, names):
    """As PyTorch's pipelines call it later. What is over the limit is cut from the longer text."""
    shown = [{"sentence1": "the cat sat on a mat", "sentence2": "two dogs", "label": 1}]
    read = load_labelled(LabelledColumns(), files=str(write(tmp_path / "a.jsonl", shown)))
    tokenizer = open_tokenizer(corpus / "tokenizer")
    tokenizer.model_input_names = names
    types = has_types(tokenizer, AutoConfig.for_model("bert"))
    assert types == (len(names) == 3)
    assert not has_types(tokenizer, AutoConfig.for_model("roberta", type_vocab_size=1))
    found = tokenize_labelled(read.rows, np.zeros(1, np.int32), tokenizer=tokenizer, max_length=9, types=types)
    expected = tokenizer("the cat sat on", "two dogs", return_token_type_ids=True)
    assert found[0]["input_ids"] == expected["input_ids"]
    assert found[0].get("token_type_ids") == (expected["token_type_ids"] if types else None)


def test_labels_by_how_they_are_written(tmp_path):
    """Numbers with fractions are numbers; whole ones are classes; 1 and "1" are the same (T72)."""

    def labels(*written, name="a.jsonl"):
        path = write(tmp_path / name, [{"text": "a", "label": label} for label in written])
        config = AutoConfig.for_model("bert")
        return glue.labels_of(config, load_labelled(LabelledColumns(), files=str(path)), None).names

    assert labels(10, "2", 2) == ("2", "10")
    assert labels(1, "yes") == ("1", "yes")
    assert labels(True, False) == ("False", "True")
    assert labels(1.0, 2.5) == labels("1", "2.5", name="a.csv") == ()
    assert labels("0", "1", name="b.csv") == ("0", "1")
    assert labels(1.5, "yes") == ("1.5", "yes")
    # A gap among numbers is no class: the row is named where its number is asked for.
    assert labels("0.5", "NaN", name="c.csv") == ()


def test_whole_numbers_are_ids_of_named_classes(tmp_path):
    path = write(tmp_path / "a.csv", [{"text": "a", "label": 1}, {"text": "a", "label": "no"}])
    read = load_labelled(LabelledColumns(), files=str(path))
    assert glue.Labels(("yes", "no")).targets(read).tolist() == [1, 1]


def test_texts_stay_as_they_are(tmp_path):
    """The word NA, quoted newlines, a byte order mark, quotes in a TSV without quoting, an index and other columns."""
    path = tmp_path / "a.csv"
    path.write_bytes('\ufefftext,label\nNA,1\n"two\nlines",0\nnull,1\n'.encode())
    assert load_labelled(LabelledColumns(), files=str(path)).rows["text"][:] == ["NA", "two\nlines", "null"]
    tabs = tmp_path / "a.tsv"
    tabs.write_text('idx\tsentence\tlabel\n0\t"so" it is\t1\n1\tthe "end\t0\n')
    assert load_labelled(LabelledColumns(), files=str(tabs)).rows["text"][:] == ['"so" it is', 'the "end']
    tabs.write_text('idx\tsentence\tlabel\n0\t"a ""so"" it is"\t1\n1\tend\t0\n')
    assert load_labelled(LabelledColumns(), files=str(tabs)).rows["text"][:] == ['a "so" it is', "end"]
    # Quotes that pair by chance do not make one row of three; one that holds a line's end is one row.
    tabs.write_text('sentence\tlabel\n"so it is\t1\nfine\t0\nthe end"\t1\n')
    assert load_labelled(LabelledColumns(), files=str(tabs)).rows["text"][:] == ['"so it is', "fine", 'the end"']
    tabs.write_text('sentence\tlabel\n"two\nlines"\t1\nfine\t0\n')
    assert load_labelled(LabelledColumns(), files=str(tabs)).rows["text"][:] == ["two\nlines", "fine"]


def test_parquet_with_numbers_as_labels(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [3, 4]}).to_parquet(path)
    assert load_labelled(LabelledColumns(), files=str(path)).labels() == ["3", "4"]


def test_numbers_that_a_set_of_the_hub_does_not_tell(tmp_path):
    """Those of STS-B's test set are all -1."""
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [-1.0, -1.0]}).save_to_disk(tmp_path / "set")
    options = {"dataset_name": str(tmp_path / "set")}
    assert load_labelled(LabelledColumns(need_label=False, keep=True), **options).labels() == [None, None]
    assert load_labelled(LabelledColumns(), **options).labels() == ["-1.0", "-1.0"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"sentence,label\nfine,good\n,bad\n", "a.csv, line 3: the text is blank"),
        ("a.csv", b"sentence,label\nfine,\nfine,bad\n", "a.csv, line 2: the label is blank"),
        ("a.csv", b"sentence,label\nfine,good\nfine\n", "a.csv, line 3: 1 fields where the header has 2"),
        ("a.csv", b"sentence,label\nfine,good,more\n", "a.csv, line 2: 3 fields where the header has 2"),
        ("a.csv", b"sentence,label,sentence\na,good,b\n", "a.csv, line 1: 2 columns are called 'sentence'"),
        ("a.csv", b"sentence,label\nz\xfcrich,good\n", "a.csv, line 2: byte 0xfc at offset 16 is not UTF-8"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', "a.jsonl, line 2: no column 'label'"),
        ("a.jsonl", b'{"text": 3, "label": 1}\n', "a.jsonl, line 1: a text is of type int"),
        ("a.jsonl", b'{"text": "a", "label": [1]}\n', "a.jsonl, line 1: the label is of type list"),
        ("a.csv", b"sentence,kind\nfine,good\n", "has no column 'label' of labels: it has sentence, kind"),
        ("a.csv", b"a,b,c,label\n1,2,3,4\n", "name one or two of texts by --text_column_name"),
        ("a.txt", b"fine\n", "plain text: labels need columns"),
        ("a.csv", b"sentence,label\nfine,good\nfine,great\n", "a.csv, line 3: the label 'great' is none of the model's"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(trained, tmp_path, capsys, name, content, message):
    """One sentence with the file and the line (T72)."""
    (tmp_path / name).write_bytes(content)
    assert run("eval", "--model_name_or_path", trained, "--validation_file", tmp_path / name) in (1, 2)
    assert message in one_line(capsys)


def test_a_config_whose_labels_do_not_count_from_zero_is_refused(corpus, trained, tmp_path, capsys):
    config = AutoConfig.from_pretrained(trained, id2label={1: "bad", 2: "good", 3: "mixed"})
    config.save_pretrained(tmp_path)
    flags = ("--model_name_or_path", trained, "--config_name", tmp_path, "--validation_file", corpus / "validation.tsv")
    assert run("eval", *flags) == 2
    assert "id2label of 1, 2, 3 (numbers from 0 on)" in one_line(capsys)


def test_blank_rows_are_left_out_or_kept(trained, tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("sentence,label\ngood dogs,good\n,bad\nbad dogs,\n")
    words = ("--model_name_or_path", trained, "--output_dir", tmp_path / "out", "--skip_blank_rows")
    assert run("eval", *words, "--validation_file", path, "--do_predict", "--test_file", path) == 0
    assert "1 rows, 2 blank ones left out" in capsys.readouterr().err
    # Every row to predict for stays.
    assert len(predicted(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task_name colla", "is no task of GLUE: choose one of cola"),
        ("--class_weights 1 2", "must be 3 positive numbers, one each for bad, good, mixed"),
        ("--class_weights heavy", "are not numbers or 'balanced'"),
        ("--problem_type multi", "is neither single_label_classification nor regression"),
        ("--freeze encoder/7", "is no module of the model"),
        ("--freeze bert classifier", "leaves no parameter to train"),
        ("--early_stopping_threshold 0.1", "needs --early_stopping_patience"),
        ("--metric_for_best_model f1", "chooses nothing"),
        ("--load_best_model_at_end --metric_for_best_model rouge", "is not measured: choose of loss, accuracy, f1"),
        ("--load_best_model_at_end --do_eval False", "leave --do_eval False out"),
        ("--label_smoothing_factor 1", "at least 0 and less than 1"),
        ("--max_seq_length 2", "needs 3 or more"),
        ("--max_seq_length 65", "more than the 64 positions of the model"),
        ("--predictions_format xml", "is neither csv nor jsonl"),
        ("--text_column_name a,b,c", "names 3 columns"),
    ],
)
def test_flags_that_cannot_be(corpus, tmp_path, capsys, flags, message):
    words = ("--train_file", corpus / "train.tsv", "--validation_file", corpus / "validation.tsv", "--max_steps", 1)
    assert run("train", "--output_dir", tmp_path / "out", *scratch(corpus), *words, *flags.split()) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out" / "recipe.yaml").exists()
