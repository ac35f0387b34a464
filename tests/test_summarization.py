"""The summarization recipe with T5, and the loss that it shares with translation."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from transformers import BartConfig, T5Config

from distaff import FlaxBartForConditionalGeneration, FlaxT5ForConditionalGeneration, pipeline
from distaff.core.tree import flatten
from distaff.tasks._folder import begin
from distaff.tasks._seq2seq import seq2seq_loss
from distaff.tasks.summarization import SummarizationFlags
from pair_cases import BART, T5, make_corpus, one_line, pairs, results, run, write_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("corpus"), lambda source, target: {"document": source, "summary": target}
    )


def train(corpus, output, *flags, steps=10):
    return run(
        "train",
        "summarization",
        corpus,
        *("--output_dir", output, "--model_type", "t5", "--tokenizer_name", corpus / "tokenizer"),
        *("--config_overrides", T5, "--train_file", corpus / "train.jsonl", "--max_target_length", 16),
        *("--max_steps", steps, "--logging_steps", 2, "--learning_rate", "1e-2", *flags),
    )


def evaluate(corpus, model, *flags):
    return run(
        "eval", "summarization", corpus, "--model_name_or_path", model, "--max_target_length", 16, *map(str, flags)
    )


# The loss.


def t5_model():
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, num_decoder_layers=2, dropout_rate=0.0
    )
    return FlaxT5ForConditionalGeneration(config)


def bart_model():
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.0,
    )
    return FlaxBartForConditionalGeneration(config)


def loss_of(model, batch, smoothing):
    inputs = model.prepare_decoder_input_ids_from_labels
    loss = jax.jit(partial(seq2seq_loss, model.module, inputs, label_smoothing=smoothing))
    sums = loss(model.params, batch, jax.random.key(0))
    return float(sums["loss"][0]), float(sums["loss"][1])


def padded_batch(labels, length, pad):
    ids = np.array([[5, 6, 7, 8, 9, 2], [5, 6, 7, pad, pad, pad]], np.int32)
    batch = {"input_ids": ids, "attention_mask": np.array([[1] * 6, [1] * 3 + [0] * 3], np.int32)}
    full = np.full((2, length), pad, np.int32)
    full[:, : labels.shape[1]] = labels
    weights = np.zeros((2, length), np.float32)
    weights[:, : labels.shape[1]] = 1
    return {**batch, "labels": full, "label_weights": weights}


@pytest.mark.parametrize("make", [t5_model, bart_model])
def test_padded_targets_do_not_change_the_loss(make):
    """Cases T46 and T51: the label that has the pad token's id counts like any other."""
    model = make()
    pad = model.config.pad_token_id
    labels = np.array([[11, pad, 12, 2], [13, 14, 15, 2]], np.int32)
    short = padded_batch(labels, 4, pad)
    logits = model(
        short["input_ids"], short["attention_mask"], model.prepare_decoder_input_ids_from_labels(labels)
    ).logits
    log_p = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)
    hit = np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    for smoothing in (0.0, 0.1):
        wanted = -((1 - smoothing) * hit + smoothing * log_p.mean(axis=-1)).mean()
        for length in (4, 8, 16):
            total, weight = loss_of(model, padded_batch(labels, length, pad), smoothing)
            assert weight == 8
            assert total / weight == pytest.approx(wanted, abs=1e-6)


def test_evaluation_is_not_smoothed():
    model = t5_model()
    batch = padded_batch(np.array([[11, 1], [13, 1]], np.int32), 4, 0)
    inputs = model.prepare_decoder_input_ids_from_labels
    sums = seq2seq_loss(model.module, inputs, model.params, batch, None, label_smoothing=0.5)
    assert float(sums["loss"][0]) == pytest.approx(loss_of(model, batch, 0.0)[0], rel=1e-6)
    assert float(sums["accuracy"][1]) == 4


# A run.


def test_a_run_leaves_a_folder_that_opens(corpus, tmp_path):
    """Case T85: prefix in the config, ROUGE offline, and a test file without summaries."""
    rows = [{"document": source} for source, _ in pairs(11, 2)]
    write_rows(tmp_path / "test.jsonl", rows)
    folder = tmp_path / "out"
    code = train(
        corpus,
        folder,
        *("--source_prefix", "summarize: ", "--num_beams", 1, "--predict_with_generate", "--eval_steps", 5),
        *("--do_predict", "--test_file", tmp_path / "test.jsonl", "--save_steps", 5),
    )
    assert code == 0
    names = {path.name for path in folder.iterdir()}
    assert names >= set(
        "config.json model.safetensors tokenizer.json README.md recipe.yaml train_results.json eval_results.json "
        "predict_results.json all_results.json metrics.jsonl checkpoints generated_predictions.txt".split()
    )
    model = FlaxT5ForConditionalGeneration.from_pretrained(folder)
    assert model.loading_report.new == ()
    assert model.config.task_specific_params["summarization"] == {"prefix": "summarize: ", "num_beams": 1}
    assert len((folder / "generated_predictions.txt").read_text().splitlines()) == 11
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["max_new_tokens"] == 16
    assert generation["eos_token_id"] == model.config.eos_token_id
    assert generation["decoder_start_token_id"] == model.config.pad_token_id
    assert results(folder, "predict") == {"predict_samples": 11}
    found = results(folder, "eval")
    assert found.keys() == {f"eval_{name}" for name in "loss accuracy rouge1 rouge2 rougeL rougeLsum".split()}
    assert "eval_rouge1" not in results(folder, "train")
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "eval_rougeL" in row] == [5, 10]
    card = (folder / "README.md").read_text()
    assert "rougeL" in card
    assert "pipeline_tag: summarization" in card
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["source_prefix"] == "summarize: "


