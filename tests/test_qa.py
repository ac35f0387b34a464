"""The recipe of question answering: the loss, a run, its figures and files, resume, what is refused."""

import csv
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig

import distaff
from distaff import pipeline
from distaff.cli import main
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from distaff.data.windows import IGNORED
from distaff.tasks import _finetune as finetune
from distaff.tasks._squad_scores import squad_v1_scores, squad_v2_scores
from distaff.tasks.qa import QaFlags, prepare, qa_loss, span_losses
from golden import question_cases as golden
from recipe_cases import as_if_killed, logged, one_line, results

STORED = golden.read()
NAMES, THINGS = ("ada", "eve", "ida", "uma"), ("red house", "green cat", "red river", "green dog")


def rows(count, seed, *, unanswerable=0.0):
    """Stories of who saw what, and who is asked for; some of nobody."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        names, things = rng.permutation(NAMES)[:2], rng.permutation(THINGS)[:2]
        context = " ".join(f"{name} saw the {thing} ." for name, thing in zip(names, things))
        answers = {"text": [str(names[0])], "answer_start": [0]}
        question = f"who saw the {things[0]}"
        if rng.random() < unanswerable:
            answers, question = {"text": [], "answer_start": []}, "where was the river"
        made.append({"id": f"{seed}-{number}", "question": question, "context": context, "answers": answers})
    return made


def write(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    golden.write("bert", STORED["keys"]["bert"], folder / "model")
    for version, part in (("v1", 0.0), ("v2", 0.4)):
        write(folder / f"{version}-train.jsonl", rows(64, 1, unanswerable=part))
        write(folder / f"{version}-validation.jsonl", rows(11, 2, unanswerable=part))
    return folder


def run(command, corpus, *words, version="v2"):
    flags = ["--max_seq_length", 40, "--doc_stride", 8, "--cache_dir", corpus / "cache"]
    flags += ["--per_device_eval_batch_size", 1] if "--per_device_eval_batch_size" not in words else []
    flags += ["--version_2_with_negative"] if version == "v2" else []
    return main([command, "qa", *map(str, (*flags, *words))])


def train(corpus, output, *words, version="v2", steps=8):
    files = (
        "--train_file",
        corpus / f"{version}-train.jsonl",
        "--validation_file",
        corpus / f"{version}-validation.jsonl",
    )
    given = ("--output_dir", output, "--model_name_or_path", corpus / "model", *files, "--max_steps", steps)
    numbers = (
        "--per_device_train_batch_size",
        1,
        "--logging_steps",
        2,
        "--learning_rate",
        "3e-3",
        "--report_to",
        "none",
    )
    return run("train", corpus, *given, *numbers, *words, version=version)


@pytest.fixture(scope="module")
def trained(corpus):
    """A run on version 2 that also predicted."""
    path = write(corpus / "test.jsonl", [{k: v for k, v in row.items() if k != "answers"} for row in rows(5, 3)])
    output = corpus / "trained"
    assert train(corpus, output, "--do_predict", "--test_file", path, "--save_steps", 4, "--eval_steps", 4) == 0
    return output


# The loss.


def model_of(name, folder, **settings):
    path = golden.write(name, STORED["keys"][name], folder / name)
    return getattr(distaff, f"Flax{golden.MODELS[name][0]}").from_pretrained(path, **settings)


def batch_of(name, *, length=None, copies=1):
    """The third example as a batch, padded to `length` with tokens that are no padding by their id."""
    example = golden.EXAMPLES[2]
    encoded = golden.tokenizer(name)(example["question"], example["context"])
    batch = {}
    for key, values in encoded.items():
        row = np.array(values, np.int32)
        padded = np.full(length or len(row), 7 if key == "input_ids" else 0, np.int32)
        padded[: len(row)] = row
        batch[key] = np.stack([padded] * copies)
    start, end = golden.POSITIONS
    batch |= {"start": np.full(copies, start, np.int32), "end": np.full(copies, end, np.int32)}
    return batch | {"allowed": batch["attention_mask"], "weights": np.ones(copies, np.float32)}


@pytest.mark.parametrize("name", golden.MODELS)
def test_the_loss_is_that_of_pytorch(name, tmp_path):
    model = model_of(name, tmp_path)
    total, weight = qa_loss(model, 0.0, model.params, batch_of(name), None)["loss"]
    assert float(total / weight) == pytest.approx(STORED["losses"][name], abs=1e-4)


def test_padding_changes_neither_loss_nor_gradients(tmp_path):
    path = golden.write("bert", STORED["keys"]["bert"], tmp_path)
    config = AutoConfig.from_pretrained(path, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = distaff.FlaxBertForQuestionAnswering.from_pretrained(path, config=config)

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        total, weight = qa_loss(model, 0.1, params, batch, jax.random.key(0))["loss"]
        return total / weight

    alone, gradient = loss(model.params, batch_of("bert"))
    padded, wanted = loss(model.params, batch_of("bert", length=100, copies=3))
    assert float(alone) == pytest.approx(float(padded), abs=1e-5)
    for name, value in flatten(wanted).items():
        np.testing.assert_allclose(flatten(gradient)[name], value, atol=1e-5, err_msg=name)


def logits(count, length, seed=0):
    return [
        jnp.asarray(np.random.default_rng(seed + part).normal(size=(count, length)), jnp.float32) for part in (0, 1)
    ]


def spans(start, end, weights=None):
    count = len(start)
    ones = np.ones((count, 6), np.int32)
    weights = np.ones(count, np.float32) if weights is None else np.array(weights, np.float32)
    return {"attention_mask": ones, "allowed": ones, "start": np.array(start), "end": np.array(end), "weights": weights}


def test_unknown_positions_weigh_nothing():
    """Case T82: of four rows two are not known, and the loss is the mean of the others; none at all give 0."""
    first, last = logits(4, 6)
    losses, weights = span_losses(first, last, spans([2, IGNORED, 0, IGNORED], [3, IGNORED, 5, IGNORED]))
    logs = [np.asarray(jax.nn.log_softmax(each, axis=-1)) for each in (first, last)]
    wanted = -np.mean([logs[0][0, 2], logs[1][0, 3], logs[0][2, 0], logs[1][2, 5]])
    assert weights.tolist() == [1, 0, 1, 0]
    assert float(losses.sum() / weights.sum()) == pytest.approx(wanted, abs=1e-6)
    losses, weights = span_losses(first, last, spans([IGNORED] * 4, [IGNORED] * 4))
    assert (float(losses.sum()), float(weights.sum())) == (0, 0)
    gradient = jax.grad(lambda one: span_losses(one, last, spans([IGNORED] * 4, [IGNORED] * 4))[0].sum())(first)
    assert not np.asarray(gradient).any()


def test_rows_that_fill_a_batch_weigh_nothing():
    first, last = logits(3, 6)
    losses, weights = span_losses(first, last, spans([1, 2, 3], [1, 2, 3], [1, 1, 0]))
    alone, _ = span_losses(first[:2], last[:2], spans([1, 2], [1, 2]))
    assert losses.tolist() == [*alone.tolist(), 0]
    assert weights.tolist() == [1, 1, 0]


def test_smoothing_spreads_over_what_may_be_an_answer():
    first, last = logits(1, 6)
    batch = spans([2], [3]) | {"allowed": np.array([[1, 0, 1, 1, 0, 0]])}
    logs = [np.asarray(jax.nn.log_softmax(each, axis=-1))[0] for each in (first, last)]
    wanted = -np.mean([0.8 * row[place] + 0.2 * row[[0, 2, 3]].mean() for row, place in zip(logs, (2, 3))])
    assert span_losses(first, last, batch, label_smoothing=0.2)[0][0] == pytest.approx(wanted, abs=1e-6)


# A run.


def test_a_run_writes_model_figures_and_answers(trained, corpus):
    found, wanted = results(trained), read(corpus / "v2-validation.jsonl")
    assert found["eval_total"] == 11
    answers = json.loads((trained / "predictions.json").read_text())
    assert list(answers) == [row["id"] for row in wanted]
    references = {row["id"]: row["answers"]["text"] for row in wanted}
    scores = squad_v2_scores(answers, references)
    assert {name: found[f"eval_{name}"] for name in scores} == pytest.approx(scores)
    odds = json.loads((trained / "null_odds.json").read_text())
    best = json.loads((trained / "nbest_predictions.json").read_text())
    for row in wanted:
        assert (answers[row["id"]] == "") == (odds[row["id"]] > 0)
        assert answers[row["id"]] in row["context"]
        assert sum(entry["probability"] for entry in best[row["id"]]) == pytest.approx(1)
        assert any(entry["text"] == "" for entry in best[row["id"]])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_five_rows_in_five_answers_out(trained, corpus):
    test = read(corpus / "test.jsonl")
    with (trained / "predict_results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["id"] for row in table] == [row["id"] for row in test]
    answers = json.loads((trained / "predict_predictions.json").read_text())
    assert [row["prediction_text"] for row in table] == list(answers.values())
    assert {"predict_nbest_predictions.json", "predict_null_odds.json"} <= {path.name for path in trained.iterdir()}
    assert results(trained, "predict") == {"predict_samples": 5}


def test_the_pipeline_answers_as_the_recipe_does(trained, corpus):
    """Both find the same best span where a context is one window; scores are of another kind."""
    ask = pipeline("question-answering", str(trained), max_seq_len=40, doc_stride=8, align_to_words=False)
    best = json.loads((trained / "predict_nbest_predictions.json").read_text())
    for row in read(corpus / "test.jsonl"):
        found = ask(question=row["question"], context=row["context"], max_answer_len=30)
        assert found["answer"] == next(entry["text"] for entry in best[row["id"]] if entry["text"])


def test_a_stopped_run_ends_as_a_whole_one(trained, corpus, tmp_path):
    """Case T83: four steps, and four more."""
    as_if_killed(trained, tmp_path / "parts", step=4)
    words = ("--save_steps", 4, "--eval_steps", 4, "--resume_from_checkpoint")
    assert train(corpus, tmp_path / "parts", *words) == 0
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert logged(tmp_path / "parts") == logged(trained)
    assert results(tmp_path / "parts") == results(trained)
    assert (tmp_path / "parts" / "predictions.json").read_text() == (trained / "predictions.json").read_text()


def test_figures_do_not_depend_on_batches_and_devices(trained, corpus, run_on):
    """Within 1e-6. Thresholds are no figures but sums of four float32 logits near 10, rounded by each program."""

    def figures(rows_a_batch, devices):
        flags = QaFlags(
            model_name_or_path=str(trained),
            do_train=False,
            version_2_with_negative=True,
            validation_file=str(corpus / "v2-validation.jsonl"),
            max_seq_length=24,
            doc_stride=8,
            cache_dir=str(corpus / "cache"),
        )
        run_on(devices)
        tuning = prepare(flags, (1, rows_a_batch))
        mesh = make_mesh(devices=jax.devices()[:devices])
        return finetune.figures(tuning, tuning.evaluations[""], tuning.model.params, None, mesh, "{}")

    wanted = figures(1, 1)
    for rows_a_batch, devices in ((3, 1), (8, 1), (32, 1), (4, 2), (4, 4)):
        found = figures(rows_a_batch, devices)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert value == pytest.approx(wanted[name], abs=1e-5 if name.endswith("_thresh") else 1e-6), name


def test_the_best_threshold_is_one_for_the_flag(trained, corpus, capsys):
    before = results(trained)
    words = ("--model_name_or_path", trained, "--validation_file", corpus / "v2-validation.jsonl")
    for name in ("exact", "f1"):
        threshold = before[f"eval_best_{name}_thresh"]
        # Twice into one folder: what stands there is replaced (case T81).
        judged = ("--null_score_diff_threshold", threshold, "--output_dir", corpus / "judged")
        assert run("eval", corpus, *words, *judged) == 0
        assert results(corpus / "judged")[f"eval_{name}"] == pytest.approx(before[f"eval_best_{name}"])
        assert (corpus / "judged" / "null_odds.json").read_text() == (trained / "null_odds.json").read_text()
    assert f"eval_total = {before['eval_total']}" in capsys.readouterr().out


def test_answers_are_learnt(corpus):
    """Who saw something, of four names at two places: 64 stories, and 11 others."""
    output = corpus / "learnt"
    words = ("--learning_rate", "2e-3", "--logging_steps", 40, "--seed", 3, "--load_best_model_at_end")
    assert train(corpus, output, *words, version="v1", steps=160) == 0
    found = results(output)
    assert found["eval_exact_match"] >= 90, found
    assert "null_odds.json" not in {path.name for path in output.iterdir()}
    answers = json.loads((output / "predictions.json").read_text())
    references = {row["id"]: row["answers"]["text"] for row in read(corpus / "v1-validation.jsonl")}
    scores = squad_v1_scores(answers, references)
    assert {name: found[f"eval_{name}"] for name in scores} == pytest.approx(scores)


# What is refused.


def test_questions_without_answer_need_their_flag(corpus, tmp_path, capsys):
    """Case T79: three questions with and two without an answer."""
    content = [*rows(3, 5), *rows(2, 6, unanswerable=1.0)]
    path = write(tmp_path / "five.jsonl", content)
    words = ("--model_name_or_path", corpus / "model", "--validation_file", path)
    assert run("eval", corpus, *words, version="v1") == 2
    error = one_line(capsys)
    assert "2 of 5 questions have no answer, the first is '6-0': add --version_2_with_negative" in error
    assert run("eval", corpus, *words, "--output_dir", tmp_path / "out") == 0
    found = results(tmp_path / "out")
    assert (found["eval_total"], found["eval_HasAns_total"], found["eval_NoAns_total"]) == (5, 3, 2)


REFUSED = {
    "offset": (
        {"answers": {"text": ["ada"], "answer_start": [1]}},
        "line 2: the answer 'ada' is not at answer_start 1",
    ),
    "context": ({"context": ""}, "line 2: the context is empty"),
    "nothing to read": (
        {"context": "\u200b \x00", "answers": {"text": [], "answer_start": []}},
        "line 2: the context is empty",
    ),
    "id": ({"id": "1-0"}, "line 2: the id '1-0' is that of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_row_is_named(corpus, tmp_path, capsys, name):
    change, sentence = REFUSED[name]
    content = rows(2, 1)
    path = write(tmp_path / "rows.jsonl", [content[0], content[1] | change])
    assert train(corpus, tmp_path / "out", "--train_file", path) == 1
    assert f"rows.jsonl, {sentence}" in one_line(capsys)
    assert not list((tmp_path / "out").iterdir())


WORDS = {
    ("--n_best_size", "0"): "--n_best_size is 0",
    ("--doc_stride", "40"): "doc_stride is 40: windows of 40 tokens cannot share so many",
    ("--max_seq_length", "400"): "--max_seq_length 400 is more than the 196 positions",
    ("--do_predict",): "give --test_file",
    ("--metric_for_best_model", "accuracy", "--load_best_model_at_end"): "choose of loss, exact, f1",
}


@pytest.mark.parametrize("words", WORDS)
def test_flags_that_are_refused(corpus, tmp_path, capsys, words):
    assert train(corpus, tmp_path / "out", *words) == 2
    assert WORDS[words] in one_line(capsys)


def test_a_threshold_needs_questions_without_answer(corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "out", "--null_score_diff_threshold", "1", version="v1") == 2
    assert "needs --version_2_with_negative" in one_line(capsys)


def test_prepared_functions_are_those_of_the_flags(corpus):
    flags = QaFlags(
        model_name_or_path=str(corpus / "model"),
        train_file=str(corpus / "v1-train.jsonl"),
        do_eval=False,
        label_smoothing_factor=0.25,
        cache_dir=str(corpus / "cache"),
    )
    tuning = prepare(flags, (8, 8))
    assert isinstance(tuning.loss_fn, partial)
    assert tuning.loss_fn.args[1] == 0.25
    assert tuning.evaluations == tuning.tests == {}
