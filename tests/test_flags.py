"""Every flag of every command changes something that is used: what is trained on, the program, the update, a file.

A recipe is run up to where it hands its work to `fit` or `evaluate`, and what it hands over is compared with and
without the flag. That `fit` and the optimizer then do what their settings say is shown below for each setting.
A flag without an entry here fails.
"""

import dataclasses
import importlib
import json
import re
import shutil
from dataclasses import dataclass

import datasets
import jax
import pytest
from transformers import AutoConfig

from distaff import FlaxAutoModel
from distaff.cli import COMMANDS, find_command, main, parse
from distaff.core.mesh import make_mesh
from distaff.hub import new_image_processor
from distaff.tasks._planned import parts
from flag_cases import flags_of, hand_over
from image_cases import VIT, write_images
from pair_cases import pairs, write_rows
from recipe_cases import sentences

SHAPE = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,max_position_embeddings=34"
T5 = "d_model=16,d_kv=8,d_ff=32,num_layers=1,num_decoder_layers=1,num_heads=2"
BART = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=32,decoder_ffn_dim=32,max_position_embeddings=34"
)


@dataclass(frozen=True)
class Recipe:
    """How a recipe is called: a tiny model, another type of the same shape, a change of its config, and its data."""

    model_type: str
    shape: str
    other_type: str
    change: str
    length: tuple[str, ...]
    data: str = "txt"

    @property
    def pairs(self) -> bool:
        return self.data != "txt"


ROWS, SOURCES = ("--max_seq_length", "16"), ("--max_source_length", "24", "--max_target_length", "24")
WINDOWS = (*ROWS, "--doc_stride", "3")
RECIPES = {
    "mlm": Recipe("roberta", f"{SHAPE},intermediate_size=32", "bert", "layer_norm_eps=0.5", ROWS),
    "electra": Recipe("electra", f"{SHAPE},intermediate_size=32,embedding_size=8", "bert", "layer_norm_eps=0.5", ROWS),
    "clm": Recipe("gpt2", SHAPE, "opt", "layer_norm_epsilon=0.5", ("--block_size", "16")),
    "t5-mlm": Recipe("t5", T5, "mt5", "layer_norm_epsilon=0.5", ROWS),
    "bart-dlm": Recipe("bart", BART, "mbart", "activation_function=relu", ROWS),
    "summarization": Recipe("t5", T5, "mt5", "layer_norm_epsilon=0.5", SOURCES, "summary"),
    "translation": Recipe("bart", BART, "mbart", "activation_function=relu", SOURCES, "translation"),
    "glue": Recipe("roberta", f"{SHAPE},intermediate_size=32", "bert", "layer_norm_eps=0.5", ROWS, "labelled"),
    "ner": Recipe("roberta", f"{SHAPE},intermediate_size=32", "bert", "layer_norm_eps=0.5", ROWS, "tagged"),
    "qa": Recipe("roberta", f"{SHAPE},intermediate_size=32", "bert", "layer_norm_eps=0.5", WINDOWS, "answered"),
    "image-classification": Recipe("vit", VIT, "resnet", "layer_norm_eps=0.5", ("--image_size", "8"), "images"),
}


TAGS = ("B-X", "I-X", "O")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files, datasets and tokenizers by name; what a flag's words say in braces."""
    folder = tmp_path_factory.mktemp("flags")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        make_corpus(folder)
        yield folder


