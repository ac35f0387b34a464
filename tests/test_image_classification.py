"""The image-classification recipe with ViT and ResNet."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from PIL import Image

import distaff
from battery.family import assert_trees_equal
from distaff.core.tree import flatten
from distaff.models._outputs import FlaxSequenceClassifierOutput
from distaff.pipelines import pipeline
from distaff.tasks._images import names_of, with_size
from distaff.tasks.image_classification import Classifier
from image_cases import COLORS, VIT, evaluate, make_corpus, rows_of, run, train, write_images
from recipe_cases import as_if_killed, logged, one_line, results

KINDS = ("vit", "resnet")
STILL = ("--random_resized_crop", "False", "--horizontal_flip", "False")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory):
    """A model of each kind that learnt the colours, with predictions for the test images."""
    folder = tmp_path_factory.mktemp("models")
    predicting = ("--do_predict", "--test_dir", corpus / "test")
    for kind in KINDS:
        assert train(corpus, folder / kind, *predicting, *STILL, kind=kind, steps=40) == 0
    return folder


def load(folder):
    return distaff.FlaxAutoModelForImageClassification.from_pretrained(folder)


def head_of(model):
    return flatten(model.params.get("params", model.params))


# The loss.


class Fixed:
    """A module whose logits are its parameters."""

    def apply(self, variables, pixels, *, deterministic, rngs):
        return FlaxSequenceClassifierOutput(variables["params"]["logits"])


def test_the_loss_counts_real_images_smoothed_and_mixed():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels, other, shares = np.array([0, 2, 1, 1]), np.array([2, 1, 0, 0]), np.array([0.9, 0.3, 0.5, 1.0])
    batch = {
        "pixel_values": jnp.zeros((4, 3, 8, 8)),
        "labels": jnp.asarray(labels),
        "weights": jnp.asarray([1.0, 1.0, 1.0, 0.0]),
    }
    rows, params = np.arange(3), {"logits": jnp.asarray(logits)}
    own, others = log_p[rows, labels[:3]], log_p[rows, other[:3]]
    for smoothing in (0.0, 0.2):
        classifier = Classifier(Fixed(), smoothing)
        total, weight = classifier.loss(params, batch, jax.random.key(0))["loss"]
        wanted = -((1 - smoothing) * own + smoothing * log_p[:3].mean(-1)).sum()
        assert (float(total), float(weight)) == (pytest.approx(wanted, rel=1e-5), 3)
        mixed = {**batch, "other_labels": jnp.asarray(other), "shares": jnp.asarray(shares)}
        total, _ = classifier.loss(params, mixed, jax.random.key(0))["loss"]
        both = shares[:3] * own + (1 - shares[:3]) * others
        wanted = -((1 - smoothing) * both + smoothing * log_p[:3].mean(-1)).sum()
        assert float(total) == pytest.approx(wanted, rel=1e-5)
        # What is evaluated is neither smoothed nor mixed.
        assert float(classifier.loss(params, batch, None)["loss"][0]) == pytest.approx(-own.sum(), rel=1e-5)


# Runs.


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_folder_that_opens(models, corpus, kind):
    folder = models / kind
    assert results(folder)["eval_accuracy"] == 1.0
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.id2label == dict(enumerate(COLORS))
    assert config.label2id == {name: number for number, name in enumerate(COLORS)}
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert processor.size.height == processor.size.width == 8
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    predicted = rows_of(folder / "predict_results.csv")
    assert [row["image"] for row in predicted] == [str(path) for path in sorted((corpus / "test").rglob("*.png"))]
    # The folder's own pipeline says the same of the files.
    classify = pipeline("image-classification", folder)
    for row, answer in zip(predicted, classify([row["image"] for row in predicted])):
        assert row["prediction"] == answer[0]["label"] == row["image"].split("/")[-2]
        for each in answer:
            assert abs(float(row[f"probability_{each['label']}"]) - each["score"]) < 1e-6
    assert results(folder, "predict") == {
        "predict_accuracy": 1.0,
        "predict_loss": pytest.approx(results(folder, "predict")["predict_loss"]),
        "predict_samples": 10,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_equals_at_once(corpus, tmp_path, kind):
    """Crops, flips and shares are drawn as in a run at once."""
    flags = ("--save_steps", 2, "--mixup_alpha", 0.3, "--logging_steps", 1, "--eval_steps", 4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(corpus, whole, *flags, kind=kind, steps=7) == 0  # an epoch is five
    as_if_killed(whole, parts, step=4)
    assert train(corpus, parts, *flags, "--resume_from_checkpoint", kind=kind, steps=7) == 0
    assert_trees_equal(load(parts).params, load(whole).params)
    assert logged(parts)[-3:] == logged(whole)[-3:]
    assert results(parts)["eval_loss"] == results(whole)["eval_loss"]


@pytest.fixture(scope="module")
def yes_man(models, tmp_path_factory):
    """A ViT that always says the second of two labels."""
    folder = tmp_path_factory.mktemp("yes")
    model = load(models / "vit")
    config = model.config
    config.id2label = {0: "no", 1: "yes"}
    fixed = distaff.FlaxViTForImageClassification(config)
    flat = head_of(fixed)
    head = {"kernel": jnp.zeros_like(flat["classifier/kernel"]), "bias": jnp.asarray([-1.0, 2.0])}
    fixed.params = {**fixed.params, "classifier": head}
    fixed.save_pretrained(folder)
    shutil.copy(models / "vit" / "preprocessor_config.json", folder)
    return folder


@pytest.mark.parametrize(("label", "accuracy"), [("yes", 1.0), ("no", 0.0)])
def test_images_that_fill_a_batch_do_not_count(yes_man, tmp_path, label, accuracy):
    """Case T87: five images in batches of four times eight, one to eight at a time."""
    rows = "".join(f"{number}.png,{label}\n" for number in range(5))
    for number in range(5):
        Image.new("RGB", (9, 9), (number * 50, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    for size in (1, 4):
        words = ("--model_name_or_path", yes_man, "--validation_file", tmp_path / "list.csv")
        assert run("eval", *words, "--per_device_eval_batch_size", size, "--output_dir", tmp_path / "out") == 0
        assert results(tmp_path / "out")["eval_accuracy"] == accuracy
        wanted = np.log(1 + np.exp(-3.0 if label == "yes" else 3.0))
        assert results(tmp_path / "out")["eval_loss"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_depend_on_neither_batch_nor_devices(models, corpus, tmp_path, run_on, kind):
    found = []
    for devices, size in ((1, 1), (1, 3), (1, 8), (2, 3), (4, 8), (1, 32), (4, 32)):
        run_on(devices)
        assert evaluate(corpus, models / kind, "--per_device_eval_batch_size", size, "--output_dir", tmp_path) == 0
        found.append(results(tmp_path))
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6)
    assert found[0]["eval_accuracy"] == 1.0


# Statistics (case T89).


def test_statistics_are_of_training_alone_and_of_the_global_batch(corpus, tmp_path, run_on, capsys):
    trees = []
    for devices, size in ((1, 8), (2, 4)):
        run_on(devices)
        words = ("--per_device_train_batch_size", size, "--eval_steps", 1, "--max_grad_norm", 0, "--print_placement")
        assert train(corpus, tmp_path / str(devices), *words, kind="resnet") == 0
        trees.append(load(tmp_path / str(devices)).params)
        printed = capsys.readouterr().out
        assert "batch_stats/resnet/stem/norm/mean" in printed
        assert "parameters: 0.0 MB of 0.0 on a device" in printed
    assert_trees_equal(trees[0]["batch_stats"], trees[1]["batch_stats"], atol=1e-4)
    counts = [int(leaf) for path, leaf in flatten(trees[0]["batch_stats"]).items() if path.endswith("count")]
    assert set(counts) == {3}  # steps of training, whatever was evaluated between them
    before = (tmp_path / "1" / "model.safetensors").read_bytes()
    assert evaluate(corpus, tmp_path / "1") == 0
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == before


def test_a_frozen_backbone_keeps_its_parameters_and_follows_its_images(models, corpus, tmp_path):
    words = ("--model_name_or_path", models / "resnet", "--train_dir", corpus / "train", "--max_steps", 2)
    words += ("--freeze", "resnet", "--output_dir", tmp_path, "--do_eval", "False", "--learning_rate", 0.1)
    assert run("train", *words, "--per_device_train_batch_size", 8, "--report_to", "none") == 0
    before, after = load(models / "resnet").params, load(tmp_path).params
    assert_trees_equal(after["params"]["resnet"], before["params"]["resnet"])
    moved = np.abs(np.asarray(after["params"]["classifier"]["bias"] - before["params"]["classifier"]["bias"]))
    assert moved.min() > 0.01
    means = [flatten(tree["batch_stats"])["resnet/stem/norm/mean"] for tree in (before, after)]
    assert np.abs(np.asarray(means[0] - means[1])).max() > 1e-4


# Checkpoints.


def finetune(model, folder, output, *flags):
    words = ("--model_name_or_path", model, "--train_dir", folder, "--output_dir", output, "--max_steps", 1)
    words += ("--do_eval", "False", "--per_device_train_batch_size", 8, "--report_to", "none", "--learning_rate", 1e-9)
    return run("train", *words, *flags)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_other_labels_is_new_where_that_is_asked_for(models, tmp_path, capsys, kind):
    write_images(tmp_path / "images", 8, names=("blue", "red"))
    (tmp_path / "images" / "red").rename(tmp_path / "images" / "crimson")
    assert finetune(models / kind, tmp_path / "images", tmp_path / "out") == 2
    assert "tells 3 labels apart (blue, green, red)" in (line := one_line(capsys))
    assert "--ignore_mismatched_sizes" in line
    assert finetune(models / kind, tmp_path / "images", tmp_path / "out", "--ignore_mismatched_sizes") == 0
    assert load(tmp_path / "out").config.id2label == {0: "blue", 1: "crimson"}
    before, after = (head_of(load(folder)) for folder in (models / kind, tmp_path / "out"))
    assert after["classifier/kernel"].shape[1] == 2
    kept = [path for path in before if not path.startswith("classifier")]
    assert all(np.abs(np.asarray(before[path] - after[path])).max() < 1e-5 for path in kept)


def test_labels_that_the_checkpoint_knows_keep_their_numbers(models, corpus, tmp_path):
    config = transformers.AutoConfig.from_pretrained(models / "vit")
    shutil.copytree(models / "vit", tmp_path / "turned")
    config.id2label = {0: "red", 1: "blue", 2: "green"}
    config.save_pretrained(tmp_path / "turned")
    write_images(tmp_path / "images", 4, names=("blue", "green"))
    assert finetune(tmp_path / "turned", tmp_path / "images", tmp_path / "out") == 0
    assert load(tmp_path / "out").config.id2label == config.id2label
    before, after = (head_of(load(tmp_path / name)) for name in ("turned", "out"))
    np.testing.assert_allclose(before["classifier/kernel"], after["classifier/kernel"], atol=1e-5)


def test_a_head_of_as_many_labels_learns_the_new_ones(models, corpus, tmp_path):
    for name in COLORS:
        shutil.copytree(corpus / "train" / name, tmp_path / "images" / f"dark {name}")
    assert finetune(models / "vit", tmp_path / "images", tmp_path / "out") == 0
    assert list(load(tmp_path / "out").config.id2label.values()) == [f"dark {name}" for name in COLORS]
    before, after = (head_of(load(folder)) for folder in (models / "vit", tmp_path / "out"))
    np.testing.assert_allclose(before["classifier/kernel"], after["classifier/kernel"], atol=1e-5)


def test_labels_of_the_same_name_are_told_apart_by_their_numbers(models, corpus, tmp_path):
    """As the two cranes of ImageNet."""
    config = transformers.AutoConfig.from_pretrained(models / "vit")
    config.id2label = {0: "blue", 1: "red", 2: "red"}
    assert names_of(config) == ["blue", "red (1)", "red (2)"]
    shutil.copytree(models / "vit", tmp_path / "cranes")
    config.save_pretrained(tmp_path / "cranes")
    words = ("--do_eval", "False", "--do_predict", "--test_dir", corpus / "test", "--output_dir", tmp_path / "out")
    assert run("eval", "--model_name_or_path", tmp_path / "cranes", *words) == 0
    row = rows_of(tmp_path / "out" / "predict_results.csv")[0]
    assert sum(float(row[f"probability_{name}"]) for name in names_of(config)) == pytest.approx(1)


def test_a_checkpoint_learns_images_of_another_size(models, corpus, tmp_path):
    assert finetune(models / "vit", corpus / "train", tmp_path / "out", "--image_size", 12) == 0
    model = load(tmp_path / "out")
    assert model.config.image_size == 12
    positions = head_of(model)["vit/embeddings/position_embeddings"]
    assert positions.shape == (1, 1 + 9, 16)
    old = head_of(load(models / "vit"))["vit/embeddings/position_embeddings"]
    np.testing.assert_allclose(positions[:, 0], old[:, 0], atol=1e-5)
    assert len(pipeline("image-classification", tmp_path / "out")(Image.new("RGB", (30, 20)))) == 3


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"size": {"height": 16, "width": 8}}, {"size": {"height": 12, "width": 12}}),
        (
            {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 24, "width": 24}},
            {"size": {"shortest_edge": 16}, "crop_size": {"height": 12, "width": 12}},
        ),
        ({"size": {"shortest_edge": 32}}, {"size": {"shortest_edge": 12}}),
    ],
)
def test_a_processor_for_another_size_keeps_the_rest(saved, wanted):
    processor = with_size(transformers.ViTImageProcessorPil(image_mean=[0.1, 0.2, 0.3], **saved), 12)
    assert tuple(processor.image_mean) == (0.1, 0.2, 0.3)
    for name, size in wanted.items():
        assert {key: value for key, value in dict(getattr(processor, name)).items() if value} == size


def test_grey_and_colour_meet_models_of_the_other_kind(corpus, tmp_path):
    for folder in ("train", "validation"):
        for path in (corpus / folder).rglob("*.png"):
            target = tmp_path / folder / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("L").save(target)
    assert train(tmp_path, tmp_path / "three", steps=1) == 0  # grey images
    assert load(tmp_path / "three").config.num_channels == 3
    one = ("--config_overrides", "embedding_size=4,hidden_sizes=[8],depths=[1],layer_type=basic,num_channels=1")
    assert train(corpus, tmp_path / "one", *one, kind="resnet", steps=1) == 0  # images of three channels
    assert json.loads((tmp_path / "one" / "preprocessor_config.json").read_text())["image_mean"] == [0.5]
    assert evaluate(corpus, tmp_path / "one") == 0


def test_sets_of_one_image(models, tmp_path, capsys):
    write_images(tmp_path / "train", 2)
    write_images(tmp_path / "validation", 1)
    assert train(tmp_path, tmp_path / "out", steps=1) == 0  # one a class
    assert evaluate(tmp_path, models / "vit", "--output_dir", tmp_path / "eval") == 0
    assert results(tmp_path / "eval")["eval_accuracy"] == 1.0
    capsys.readouterr()
    for folder, words in (("train", "cannot be split for validation"), ("validation", "All training images")):
        output = tmp_path / f"without-{folder}"
        named = ("--model_type", "vit", "--train_dir", tmp_path / folder, "--output_dir", output, "--max_steps", 1)
        assert run("train", *named) == 1
        assert words in one_line(capsys)
        assert not list(output.iterdir())


def test_a_split_of_the_training_images_is_evaluated_on(corpus, tmp_path):
    words = ("--model_type", "vit", "--config_overrides", VIT, "--image_size", 8)
    words += ("--train_dir", corpus / "train", "--output_dir", tmp_path, "--max_steps", 1)
    words += ("--report_to", "none")
    assert run("train", *words, "--max_train_samples", 9, "--max_eval_samples", 4) == 0
    assert np.isfinite(results(tmp_path)["eval_loss"])


def test_the_best_step_is_kept(corpus, tmp_path):
    words = ("--load_best_model_at_end", "--metric_for_best_model", "loss", "--eval_steps", 1)
    assert train(corpus, tmp_path, *words, "--early_stopping_patience", 2, kind="resnet", steps=6) == 0
    losses = {row["step"]: row["eval_loss"] for row in logged(tmp_path) if "eval_loss" in row}
    best = min(losses, key=losses.get)
    assert results(tmp_path)["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    assert evaluate(corpus, tmp_path, "--output_dir", tmp_path / "eval") == 0
    assert results(tmp_path / "eval")["eval_loss"] == pytest.approx(losses[best], rel=1e-5)


# What is refused.


def spoil(folder, change):
    shutil.rmtree(folder / "spoilt", ignore_errors=True)
    write_images(folder / "spoilt", 6)
    change(folder / "spoilt")
    return folder / "spoilt"


SPOILT = {
    "a text named .png": (lambda folder: (folder / "red" / "fake.png").write_text("text"), "red/fake.png"),
    "an empty class": (lambda folder: (folder / "yellow").mkdir(), "yellow' holds no image"),
    "an empty file": (lambda folder: (folder / "red" / "none.png").write_bytes(b""), "none.png' (0 bytes)"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_folders_are_refused_before_anything_is_written(corpus, tmp_path, capsys, name):
    change, words = SPOILT[name]
    folder = spoil(tmp_path, change)
    for flags in (("--train_dir", folder), ("--validation_dir", folder)):
        assert train(corpus, tmp_path / "out", *flags) == 1
        assert words in one_line(capsys)
        assert not list((tmp_path / "out").iterdir())


def test_an_unknown_label_in_validation(corpus, tmp_path, capsys):
    folder = spoil(tmp_path, lambda folder: (folder / "red").rename(folder / "yellow"))
    assert train(corpus, tmp_path / "out", "--validation_dir", folder) == 1
    assert "yellow/002.png: the label 'yellow' is none of the model's 3: blue, green, red" in one_line(capsys)


def test_a_file_that_breaks_while_training_loses_nothing(corpus, tmp_path, capsys):
    """The steps before it are saved, and with the file put right the run goes on."""
    shutil.copytree(corpus / "train", tmp_path / "train")
    shutil.copytree(corpus / "validation", tmp_path / "validation")
    broken = tmp_path / "train" / "red" / "038.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:60])
    assert train(tmp_path, tmp_path / "out", steps=5) == 1
    assert "red/038.png' is no image that can be read" in one_line(capsys)
    saved = [int(path.name) for path in (tmp_path / "out" / "checkpoints").iterdir() if path.name.isdigit()]
    assert saved
    broken.write_bytes(whole)
    assert train(tmp_path, tmp_path / "out", "--resume_from_checkpoint", steps=5) == 0
    assert train(tmp_path, tmp_path / "once", steps=5) == 0
    assert_trees_equal(load(tmp_path / "out").params, load(tmp_path / "once").params)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tokenizer_name", "x"), "Images have no tokenizer"),
        (("--train_dir", "nowhere"), "--train_dir 'nowhere' is no folder"),
        (("--train_file", "x.csv"), "give one of them"),
        (("--do_predict",), "--test_dir or --test_file"),
        (("--min_crop_area", "0"), "--min_crop_area is 0.0"),
        (("--mixup_alpha", "-1"), "--mixup_alpha is -1.0"),
        (("--label_smoothing_factor", "1"), "--label_smoothing_factor is 1.0"),
        (("--config_overrides", "num_channels=4"), "images of 4 channels"),
        (("--image_size", "0"), "--image_size is 0"),
        (("--image_size", "3"), "no patch"),
        (
            ("--scan_layers", "--model_type", "resnet", "--config_overrides", "depths=[1],hidden_sizes=[8]"),
            "scan_layers",
        ),
        (("--metric_for_best_model", "f1", "--load_best_model_at_end"), "choose of loss, accuracy"),
        (("--validation_split_percentage", "0", "--validation_dir", ""), "--validation_split_percentage is 0"),
    ],
)
def test_flags_that_are_refused(corpus, tmp_path, capsys, flags, words):
    assert train(corpus, tmp_path / "out", *flags) == 2
    assert words in one_line(capsys)
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_an_evaluation_needs_a_model_and_images(models, corpus, capsys):
    assert run("eval", "--validation_dir", corpus / "validation") == 2
    assert "--model_name_or_path" in one_line(capsys)
    assert run("eval", "--model_name_or_path", models / "vit") == 2
    assert "--validation_dir" in one_line(capsys)
