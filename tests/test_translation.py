"""The translation recipe with BART, mBART's languages, and the effect of every flag that the two tasks share."""

from dataclasses import fields

import pytest
from transformers import MBart50Tokenizer, MBartConfig, MBartTokenizer

from distaff import FlaxBartForConditionalGeneration
from distaff.core.errors import UsageError
from distaff.data.text import map_texts
from distaff.tasks._flags import ModelFlags, TrainingFlags
from distaff.tasks._pairs import Seq2SeqFlags, make_batches, prepare_model, read_pairs
from distaff.tasks._seq2seq import loss_function
from distaff.tasks.translation import TranslationFlags, set_languages, translation
from pair_cases import BART, make_corpus, one_line, pairs, results, run, write_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("corpus"), lambda source, target: {"translation": {"en": source, "de": target}}
    )


def train(corpus, output, *flags, steps=10):
    return run(
        "train",
        "translation",
        corpus,
        *("--output_dir", output, "--model_type", "bart", "--tokenizer_name", corpus / "tokenizer"),
        *("--config_overrides", BART, "--train_file", corpus / "train.jsonl", "--source_lang", "en"),
        *("--target_lang", "de", "--max_target_length", 16, "--max_steps", steps, "--logging_steps", 5),
        *("--learning_rate", "1e-2", *flags),
    )


# A run.