def make_corpus(folder):
    for name, count, seed in (("train", 80, 0), ("other", 70, 5), ("validation", 30, 1)):
        texts = [f"{text}." for text in sentences(count, seed)]
        (folder / f"{name}.txt").write_text("\n".join(texts) + "\n")
        write_rows(folder / f"{name}.jsonl", [{"text": text, "more": text.upper()} for text in texts])
        shown = pairs(count, seed)
        write_rows(folder / f"{name}-summary.jsonl", [{"document": a, "summary": b, "text": b} for a, b in shown])
        nested = [{"translation": {"en": a, "de": b, "fr": b.upper()}} for a, b in shown]
        write_rows(folder / f"{name}-translation.jsonl", nested)
        labelled = [
            {"sentence1": a, "sentence2": b, "label": index % 3, "sentence": b, "score": index / 8, "brief": a[:9]}
            for index, (a, b) in enumerate(shown)
        ]
        write_rows(folder / f"{name}-labelled.jsonl", labelled)
        tagged = [
            {
                "tokens": a.split(),
                "ner_tags": [TAGS[len(word) % 3] for word in a.split()],
                "pos_tags": [word[-1] for word in a.split()],
                "capitals": a.upper().split(),
            }
            for a, _ in shown
        ]
        write_rows(folder / f"{name}-tagged.jsonl", tagged)
        answered = [
            {"question": a[:4], "context": b, "answers": {"text": [b.split()[1]], "answer_start": [b.index(" ") + 1]}}
            for a, b in ((source, " ".join(source.split()[:6])) for source, _ in shown)
        ]
        write_rows(folder / f"{name}-answered.jsonl", answered)
        write_image_rows(folder, name, count, seed)
    write_images(folder / "classes", 12, seed=9)
    for kind in ("", "-summary", "-translation", "-labelled", "-tagged", "-answered", "-images"):
        write_set(folder, kind)
    words = ("tokenizer", "train", "--extra_ids", "8", "--vocab_size", "320")
    for name in ("train", "other"):
        output = ("--output_dir", str(folder / f"{name}-tokenizer"))
        assert main([*words, "--train_file", str(folder / f"{name}.txt"), *output]) == 0


def write_image_rows(folder, name, count, seed):
    """A list of images with their labels, in several columns."""
    images = sorted(write_images(folder / f"{name}-pictures", count, seed=seed).rglob("*.png"))
    kinds = sorted({path.parent.name for path in images})
    rows = [
        {
            "image": str(path),
            "label": path.parent.name,
            "more": str(other),
            "turned": kinds[index % 3],
            "four": index % 4,
        }
        for index, (path, other) in enumerate(zip(images, reversed(images)))
    ]
    write_rows(folder / f"{name}-images.jsonl", rows)


def write_set(folder, kind):
    """A dataset with two configurations, without a Hub."""
    path = folder / f"set{kind}"
    path.mkdir()
    configs, types = [], {"image": "image", "label": "string", "more": "string", "turned": "string", "four": "int64"}
    features = "".join(f"  - name: {name}\n    dtype: {dtype}\n" for name, dtype in types.items())
    for name, source in (("first", "other"), ("second", "validation")):
        (path / f"{name}.jsonl").write_text((folder / f"{source}{kind}.jsonl").read_text())
        default = "  default: true\n" if name == "first" else ""
        configs.append(f"- config_name: {name}\n  data_files: {name}.jsonl\n{default}")
    infos = "".join(f"- config_name: {name}\n  features:\n{features}" for name in ("first", "second"))
    told = f"dataset_info:\n{infos}" if kind == "-images" else ""
    (path / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + f"{told}---\n")


class Case:
    """Words that stand behind a flag, what they change, and words that stand beside them in both runs.

    refused: the error, for a flag that leaves nothing else to be given.
    """

    def __init__(self, words, *changed, also="", refused=""):
        self.words, self.changed, self.also, self.refused = words, changed, also, refused


