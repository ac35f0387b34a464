"""Images whose colour is their class, and runs of the recipe on them."""

import csv

import numpy as np
from PIL import Image

from distaff.cli import main

COLORS = {"blue": (20, 40, 220), "green": (30, 200, 60), "red": (220, 40, 30)}
VIT = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,patch_size=4"
RESNET = "embedding_size=4,hidden_sizes=[8],depths=[1],layer_type=basic"


def write_images(folder, count, *, seed=0, names=tuple(COLORS)):
    """`count` images in turn of each class, of several sizes."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        name = names[number % len(names)]
        path = folder / name / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(8, 14, 2)
        noise = rng.integers(-20, 21, (height, width, 3))
        Image.fromarray(np.clip(noise + COLORS[name], 0, 255).astype(np.uint8)).save(path)
    return folder


def make_corpus(folder):
    """Write training, validation and test images."""
    for name, count, seed in (("train", 40, 0), ("validation", 11, 1), ("test", 10, 2)):
        write_images(folder / name, count, seed=seed)
    return folder


def train(corpus, output, *flags, kind="vit", steps=3):
    shape = {"vit": VIT, "resnet": RESNET}[kind]
    words = ("--output_dir", output, "--model_type", kind, "--config_overrides", shape, "--image_size", 8)
    words += ("--train_dir", corpus / "train", "--max_steps", steps, "--learning_rate", "2e-2", "--report_to", "none")
    return run("train", *words, "--validation_dir", corpus / "validation", "--per_device_train_batch_size", 8, *flags)


def evaluate(corpus, model, *flags):
    return run("eval", "--model_name_or_path", model, "--validation_dir", corpus / "validation", *flags)


def run(command, *flags):
    return main([command, "image-classification", *map(str, flags)])


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
