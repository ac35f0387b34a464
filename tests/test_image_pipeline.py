"""The image-classification pipeline, on a fixed model."""

import io
import json
import sys

import numpy as np
import pytest
import transformers
from PIL import Image

import distaff
from distaff.cli import main
from distaff.core.errors import DataError, DistaffError, UsageError
from distaff.hub import new_image_processor
from distaff.pipelines import pipeline
from golden import image_pipeline_cases as images

LABELS = {0: "cat", 1: "dog", 2: "eel"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT of random weights with its processor."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.ViTConfig(
        **sizes, image_size=8, patch_size=4, initializer_range=0.5, id2label=LABELS, label2id={}
    )
    distaff.FlaxViTForImageClassification(config).save_pretrained(folder)
    new_image_processor(height=8, width=8, channels=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classify(folder):
    return pipeline("image-classification", str(folder), batch_size=2)


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 256, (11, 14, 3)).astype(np.uint8)


def plain(answers):
    return [[(each["label"], round(each["score"], 5)) for each in answer] for answer in answers]


def test_the_answer_is_that_of_processor_and_model(folder, classify, image):
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = distaff.FlaxAutoModelForImageClassification.from_pretrained(folder)
    pixels = processor(images=Image.fromarray(image), return_tensors="np")["pixel_values"]
    logits = np.asarray(model(pixels).logits[0])
    shares = np.exp(logits) / np.exp(logits).sum()
    answer = classify(image)
    assert [each["label"] for each in answer] == [LABELS[index] for index in np.argsort(-shares).tolist()]
    np.testing.assert_allclose([each["score"] for each in answer], np.sort(shares)[::-1], rtol=0, atol=1e-5)
    assert all(type(each["score"]) is float and each.keys() == {"label", "score"} for each in answer)


def test_a_call_may_say_how_many_are_computed_together(classify, image):
    images = [image, image[::-1], image[:, ::-1]]
    assert plain(classify(images, batch_size=3)) == plain(classify(images)) == plain(classify(images, batch_size=1))
    with pytest.raises(UsageError, match="batch_size is 0"):
        classify(image, batch_size=0)


@pytest.mark.parametrize("name", images.NAMES)
def test_answers_equal_those_of_pytorch(name, tmp_path):
    images.write(name, tmp_path)
    classify = pipeline("image-classification", tmp_path, top_k=3)
    stored = json.loads(images.STORED.read_text())["answers"]
    for function in ("softmax", "sigmoid", "none"):
        for number, answer in enumerate(classify(images.pictures(), function_to_apply=function)):
            wanted = stored[f"{name}/{number}/{function}"]
            assert [each["label"] for each in answer] == [each["label"] for each in wanted]
            scores = [[each["score"] for each in each_answer] for each_answer in (answer, wanted)]
            np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)


def test_all_kinds_of_input_are_the_same_image(classify, image, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(image).save(path)
    data = io.BytesIO(path.read_bytes()).getvalue()
    wanted = plain([classify(image)])
    for same in (path, str(path), data, Image.fromarray(image), image / 255.0):
        assert plain([classify(same)]) == wanted
    assert plain(classify([path, image])) == wanted * 2
    assert plain(classify(image[None])) == wanted
    assert plain(classify(image for _ in range(3))) == wanted * 3  # more than a batch
    assert classify([]) == []


def test_an_image_scores_the_same_alone_and_in_a_batch(classify):
    several = np.random.default_rng(1).integers(0, 256, (5, 9, 9, 3)).astype(np.uint8)
    together = classify(several)
    for image, answer in zip(several, together):
        alone = {each["label"]: each["score"] for each in classify(image)}
        assert all(abs(alone[each["label"]] - each["score"]) < 1e-6 for each in answer)


def test_how_scores_are_made(folder, classify, image):
    logits = {each["label"]: each["score"] for each in classify(image, function_to_apply="none")}
    sigmoid = {each["label"]: each["score"] for each in classify(image, function_to_apply="sigmoid")}
    assert all(abs(sigmoid[label] - 1 / (1 + np.exp(-logit))) < 1e-9 for label, logit in logits.items())
    model = distaff.FlaxAutoModelForImageClassification.from_pretrained(folder)
    model.config.problem_type = "multi_label_classification"
    several = pipeline("image-classification", model, image_processor=str(folder))(image)
    assert {each["label"]: each["score"] for each in several} == pytest.approx(sigmoid)
    assert len(classify(image, top_k=2)) == 2


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        (["{folder}/config.json"], {}, "config.json"),
        (["nowhere.png"], {}, "nowhere.png"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 2), np.uint8)], {}, "image 1"),
        ([np.full((4, 4, 3), 7.0)], {}, "0..1"),
        (["https://example.org/a.png"], {}, "download"),
        ([], {"top_k": 0}, "top_k is 0"),
        ([], {"function_to_apply": "relu"}, "softmax, sigmoid, none"),
    ],
)
def test_what_is_refused(folder, classify, inputs, options, words):
    inputs = [each.format(folder=folder) if isinstance(each, str) else each for each in inputs]
    with pytest.raises(DistaffError) as caught:
        classify(inputs, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_task_is_found_from_the_config(folder, classify, image):
    assert plain([pipeline(model=folder)(image)]) == plain([classify(image)])


def test_settings_that_are_refused(folder, tmp_path):
    model = distaff.FlaxAutoModelForImageClassification.from_pretrained(folder)
    for settings, words in (
        ({"model": model}, "image_processor=..."),
        ({"model": folder, "tokenizer": "x"}, "no tokenizer"),
        ({"model": folder, "topk": 2}, "no setting 'topk'"),
        ({"model": folder, "batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            pipeline("image-classification", **settings)
    model.save_pretrained(tmp_path)
    with pytest.raises(DistaffError, match=r"preprocessor_config\.json"):
        pipeline("image-classification", str(tmp_path))
    with pytest.raises(DataError, match="no image that can be read"):
        pipeline("image-classification", folder)(b"no image")


# `distaff predict image-classification`.


def test_the_command_prints_a_line_an_image(folder, classify, image, tmp_path, capsys, monkeypatch):
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for path in paths:
        Image.fromarray(image).save(path)
    assert main(["predict", "image-classification", str(folder), *paths, "--top_k", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == paths
    assert plain([row["labels"] for row in rows]) == plain([classify(image, top_k=2)]) * 3
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(paths)))
    assert main(["predict", "image-classification", str(folder), "--batch_size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = classify(image)[0]
    assert [line.startswith(f"{path}  {best['label']} {best['score']:.3f}") for line, path in zip(lines, paths)] == [
        True
    ] * 3


def test_what_the_command_refuses(folder, image, tmp_path, capsys, monkeypatch):
    """What was answered before a broken file is printed."""
    good = str(tmp_path / "good.png")
    Image.fromarray(image).save(good)
    (tmp_path / "bad.png").write_text("text")
    words = ["predict", "image-classification", str(folder), "--batch_size", "1"]
    assert main([*words, "--images", good, str(tmp_path / "bad.png")]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(good)
    assert "bad.png" in printed.err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) == 2
    assert main([*words, "--top_k", "0"]) == 2
    assert "--top_k is 0" in capsys.readouterr().err


def test_without_pillow_it_is_said_what_to_install(folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("PIL", "distaff.data.image", "distaff.image_pip"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'distaff\[vision\]'"):
        pipeline("image-classification", folder)