SHARED = {
    "model_name_or_path": Case("{seeded}", "params"),
    "model_type": Case("{other_type}", "params"),
    "config_name": Case("{config}", "program"),
    "tokenizer_name": Case("{other_tokenizer}", "train"),
    "config_overrides": Case("{shape},{change}", "program"),
    "model_revision": Case("main", "names", also="--model_name_or_path {checkpoint}"),
    "cache_dir": Case("{cache}", "cache"),
    "dtype": Case("bfloat16", "program"),
    "param_dtype": Case("bfloat16", "params"),
    "gradient_checkpointing": Case("", "program"),
    "scan_layers": Case("", "params"),
    "mesh": Case("data=8", "train"),
    "print_placement": Case("", "printed"),
    "attn_implementation": Case("blocks", "program"),
    "output_dir": Case("{fresh}", "files", also="--output_dir {unused}"),
    "overwrite_output_dir": Case("", "code", also="--output_dir {occupied}"),
    "resume_from_checkpoint": Case("", "code", also="--output_dir {occupied}"),
    "do_train": Case("False", "called", also="--model_name_or_path {checkpoint}"),
    "do_eval": Case("False", "eval"),
    "num_train_epochs": Case("2", "loop", also="--max_steps -1"),
    "seed": Case("7", "params", "train"),
    "push_to_hub": Case("", "published"),
    "hub_model_id": Case("me/mine", "published", also="--push_to_hub"),
    "hub_private_repo": Case("True", "published", also="--push_to_hub"),
    "hub_token": Case("hf_x", "published", "names", also="--push_to_hub"),
    "dataset_name": Case("{set} --train_file=", "train"),
    "dataset_config_name": Case("second", "train", also="--dataset_name {set} --train_file="),
    "train_file": Case("{other}", "train"),
    "validation_file": Case("{other}", "eval"),
    "validation_split_percentage": Case("30", "eval", also="--validation_file= --train_file {rows}"),
    "preprocessing_num_workers": Case("2", "tokenising", also="--train_file {rows}"),
    "overwrite_cache": Case("", "tokenising"),
    "max_train_samples": Case("40", "train", also="--train_file {rows}"),
    "max_eval_samples": Case("9", "eval", also="--validation_file {validation_rows}"),
}
TEXTS = {
    "text_column": Case("more", "train", also="--train_file {rows} --validation_file {validation_rows}"),
    "streaming": Case("", "train"),
    "num_train_steps": Case("5", "loop", also="--max_steps -1"),
    "num_eval_samples": Case(
        "12", "eval", also="--streaming --validation_file= --train_file {rows} --num_eval_samples 30"
    ),
    "shuffle_buffer_size": Case("2", "train", also="--streaming"),
}
LENGTH = {"max_seq_length": Case("12", "train")}
DOCUMENTS = {"keep_linebreaks": Case("False", "train")}
DENOISED = {
    **LENGTH,
    **DOCUMENTS,
    "preview": Case("2", "called", "printed", "files"),
    "mlm_probability": Case("0.4", "train"),
}
MASKED = {
    **LENGTH,
    "line_by_line": Case("", "train"),
    "pad_to_max_length": Case("False", "train", also="--line_by_line --max_seq_length 32"),
    "mlm_probability": Case("0.4", "train"),
    "whole_word_mask": Case("", "train"),
}
PREDICTING = "--do_predict --test_file {test}"
PAIRED = {
    "test_file": Case("{other}", "generated", also=PREDICTING),
    "skip_blank_pairs": Case("", "code", "called", also="--validation_file {blank}"),
    "source_prefix": Case("say:", "train"),
    "max_source_length": Case("6", "train"),
    "max_target_length": Case("5", "train", "eval"),
    "val_max_target_length": Case("5", "eval"),
    "pad_to_max_length": Case("False", "train"),
    "max_predict_samples": Case("4", "generated", also=PREDICTING),
    "label_smoothing_factor": Case("0.1", "program"),
    "predict_with_generate": Case("", "generated"),
    "num_beams": Case("3", "generated", also="--predict_with_generate"),
    "do_predict": Case("", "generated", "files", also="--test_file {test}"),
}
# What recipes of fine-tuning have in common; those on texts have the others too.
TUNED = {
    "max_predict_samples": Case("4", "generated", also=PREDICTING),
    "label_smoothing_factor": Case("0.1", "program"),
    "do_predict": Case("", "generated", "files", also="--test_file {test}"),
    "predictions_format": Case("jsonl", "files", also=PREDICTING),
    "freeze": Case("embeddings", "trained"),
    "load_best_model_at_end": Case("", "loop"),
    "metric_for_best_model": Case("loss", "loop", also="--load_best_model_at_end"),
    "greater_is_better": Case("False", "loop", also="--load_best_model_at_end"),
    "early_stopping_patience": Case("3", "loop"),
    "early_stopping_threshold": Case("0.5", "loop", also="--early_stopping_patience 3"),
}
TUNED_TEXTS = {
    "group_by_length": Case("False", "train"),
    **TUNED,
    **LENGTH,
    "test_file": Case("{other}", "generated", also=PREDICTING),
    "pad_to_max_length": Case("", "train", also="--max_seq_length 32"),
}
OWN = {
    "mlm": {**TEXTS, **MASKED},
    "electra": {
        "model_type": Case(
            "bert", "called", also="--config_overrides hidden_size=16", refused="needs an electra config"
        ),
        **TEXTS,
        **MASKED,
        "generator_size": Case("0.5", "params"),
        "generator_config_name": Case("{generator}", "params"),
        "discriminator_weight": Case("2", "program"),
    },
    "clm": {
        **TEXTS,
        **DOCUMENTS,
        "block_size": Case("12", "train"),
        "segment_documents": Case("", "program", also="--keep_linebreaks False"),
    },
    "t5-mlm": {**TEXTS, **DENOISED, "mean_noise_span_length": Case("1", "train", also="--mlm_probability 0.3")},
    "bart-dlm": {
        **TEXTS,
        **DENOISED,
        "poisson_lambda": Case("1", "train"),
        "permute_sentence_ratio": Case("0", "train"),
    },
    "summarization": {
        **PAIRED,
        "text_column": Case("text", "train"),
        "summary_column": Case("document", "train"),
    },
    "translation": {
        **PAIRED,
        "source_lang": Case("fr", "train"),
        "target_lang": Case("fr", "train"),
    },
    "glue": {
        **TUNED_TEXTS,
        "task_name": Case("cola", "train"),
        "text_column_name": Case("sentence2,sentence1", "train"),
        "label_column_name": Case("score", "train"),
        "skip_blank_rows": Case("", "code", "called", also="--validation_file {blank}"),
        "problem_type": Case("regression", "program"),
        "pad_to_max_length": Case("", "train", also="--max_seq_length 32 --text_column_name brief"),
        "group_by_length": Case("False", "train", also="--max_seq_length 32 --text_column_name brief"),
        "pack_texts": Case("", "train"),
        "class_weights": Case("1 2 3", "program"),
        "ignore_mismatched_sizes": Case("", "code", also="--model_name_or_path {checkpoint} --label_column_name score"),
    },
    "ner": {
        **TUNED_TEXTS,
        "text_column_name": Case("capitals", "train"),
        "label_column_name": Case("pos_tags", "train"),
        "task_name": Case("pos", "train"),
        "label_all_tokens": Case("", "train"),
        "return_entity_level_metrics": Case("", "code", also="--load_best_model_at_end --metric_for_best_model X_f1"),
        "ignore_mismatched_sizes": Case(
            "", "code", also="--model_name_or_path {checkpoint} --label_column_name pos_tags"
        ),
        "predictions_format": Case("csv", "files", also=PREDICTING),
    },
    "qa": {
        **TUNED_TEXTS,
        "doc_stride": Case("1", "train"),
        "version_2_with_negative": Case("", "answers"),
        "null_score_diff_threshold": Case("-0.5", "answers", also="--version_2_with_negative"),
        "n_best_size": Case("3", "answers"),
        "max_answer_length": Case("1", "answers"),
    },
}
OWN["image-classification"] = {
    **TUNED,
    "model_type": Case("resnet", "called", refused="does not fit the config"),
    "tokenizer_name": Case("{other_tokenizer}", "called", refused="Images have no tokenizer"),
    "cache_dir": Case("{cache}", "cache", also="--dataset_name {set} --train_file="),
    "hub_token": Case("hf_x", "published", "names", also="--push_to_hub --model_name_or_path {checkpoint}"),
    "preprocessing_num_workers": Case("2", "threads", also="--preprocessing_num_workers 3"),
    "train_dir": Case("{classes} --train_file=", "train"),
    "validation_dir": Case("{classes} --validation_file=", "eval"),
    "test_dir": Case("{classes} --test_file=", "generated", also=PREDICTING),
    "test_file": Case("{other}", "generated", also=PREDICTING),
    "image_column_name": Case("more", "train"),
    "label_column_name": Case("turned", "train"),
    "image_processor_name": Case("{processor}", "train"),
    "image_size": Case("12", "train"),
    "ignore_mismatched_sizes": Case(
        "", "code", also="--model_name_or_path {checkpoint} --label_column_name four --do_eval False"
    ),
    "random_resized_crop": Case("False", "train"),
    "min_crop_area": Case("0.9", "train"),
    "horizontal_flip": Case("False", "train"),
    "mixup_alpha": Case("0.4", "train"),
}
# Images are not tokenised, and nothing of them is cached.
WITHOUT = {"image-classification": {"overwrite_cache"}}
# Where an evaluation takes other words; elsewhere "train" is "eval" there.
UNTIED = Case("7", "params", also="--config_overrides tie_word_embeddings=false")  # the file lacks the head
EVALUATION = {
    "config_overrides": Case("{change}", "program"),
    "do_eval": Case("False", "called", refused="nothing is left to do"),
    "seed": Case("7", "eval"),
    "hub_token": Case("hf_x", "names"),
    "dataset_name": Case("{set}", "eval", also="--validation_file="),
    "dataset_config_name": Case("second", "eval", also="--dataset_name {set} --validation_file="),
    "train_file": Case("{other_rows}", "eval", also="--validation_file= --train_file {rows}"),
    "preprocessing_num_workers": Case("2", "tokenising", also="--validation_file {validation_rows}"),
}
EVALUATION_OWN = {
    "electra": {
        "generator_size": Case("0.5", "params", also="--model_name_or_path {alone}"),
        "generator_config_name": Case("{generator}", "params", also="--model_name_or_path {alone}"),
    },
    "clm": {"seed": UNTIED},
    # Rows with one span have it at their end.
    "t5-mlm": {"seed": Case("7", "eval", also="--mlm_probability 0.3 --mean_noise_span_length 1")},
    "glue": {
        "seed": Case("7", "params", also="--model_name_or_path {headless}"),
        "do_eval": Case("False", "called", also=PREDICTING),
        "label_column_name": Case("sentence", "code", refused="is none of the model's"),
        "problem_type": Case("regression", "code", refused="gives no numbers"),
    },
    "ner": {
        "seed": Case("7", "params", also="--model_name_or_path {headless}"),
        "do_eval": Case("False", "called", also=PREDICTING),
        "label_column_name": Case("pos_tags", "code", refused="is none of the model's"),
        "task_name": Case("pos", "code", refused="is none of the model's"),
        "return_entity_level_metrics": Case("", "printed"),
    },
    "qa": {
        "seed": Case("7", "params", also="--model_name_or_path {headless}"),
        "do_eval": Case("False", "called", also=PREDICTING),
    },
    "image-classification": {
        "seed": Case("7", "params", also="--model_name_or_path {headless}"),
        "do_eval": Case("False", "called", also=PREDICTING),
        "cache_dir": Case("{cache}", "cache", also="--dataset_name {set} --validation_file="),
        "preprocessing_num_workers": Case("2", "threads", also="--preprocessing_num_workers 3"),
        "train_dir": Case("{classes} --train_file=", "eval", also="--validation_file= --train_file {rows}"),
    },
    "summarization": {"seed": UNTIED, "do_eval": Case("False", "called", also=PREDICTING)},
    "translation": {"seed": UNTIED, "do_eval": Case("False", "called", also=PREDICTING)},
}
# Numbers of the loop and the optimizer, given at once but for those in APART: each reaches the setting that bears its meaning.
NUMBERS = {
    "per_device_train_batch_size": ("2", "rows", None, 2 * 3),
    "per_device_eval_batch_size": ("3", "eval_rows", None, 3),
    "gradient_accumulation_steps": ("3", "loop", "accumulation", 3),
    "max_steps": ("17", "loop", "total_steps", 17),
    "logging_steps": ("4", "loop", "log_every", 4),
    "eval_steps": ("5", "loop", "eval_every", 5),
    "save_steps": ("6", "loop", "save_every", 6),
    "save_total_limit": ("2", "loop", "save_total_limit", 2),
    "seed": ("7", "loop", "seed", 7),
    "overwrite_output_dir": ("True", "loop", "overwrite", True),
    "resume_from_checkpoint": ("newest", "loop", "resume", "newest"),
    "debug_nans": ("True", "loop", "debug_nans", True),
    "report_to": ("tensorboard", "loop", "report_to", ("tensorboard",)),
    "learning_rate": ("0.25", "optimizer", "learning_rate", 0.25),
    "weight_decay": ("0.5", "optimizer", "weight_decay", 0.5),
    "optimizer": ("muon", "optimizer", "optimizer", "muon"),
    "moment_dtype": ("bfloat16", "optimizer", "moment_dtype", "bfloat16"),
    "ema_decay": ("0.5", "loop", "ema_decay", 0.5),
    "adam_beta1": ("0.7", "optimizer", "adam_beta1", 0.7),
    "adam_beta2": ("0.8", "optimizer", "adam_beta2", 0.8),
    "adam_epsilon": ("0.125", "optimizer", "adam_epsilon", 0.125),
    "adafactor": ("True", "optimizer", "adafactor", True),
    "sgd_momentum": ("0.5", "optimizer", "sgd_momentum", 0.5),
    "max_grad_norm": ("2.5", "optimizer", "max_grad_norm", 2.5),
    "lr_scheduler_type": ("cosine", "optimizer", "lr_scheduler_type", "cosine"),
    "warmup_steps": ("3", "optimizer", "warmup_steps", 3),
}
# Those of another optimizer, with the words that stand beside them.
APART = {"adafactor": "", "sgd_momentum": "--optimizer sgd"}