def test_a_long_source_and_a_prefix_with_bart(corpus, tmp_path, capsys):
    """Case T85: a source of 10,000 words is cut and counted, and an empty summary is a row of its own."""
    rows = [{"document": "the cat " * 5000, "summary": "die Katze"}, {"document": "a dog", "summary": ""}]
    write_rows(tmp_path / "long.jsonl", rows)
    folder = tmp_path / "out"
    bart = ("--model_type", "bart", "--config_overrides", BART, "--max_source_length", 32)
    test = ("--do_predict", "--test_file", tmp_path / "long.jsonl", "--predict_with_generate")
    flags = ("--source_prefix", "summarize: ", "--validation_file", corpus / "few.jsonl")
    assert train(corpus, folder, *bart, *flags, *test, steps=1) == 0
    assert "2 pairs tokenised; 1 sources were longer than 32 tokens" in capsys.readouterr().err
    model = FlaxBartForConditionalGeneration.from_pretrained(folder)
    assert model.config.task_specific_params["summarization"]["prefix"] == "summarize: "
    assert len((folder / "generated_predictions.txt").read_text().splitlines()) == 2
    assert 0 <= results(folder, "predict")["predict_rouge1"] <= 100


def test_learns_its_pairs_and_writes_them_back(corpus, tmp_path):
    """ROUGE above 90 on what it was trained on, whatever the batch; the prefix comes from the saved config."""
    folder = tmp_path / "out"
    few, shape = corpus / "few.jsonl", f"{T5},dropout_rate=0.0"
    data = ("--train_file", few, "--validation_file", few, "--source_prefix", "reverse: ", "--config_overrides", shape)
    often = ("--per_device_train_batch_size", 16, "--eval_steps", 1000, "--save_steps", 1000)
    assert train(corpus, folder, *data, *often, steps=75) == 0
    before = results(folder, "eval")
    test = ("--do_predict", "--test_file", few, "--predict_with_generate")
    for rows in (1, 3):
        code = evaluate(
            corpus,
            folder,
            *("--validation_file", few, *test, "--per_device_eval_batch_size", rows),
            *("--output_dir", tmp_path / f"eval{rows}"),
        )
        assert code == 0
        found = results(tmp_path / f"eval{rows}")
        assert found["eval_loss"] == pytest.approx(before["eval_loss"], abs=1e-6)
        assert found["predict_loss"] == pytest.approx(found["eval_loss"], abs=1e-6)
        assert found["eval_rougeL"] > 90
        assert found["predict_rougeL"] == pytest.approx(found["eval_rougeL"])
    texts = [(tmp_path / f"eval{rows}" / "generated_predictions.txt").read_text() for rows in (1, 3)]
    assert texts[0] == texts[1]
    right = [text == target for text, (_, target) in zip(texts[0].splitlines(), pairs(16, 0), strict=True)]
    assert sum(right) > 14
    # As in the evaluation, without a word about lengths and beams.
    written = pipeline("summarization", str(folder))(pairs(16, 0)[0][0])
    assert written[0]["summary_text"].strip() == texts[0].splitlines()[0]
    # The prefix that is stored is used: another one gives another loss.
    bare = ("--validation_file", few, "--source_prefix", "", "--output_dir", tmp_path / "bare")
    assert evaluate(corpus, folder, *bare) == 0
    assert results(tmp_path / "bare")["eval_loss"] != pytest.approx(before["eval_loss"], abs=1e-3)


