"""Every flag of the commands that are no recipes changes what they write, print or ask for (recipes: test_flags.py)."""

import io
import json
from types import SimpleNamespace

import jax
import pytest

from distaff.cli import COMMANDS, main
from flag_cases import flags_of
from recipe_cases import sentences

TEXT_TASKS = (
    "fill-mask",
    "text-classification",
    "zero-shot-classification",
    "token-classification",
    "feature-extraction",
    "sentence-similarity",
    "text-generation",
    "text2text-generation",
    "summarization",
    "translation",
)
HERE = {
    "tokenizer": ("tokenizer", "train"),
    "config": ("config", "create"),
    "generate": ("generate",),
    **{task: ("predict", task) for task in TEXT_TASKS},
    "predict-answers": ("predict", "question-answering"),
    "predict-images": ("predict", "image-classification"),
    "push": ("push",),
    "quickstart": ("quickstart",),
    "doctor": ("doctor",),
}


def test_every_command_is_here():
    # 'fit' has the flags of 'train'; its own are in test_fit.py.
    assert set(HERE.values()) == {name for name in COMMANDS if name[0] not in ("train", "eval", "fit")}


def written(folder):
    """The files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_all_change(name, table, run):
    """`run(words)` tells what a command does; each flag of the table gives something else than the words beside it."""
    assert table.keys() == flags_of(HERE[name])
    for flag, (words, also) in table.items():
        assert run([*also.split(), f"--{flag}", *words.split()]) != run(also.split()), flag


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, seed in (("a", 0), ("b", 1)):
        lines = [f"{text.title()}." for text in sentences(40, seed)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
        (folder / name).mkdir()
        rows = [{"text": line, "more": line.upper()} for line in lines]
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def test_tokenizer_train(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows, base = f"--train_file {corpus}/a/train.jsonl", f"--train_file {corpus}/a.txt"
    count = iter(range(1000))

    def run(words):
        folder = tmp_path / str(next(count))
        (folder / "occupied").mkdir(parents=True)
        (folder / "occupied" / "tokenizer.json").write_text("{}")
        words = [word.replace("FOLDER", str(folder)) for word in words]
        code = main(["tokenizer", "train", "--output_dir", str(folder / "out"), "--vocab_size", "330", *words])
        return code, written(folder)

    table = {
        "output_dir": ("FOLDER/other", base),
        "train_file": (f"{corpus}/b.txt", base),
        "dataset_name": (str(corpus / "a"), ""),
        "dataset_config_name": ("b", f"--dataset_name {corpus}"),
        "text_column": ("more", rows),
        "max_train_samples": ("4", base),
        "algorithm": ("wordpiece", base),
        "vocab_size": ("300", base),
        "min_frequency": ("20", base),
        "special_tokens": ("<x>", base),
        "extra_ids": ("3", base),
        "lowercase": ("", base),
        "model_max_length": ("64", base),
        "overwrite_output_dir": ("", f"{base} --output_dir FOLDER/occupied"),
    }
    assert_all_change("tokenizer", table, run)


def test_config_create(corpus, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    words = ["--train_file", str(corpus / "a.txt"), "--vocab_size", "300", "--output_dir", str(tokenizer)]
    assert main(["tokenizer", "train", *words]) == 0
    assert main(["config", "create", "--model_type", "gpt2", "--output_dir", str(tmp_path / "gpt2")]) == 0
    count = iter(range(1000))

    def run(words):
        folder = tmp_path / str(next(count))
        (folder / "occupied").mkdir(parents=True)
        (folder / "occupied" / "config.json").write_text("{}")
        words = [word.replace("FOLDER", str(folder)) for word in words]
        return main(["config", "create", "--output_dir", str(folder / "out"), *words]), written(folder)

    bert = "--model_type bert"
    table = {
        "output_dir": ("FOLDER/other", bert),
        "model_type": ("roberta", bert),
        "config_name": (str(tmp_path / "gpt2"), ""),
        "tokenizer_name": (str(tokenizer), bert),
        "config_overrides": ("hidden_size=24", bert),
        "overwrite_output_dir": ("", f"{bert} --output_dir FOLDER/occupied"),
    }
    assert_all_change("config", table, run)


def test_generate(tmp_path, monkeypatch, capsys):
    """Options reach the model, which refuses those that it has no use for (test_generation_usage)."""
    (tmp_path / "prompts.txt").write_text("from a file\n")

    def run(words):
        calls = []

        class Writer:
            model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))

            def __call__(self, prompts, **options):
                calls.append((prompts, options))
                return [[{"generated_text": f"{prompt} text"}] for prompt in prompts]

            def stream(self, prompt, put, **options):
                calls.append(("streamed", prompt, options))

        def open_generator(name, **settings):
            calls.append((name, settings))
            return Writer()

        monkeypatch.setattr("distaff.tasks.generate.open_generator", open_generator)
        monkeypatch.setattr("sys.stdin", io.StringIO("typed\n"))
        code = main(["generate", "--model_name_or_path", "model", *words])
        for call in calls:
            key = call[-1].get("prng_key")
            call[-1].update({} if key is None else {"prng_key": jax.random.key_data(key).tolist()})
        return code, calls, capsys.readouterr().out

    numbers = "max_new_tokens max_length min_new_tokens top_k num_beams num_return_sequences no_repeat_ngram_size"
    floats = "temperature top_p min_p typical_p length_penalty repetition_penalty"
    table = dict.fromkeys(numbers.split(), ("3", "")) | dict.fromkeys(floats.split(), ("0.5", ""))
    table |= {
        "model_name_or_path": ("other", ""),
        "prompt": ("one", ""),
        "prompt_file": (str(tmp_path / "prompts.txt"), ""),
        "do_sample": ("True", ""),
        "early_stopping": ("never", ""),
        "src_lang": ("de_DE", ""),
        "tgt_lang": ("en_XX", ""),
        "stop_strings": ("x", ""),
        "seed": ("3", "--seed 2"),
        "batch_size": ("2", ""),
        "dtype": ("bfloat16", ""),
        "mesh": ("data=8", ""),
        "json": ("", ""),
    }
    assert_all_change("generate", table, run)
    for name in (*numbers.split(), *floats.split()):
        _, calls, _ = run([f"--{name}", "2"])
        assert calls[-1][-1][name] == 2, name


def test_predict_image_classification(monkeypatch, capsys):
    def run(words):
        calls = []

        def stream(images, **options):
            calls.append((images, options))
            return [[{"label": "a", "score": 0.5}] for _ in images]

        def pipeline(*words, **options):
            calls.append((words, options))
            return SimpleNamespace(stream=stream)

        monkeypatch.setattr("distaff.tasks.predict_images.pipeline", pipeline)
        monkeypatch.setattr("sys.stdin", io.StringIO("a.png\n"))
        code = main(["predict", "image-classification", "--model_name_or_path", "model", *words])
        return code, calls, capsys.readouterr().out

    table = {
        "model_name_or_path": ("other", ""),
        "images": ("b.png c.png", ""),
        "top_k": ("2", ""),
        "batch_size": ("2", ""),
        "mesh": ("data=8", ""),
        "json": ("", ""),
    }
    assert_all_change("predict-images", table, run)


def test_predict_question_answering(monkeypatch, capsys, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"id": "1", "question": "What?", "context": "That."}\n')

    def run(words):
        calls = []

        def ask(several):
            calls.append(several)
            return [{"answer": each["context"], "score": 0.5, "start": 0, "end": 4} for each in several]

        monkeypatch.setattr("distaff.tasks.predict_answers.pipeline", lambda *w, **o: calls.append((w, o)) or ask)
        words = [word.replace("FOLDER", str(tmp_path)) for word in words]
        given = [] if "--file" in words else ["--question", "Who?", "--context", "She."]
        code = main(["predict", "question-answering", "--model_name_or_path", "model", *given, *words])
        assert code == 0, capsys.readouterr().err
        return calls, capsys.readouterr().out

    table = {
        "model_name_or_path": ("other", ""),
        "question": ("Where?", ""),
        "context": ("There.", ""),
        "file": ("FOLDER/questions.jsonl", ""),
        **dict.fromkeys(("top_k", "max_answer_len", "max_seq_len", "doc_stride", "batch_size"), ("2", "")),
        "handle_impossible_answer": ("", ""),
        "mesh": ("data=8", ""),
        "json": ("", ""),
    }
    assert_all_change("predict-answers", table, run)


ENTITY = {"entity": "X", "score": 0.5, "word": "a", "start": 0, "end": 1}
ANSWERS = {
    "fill-mask": lambda text: [{"token_str": text, "score": 0.5}],
    "text-classification": lambda text: {"label": text, "score": 0.5},
    "zero-shot-classification": lambda text: {"sequence": text, "labels": ["a"], "scores": [0.5]},
    "token-classification": lambda text: [ENTITY],
    "feature-extraction": lambda text: [[[0.5], [0.25]]],
}
PREDICTING = {
    "model_name_or_path": ("other", ""),
    "texts": ("one two", ""),
    "file": ("FOLDER/texts.txt", ""),
    "text_column": ("more", "--file FOLDER/texts.jsonl"),
    "json": ("", ""),
}
BATCHES = {**PREDICTING, "batch_size": ("2", ""), "dtype": ("bfloat16", ""), "mesh": ("data=8", "")}
WRITING = {**BATCHES, "max_new_tokens": ("3", ""), "num_beams": ("2", ""), "truncation": ("", "")}
PREFIXED = {**WRITING, "prefix": ("say: ", "")}
PREDICT_FLAGS = {
    "fill-mask": {**BATCHES, "top_k": ("2", "")},
    "text-classification": {
        **BATCHES,
        "top_k": ("2", ""),
        "function_to_apply": ("none", ""),
        "truncation": ("", ""),
    },
    "zero-shot-classification": {
        **{name: (words, f"--candidate_labels a,b {also}") for name, (words, also) in BATCHES.items()},
        "candidate_labels": ("c,d", "--candidate_labels a,b"),
        "hypothesis_template": ("{}", "--candidate_labels a,b"),
        "multi_label": ("", "--candidate_labels a,b"),
    },
    "token-classification": {**BATCHES, "aggregation_strategy": ("max", "")},
    "feature-extraction": {**BATCHES, "truncation": ("", ""), "json": ("False", "")},
    "sentence-similarity": {
        **{name: (words, f"--texts a b {also}") for name, (words, also) in BATCHES.items()},
        "file": ("FOLDER/texts.txt", "--texts a --file FOLDER/texts.jsonl"),
        "text_column": ("more", "--texts a --file FOLDER/texts.jsonl"),
    },
    "text-generation": {**WRITING, "return_full_text": ("False", "")},
    "text2text-generation": PREFIXED,
    "summarization": PREFIXED,
    "translation": {**PREFIXED, "src_lang": ("de_DE", ""), "tgt_lang": ("en_XX", "")},
}


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_predict(task, monkeypatch, capsys, tmp_path):
    (tmp_path / "texts.txt").write_text("from a file\nand more\n")
    rows = [{"text": "one", "more": "other"}, {"text": "two", "more": "others"}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def answer(texts, others=None):
        if others is not None:
            return [0.5 for _ in others]
        return map(ANSWERS.get(task, lambda text: [{"generated_text": text}]), texts)

    def run(words):
        calls = []
        monkeypatch.setattr("distaff.tasks.predict.pipeline", lambda *w, **o: calls.append((w, o)) or answer)
        monkeypatch.setattr("sys.stdin", io.StringIO("typed\nlines\n"))
        words = [word.replace("FOLDER", str(tmp_path)) for word in words]
        code = main(["predict", task, "--model_name_or_path", "model", *words])
        assert code == 0, capsys.readouterr().err
        assert calls[0][0][0] == task
        return code, calls, capsys.readouterr().out

    assert_all_change(task, PREDICT_FLAGS[task], run)


def test_push(monkeypatch):
    def run(words):
        calls = []
        monkeypatch.setattr("distaff.tasks.push.push_folder", lambda *w, **o: calls.append((w, o)) or "address")
        return main(["push", "--folder", "one", "--repo_id", "me/one", *words]), calls

    table = {
        "folder": ("two", ""),
        "repo_id": ("me/two", ""),
        "token": ("hf_x", ""),
        "private": ("True", ""),
        "commit_message": ("Why", ""),
    }
    assert_all_change("push", table, run)


def test_quickstart(tmp_path, monkeypatch):
    count = iter(range(1000))

    def run(words):
        folder = tmp_path / str(next(count))
        (folder / "occupied").mkdir(parents=True)
        (folder / "occupied" / "notes.txt").write_text("mine")
        calls = []
        monkeypatch.setattr("distaff.quickstart.train", lambda flags: calls.append(vars(flags)) or 1)
        monkeypatch.setattr("distaff.quickstart.train_tokenizer", lambda flags: calls.append(vars(flags)))
        monkeypatch.setattr("distaff.quickstart.complete_steps", lambda path: [3])
        words = [word.replace("FOLDER", str(folder)) for word in words]
        code = main(["quickstart", "--output_dir", str(folder / "out"), *words])
        return code, [{name: str(value).replace(str(folder), "") for name, value in call.items()} for call in calls]

    table = {
        "output_dir": ("FOLDER/other", ""),
        "max_steps": ("7", ""),
        "resume_from_checkpoint": ("", "--output_dir FOLDER/occupied"),
        "overwrite_output_dir": ("", "--output_dir FOLDER/occupied"),
    }
    assert_all_change("quickstart", table, run)


def test_doctor(capsys):
    def run(words):
        code = main(["doctor", *words])
        lines = capsys.readouterr().out.splitlines()
        return code, [line for line in lines if "jax computes on" in line]

    assert_all_change("doctor", {"platform": ("tpu", "")}, run)