class Bench:
    """One recipe's runs."""

    def __init__(self, name, corpus, folder, capsys):
        self.name, self.recipe, self.corpus, self.folder, self.capsys = name, RECIPES[name], corpus, folder, capsys
        self.runs = {}
        kind = f"-{self.recipe.data}.jsonl" if self.recipe.pairs else ".txt"
        rows = f"-{self.recipe.data}.jsonl" if self.recipe.pairs else ".jsonl"
        self.places = {
            "other_type": self.recipe.other_type,
            "shape": self.recipe.shape,
            "change": self.recipe.change,
            "other_tokenizer": corpus / "other-tokenizer",
            "train": corpus / f"train{kind}",
            "other": corpus / f"other{kind}",
            "validation": corpus / f"validation{kind}",
            "rows": corpus / f"train{rows}",
            "other_rows": corpus / f"other{rows}",
            "validation_rows": corpus / f"validation{rows}",
            "test": corpus / f"validation{rows}",
            "classes": corpus / "classes",
            "set": corpus / f"set{kind.removesuffix('.jsonl').removesuffix('.txt')}",
        }

    def prepare(self):
        """Make checkpoints and configs of the recipe's own."""
        self.places["checkpoint"] = self.run("train").folder / "fresh"
        self.places["seeded"] = self.run("train", "--seed", "7").folder / "fresh"
        config = AutoConfig.from_pretrained(self.places["checkpoint"])
        config.update_from_string(self.recipe.change)
        config.save_pretrained(self.folder / "config")
        self.places["config"] = self.folder / "config"
        if self.recipe.pairs:
            blank = {"document": "a", "summary": "", "translation": {"en": "a", "de": ""}}
            blank |= {"sentence1": "", "sentence2": "a", "label": 0, "tokens": [], "ner_tags": []}
            rows = (self.corpus / f"validation-{self.recipe.data}.jsonl").read_text()
            self.places["blank"] = self.folder / "blank.jsonl"
            self.places["blank"].write_text(f"{rows}{json.dumps(blank)}\n")
        if self.recipe.data == "images":
            self.places["processor"] = self.folder / "processor"
            processor = new_image_processor(height=16, width=16, channels=3)
            processor.image_mean = [0.1, 0.2, 0.3]
            processor.save_pretrained(self.places["processor"])
        if self.recipe.data in ("labelled", "tagged", "answered", "images"):
            self.places["headless"] = self.folder / "headless"
            shutil.copytree(self.places["checkpoint"], self.places["headless"])
            FlaxAutoModel.from_pretrained(self.places["checkpoint"]).save_pretrained(self.places["headless"])
        if self.name == "electra":
            self.places["alone"] = self.folder / "alone"
            shutil.copytree(self.places["checkpoint"], self.places["alone"])
            shutil.rmtree(self.places["alone"] / "generator")
            config.update_from_string("hidden_size=8")
            config.save_pretrained(self.folder / "generator")
            self.places["generator"] = self.folder / "generator"

    def run(self, command, *words):
        """What a run hands over; a run is made once."""
        key = (command, *words)
        if key not in self.runs:
            folder = self.folder / str(len(self.runs))
            (folder / "occupied").mkdir(parents=True)
            (folder / "occupied" / "recipe.yaml").write_text("{}")
            names = {name: folder / name for name in ("fresh", "unused", "occupied", "cache")}
            filled = self.words(command, *words, **names)
            self.runs[key] = hand_over([command, self.name, *filled], self.capsys, folder)
            self.runs[key].folder = folder
        return self.runs[key]

    def words(self, command, *words, **names):
        """The words of a run, their braces filled."""
        return [word.format_map({**names, **self.places}) for word in (*self.base(command).split(), *words)]

    def base(self, command):
        words = f"--validation_file {{validation}} --per_device_eval_batch_size 8 {' '.join(self.recipe.length)}"
        words += " --source_lang en --target_lang de" if self.name == "translation" else ""
        if command == "eval":
            return f"{words} --model_name_or_path {{checkpoint}} --output_dir {{unused}}"
        words += " --train_file {train} --per_device_train_batch_size 8 --max_steps 6 --report_to none"
        words += f" --model_type {self.recipe.model_type} --config_overrides {{shape}} --output_dir {{fresh}}"
        return words if self.recipe.data == "images" else f"{words} --tokenizer_name {self.corpus / 'train-tokenizer'}"

    def assert_changes(self, command, flag, case):
        """Assert that the flag changes what it is said to change."""
        before = self.run(command, *case.also.split())
        after = self.run(command, *case.also.split(), f"--{flag}", *case.words.split())
        assert case.refused in after.of("error")
        assert (after.of("code") == 0) != bool(case.refused), after.of("error")
        for name in case.changed:
            seen = "eval" if command == "eval" and name == "train" else name
            assert after.of(seen) != before.of(seen), f"--{flag} does not change {seen}"