def test_stop_and_resume_equals_an_uninterrupted_run(corpus, tmp_path):
    """With dropout and smoothing."""
    flags = ("--save_steps", 4, "--eval_steps", 4, "--label_smoothing_factor", 0.1, "--gradient_accumulation_steps", 2)
    assert train(corpus, tmp_path / "whole", *flags) == 0
    parts = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole", parts)
    for path in (parts / "checkpoints").iterdir():
        if path.name != "4":
            shutil.rmtree(path)
    for name in ("model.safetensors", "all_results.json", "train_results.json", "eval_results.json"):
        (parts / name).unlink()
    assert train(corpus, parts, *flags, "--resume_from_checkpoint") == 0
    whole, again = (FlaxT5ForConditionalGeneration.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    for path, leaf in flatten(whole.params).items():
        np.testing.assert_array_equal(leaf, flatten(again.params)[path], err_msg=path)
    for name in ("eval_loss", "eval_accuracy", "loss"):
        assert results(parts)[name] == results(tmp_path / "whole")[name]
    # Resumed at its last step and without its log, it is measured again.
    (parts / "metrics.jsonl").unlink()
    assert train(corpus, parts, *flags, "--resume_from_checkpoint") == 0
    assert results(parts)["eval_loss"] == pytest.approx(results(tmp_path / "whole")["eval_loss"], abs=1e-6)


def test_an_earlier_runs_predictions_go(tmp_path):
    """Otherwise they would be taken for those of the run that overwrites it."""
    names = ("predict_results.json", "generated_predictions.txt")
    for name in names:
        (tmp_path / name).write_text("{}")
    flags = SummarizationFlags(output_dir=str(tmp_path), overwrite_output_dir=True)
    begin(tmp_path, flags, "summarization")
    assert not any((tmp_path / name).exists() for name in names)


def test_predictions_are_a_line_a_row(corpus, tmp_path, monkeypatch):
    """Newlines and backslashes are escaped, and blank sources keep their place."""
    import distaff.tasks._seq2seq as module

    texts = ["one\ntwo", "back\\slash", "", "three\r"]
    rows = [{"document": "a"}, {"document": ""}, {"document": None}, {"document": "d"}, {"document": "e"}]
    write_rows(tmp_path / "test.jsonl", rows)
    assert train(corpus, tmp_path / "out", steps=1) == 0
    monkeypatch.setattr(module, "generate_texts", lambda side, params, batches: texts[: batches.rows])
    flags = ("--do_predict", "--test_file", tmp_path / "test.jsonl", "--max_predict_samples", 4, "--do_eval", "False")
    assert evaluate(corpus, tmp_path / "out", *flags, "--output_dir", tmp_path / "p") == 0
    found = (tmp_path / "p" / "generated_predictions.txt").read_bytes()
    assert found == b"one\\ntwo\nback\\\\slash\n\nthree\\r\n"


# What is refused.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--label_smoothing_factor", "1"), "--label_smoothing_factor is 1.0: it must be"),
        (("--num_beams", "0"), "--num_beams is 0"),
        (("--max_predict_samples", "0"), "--max_predict_samples is 0"),
        (("--max_target_length", "2"), "--max_target_length is 2: this tokenizer needs 3"),
        (("--do_predict",), "give --test_file"),
        (("--max_seq_length", "8"), "did you mean"),
        (("--text_column", "documents"), "no column 'documents', which --text_column names: it has document, summary"),
        (("--train_file", "none.jsonl"), "There is no file 'none.jsonl'"),
        (("--config_overrides", f"{T5},eos_token_id=5"), "ends a text with '</s>', and the model's end token has id 5"),
        (("--model_type", "bert", "--config_overrides", "hidden_size=12"), "has no class for model type 'bert'"),
    ],
)
def test_bad_flags_are_one_sentence(corpus, tmp_path, capsys, flags, words):
    assert train(corpus, tmp_path / "out", *flags) in (1, 2)
    assert words in one_line(capsys)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_bad_rows_are_one_sentence(corpus, tmp_path, capsys):
    for number, (rows, words) in enumerate(
        (
            ([{"document": "a", "summary": "b"}, {"document": "a"}], "line 2: no column 'summary'"),
            ([{"document": "a", "summary": "b"}, {"document": "a", "summary": ""}], "line 2: the target is blank"),
        )
    ):
        write_rows(tmp_path / "bad.jsonl", rows)
        test = ("--do_predict", "--test_file", tmp_path / "none.jsonl")
        assert train(corpus, tmp_path / "test", *test) == 1, "said before the training, not after it"
        assert "There is no file" in one_line(capsys)
        assert not (tmp_path / "test" / "checkpoints").exists()
        assert train(corpus, tmp_path / f"out{number}", "--train_file", tmp_path / "bad.jsonl") == 1
        assert words in one_line(capsys)


def test_evaluation_without_anything_to_evaluate_is_refused(corpus, tmp_path, capsys):
    assert evaluate(corpus, tmp_path / "none", "--output_dir", tmp_path / "o") == 1
    one_line(capsys)
    code = run("eval", "summarization", corpus, "--output_dir", tmp_path / "o")
    assert code == 2
    assert "give --model_name_or_path" in one_line(capsys)
    flags = ("--model_name_or_path", tmp_path, "--do_predict", "--test_file", corpus / "test.jsonl")
    assert run("eval", "summarization", corpus, *flags) == 2
    assert "name it with --output_dir" in one_line(capsys)