def test_learns_its_pairs_and_writes_them_back(corpus, tmp_path):
    """BLEU and chrF above 90 on what it was trained on, and predictions in the order of the file."""
    few, folder = corpus / "few.jsonl", tmp_path / "out"
    shuffled = [{"translation": {"en": source}} for source, _ in reversed(pairs(16, 0))]
    write_rows(tmp_path / "test.jsonl", shuffled)
    code = train(
        corpus,
        folder,
        *("--train_file", few, "--validation_file", few, "--config_overrides", f"{BART},dropout=0.0"),
        *("--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 3, "--eval_steps", 1000),
        *("--predict_with_generate", "--do_predict", "--test_file", tmp_path / "test.jsonl"),
        steps=110,
    )
    assert code == 0
    found = results(folder, "eval")
    assert found["eval_bleu"] > 90
    assert found["eval_chrf"] > 90
    texts = (folder / "generated_predictions.txt").read_text().splitlines()
    wanted = [target for _, target in reversed(pairs(16, 0))]
    assert sum(text == target for text, target in zip(texts, wanted, strict=True)) > 13
    model = FlaxBartForConditionalGeneration.from_pretrained(folder)
    assert model.config.task_specific_params["translation_en_to_de"] == {"prefix": ""}
    assert "pipeline_tag: translation" in (folder / "README.md").read_text()


# Languages.


def mbart(kind):
    return kind(), MBartConfig(vocab_size=100)


def languages(source, target):
    return TranslationFlags(source_lang=source, target_lang=target)


def test_languages_are_told_to_tokenizer_and_config():
    tokenizer, config = mbart(MBartTokenizer)
    set_languages(languages("en_XX", "de_DE"), tokenizer, config)
    german = tokenizer.convert_tokens_to_ids("de_DE")
    assert config.decoder_start_token_id == german
    assert tokenizer("a")["input_ids"][-1] == tokenizer.convert_tokens_to_ids("en_XX")
    tokenizer, config = mbart(MBart50Tokenizer)
    set_languages(languages("en_XX", "de_DE"), tokenizer, config)
    assert config.forced_bos_token_id == tokenizer.convert_tokens_to_ids("de_DE")
    assert config.decoder_start_token_id is None
    assert tokenizer("a")["input_ids"][0] == tokenizer.convert_tokens_to_ids("en_XX")


@pytest.mark.parametrize(("source", "target", "word"), [("en", "de_DE", "source"), ("en_XX", "xx_XX", "target")])
def test_a_language_that_the_tokenizer_lacks_is_refused(source, target, word):
    tokenizer, config = mbart(MBartTokenizer)
    with pytest.raises(UsageError, match=rf"no token of language '\w+': give --{word}_lang"):
        set_languages(languages(source, target), tokenizer, config)


# Every flag has an effect.


def resolved(corpus, **changes):
    """What a run makes of its flags, without running: the model's settings, batches, texts and the loss."""
    given = {
        "model_type": "bart",
        "tokenizer_name": str(corpus / "tokenizer"),
        "config_overrides": f"{BART},dropout=0.0",
        "train_file": str(corpus / "train.jsonl"),
        "validation_file": str(corpus / "validation.jsonl"),
        "test_file": str(corpus / "test.jsonl"),
        "source_lang": "en",
        "target_lang": "de",
        "max_source_length": 40,
    }
    flags = TranslationFlags(**{**given, **changes})
    flags.check()
    task = translation(flags)
    side = prepare_model(flags, task)
    train, evaluation = read_pairs(flags, task)
    batches = make_batches(flags, side, train, 8, train=True)
    held_out = make_batches(flags, side, evaluation, 8, train=False)
    batch, single = batches(0), make_batches(flags, side, train, 1, train=True)
    smoothing = loss_function(flags, side.model).keywords
    return {
        "config": side.model.config.task_specific_params,
        "generation": side.generation,
        "train": (len(train), batch["input_ids"].tolist(), batch["labels"].tolist()),
        "widths": {single(step)["input_ids"].shape for step in range(len(train))},
        "evaluation": (len(evaluation), held_out(0)["labels"].tolist()),
        "loss": smoothing,
    }


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"source_prefix": "x "}, {"config", "train"}),
        ({"max_source_length": 8}, {"train", "widths"}),
        ({"max_target_length": 6}, {"train", "evaluation", "generation"}),
        ({"val_max_target_length": 6}, {"evaluation", "generation"}),
        ({"pad_to_max_length": False}, {"widths"}),
        ({"max_train_samples": 9}, {"train"}),
        ({"max_eval_samples": 9}, {"evaluation"}),
        ({"validation_file": None, "validation_split_percentage": 20}, {"train", "evaluation"}),
        ({"label_smoothing_factor": 0.1}, {"loss"}),
        ({"num_beams": 2}, {"config", "generation"}),
        ({"source_lang": "de", "target_lang": "en"}, {"config", "train", "evaluation"}),
        ({"seed": 1}, {"train"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_flag_changes_what_it_names(corpus, changes, parts):
    wanted, found = resolved(corpus), resolved(corpus, **changes)
    assert {name for name in wanted if wanted[name] != found[name]} == parts


#: Flags whose effect other tests show: here, in test_summarization, test_pairs and, of files and caches, test_text.
SHOWN_ELSEWHERE = {
    "dataset_name": "test_pairs",
    "dataset_config_name": "load_hub_texts",
    "train_file": "every run",
    "validation_file": "every run",
    "test_file": "test_learns_its_pairs_and_writes_them_back",
    "skip_blank_pairs": "test_blank_rows_are_refused_skipped_or_kept",
    "max_predict_samples": "test_predictions_are_a_line_a_row",
    "preprocessing_num_workers": "test_tokenising_again",
    "overwrite_cache": "test_tokenising_again",
    "predict_with_generate": "test_a_run_leaves_a_folder_that_opens",
    "do_predict": "test_a_run_leaves_a_folder_that_opens",
}


def test_every_own_flag_is_in_a_test():
    shared = {field.name for cls in (ModelFlags, TrainingFlags) for field in fields(cls)}
    own = {field.name for field in fields(Seq2SeqFlags)} - shared
    changed = "source_prefix max_source_length max_target_length val_max_target_length pad_to_max_length "
    changed += "max_train_samples max_eval_samples validation_split_percentage label_smoothing_factor num_beams"
    assert own == set(changed.split()) | SHOWN_ELSEWHERE.keys()


def test_tokenising_again(corpus, tmp_path, monkeypatch):
    """The cache is used, and left with --overwrite_cache; several processes give the same."""
    import distaff.data.pairs as module

    resolved(corpus)
    calls = []
    inner = module._encode_pairs
    monkeypatch.setattr(module, "_encode_pairs", lambda *texts, **options: calls.append(1) or inner(*texts, **options))
    resolved(corpus)
    assert not calls
    resolved(corpus, overwrite_cache=True)
    assert calls
    workers = []
    monkeypatch.setattr(
        module, "map_texts", lambda *a, **options: workers.append(options["num_proc"]) or map_texts(*a, **options)
    )
    assert resolved(corpus, preprocessing_num_workers=2) == resolved(corpus)
    assert workers == [2, 2, 2, None, None, None]


# What is refused.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target_lang", "fr"), "line 1: 'translation' must hold en, fr, and it holds en, de"),
        (("--max_target_length", "41"), "--max_target_length 41 is more than the 40 positions of the model"),
        (("--config_overrides", f"{BART},vocab_size=20"), "The tokenizer has"),
    ],
)
def test_bad_flags_are_one_sentence(corpus, tmp_path, capsys, flags, words):
    assert train(corpus, tmp_path / "out", *flags) in (1, 2)
    assert words in one_line(capsys)


def test_languages_must_be_given(corpus, capsys):
    assert run("train", "translation", corpus, "--output_dir", "x") == 2
    assert "--source_lang" in one_line(capsys)