@pytest.fixture(scope="module")
def benches(corpus, tmp_path_factory):
    return {}


@pytest.fixture
def bench(benches, corpus, tmp_path_factory, capsys):
    def get(name):
        if name not in benches:
            benches[name] = Bench(name, corpus, tmp_path_factory.mktemp(name), capsys)
            benches[name].prepare()
        benches[name].capsys = capsys
        return benches[name]

    return get


def cases(command, recipe):
    table = {**SHARED, **OWN[recipe]}
    if command == "eval":
        table |= {**EVALUATION, **EVALUATION_OWN.get(recipe, {})}
    return {name: case for name, case in table.items() if name not in WITHOUT.get(recipe, ())}


def named(command, recipe):
    """The flags of a command that are no numbers of the loop."""
    return flags_of((command, recipe)) - (NUMBERS.keys() - cases(command, recipe).keys())


# What all recipes share is wired once for each of these kinds; the others show their own flags.
FIRST = ("clm", "summarization", "glue", "image-classification")
NAMES = [
    (command, recipe, flag)
    for command in ("train", "eval")
    for recipe in RECIPES
    for flag in sorted(named(command, recipe) & cases(command, recipe).keys())
    if recipe in FIRST or flag not in SHARED
]


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flag_is_here(command, recipe):
    strangers = named(command, recipe) - cases(command, recipe).keys()
    assert not strangers, f"'distaff {command} {recipe}': say what {sorted(strangers)} change."


