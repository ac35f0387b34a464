"""The translation recipe with BART, and mBART's languages."""

import pytest
from transformers import MBart50Tokenizer, MBartConfig, MBartTokenizer

from distaff import FlaxBartForConditionalGeneration
from distaff.core.errors import UsageError
from distaff.tasks.translation import TranslationFlags, set_languages
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
        *("--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 24, "--eval_steps", 1000),
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