@pytest.mark.parametrize(("command", "recipe", "flag"), NAMES)
def test_a_flag_changes_what_it_names(bench, command, recipe, flag):
    bench(recipe).assert_changes(command, flag, cases(command, recipe)[flag])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_number_reaches_its_setting(bench, recipe):
    plain, together = bench(recipe).run("train"), NUMBERS.keys() - APART.keys()
    for flags, beside in (together, ""), *(([flag], beside) for flag, beside in APART.items()):
        words = [word for flag in sorted(flags) for word in (f"--{flag}", NUMBERS[flag][0])]
        given = bench(recipe).run("train", *words, *beside.split())
        assert given.of("code") == 0, given.of("error")
        for flag in flags:
            _, place, field, wanted = NUMBERS[flag]
            before, after = (run.of(place) if field is None else run.of(place)[field] for run in (plain, given))
            assert after == wanted != before, flag


# Flags with which all rows of the data are as long as the limit, so that a batch is what `distaff fit` plans for.
FULL = {
    "summarization": "--max_source_length 6 --max_target_length 5",
    "translation": "--max_source_length 6 --max_target_length 5",
    **dict.fromkeys(("glue", "ner", "qa"), "--pad_to_max_length"),
}
# What a recipe learns from its data, and a plan from the config.
LABELS = {"glue": 3, "ner": 3, "image-classification": 3}


def operations(program):
    """The operations of a program with the types of their results, once: which parts are printed as one is chance."""
    return set(re.findall(r":(\w+\[[\d,]*\]) = (\w+)", program))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_fit_compiles_is_what_a_run_trains(bench, recipe):
    full, here = FULL.get(recipe, "").split(), bench(recipe)
    run = here.run("train", *full)
    assert run.of("code") == 0, run.of("error")
    batch = run.batch(0)
    labels = f",num_labels={LABELS[recipe]}" if recipe in LABELS else ""
    words = here.words("train", *full, "--config_overrides", f"{{shape}}{labels}", fresh="")
    name, command = find_command(["fit", recipe])
    module = importlib.import_module(command.module)
    flags, _ = parse(name, command, getattr(module, command.flags), words)
    planned = module.plan(flags, make_mesh(devices=jax.devices()[:1]))

    shapes = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in planned.batch.items()} == shapes
    params, carried = parts(planned.model.params_shape_tree)
    rest = () if carried is None else (carried,)
    program = str(jax.make_jaxpr(planned.loss_fn)(params, planned.batch, jax.random.key(0), *rest))
    assert operations(program) == operations(run.of("program"))
    # With so little memory nothing is compiled, but all of it laid out.
    found = planned.measure(flags, planned.model.mesh if recipe != "electra" else planned.model.generator.mesh, limit=1)
    assert found.parameters == sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    assert found.optimizer >= 2 * found.parameters
    assert (found.peak, found.carried > 0) == (None, carried is not None)
    # Without a tokenizer the shapes are the same, but that types of tokens are there wherever a model has two.
    bare = module.plan(dataclasses.replace(flags, tokenizer_name=None), make_mesh(devices=jax.devices()[:1]))
    found = {name: (leaf.shape, leaf.dtype) for name, leaf in bare.batch.items()}
    assert {"token_type_ids": None, **found} == {"token_type_ids": found.get("token_type_ids"), **shapes}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_entry_is_of_a_flag(recipe):
    assert (cases("train", recipe) | NUMBERS).keys() == flags_of(("train", recipe))


def test_every_recipe_is_here():
    assert {name[1] for name in COMMANDS if name[0] in ("train", "eval")} == set(RECIPES)
