"""Images of every mode, labelled images from folders, files and the Hub, and their batches."""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from distaff.core.errors import DataError, DistaffError, UsageError
from distaff.data.batches import Batches
from distaff.data.hub_images import load_hub_images
from distaff.data.image import Augment, ImageCollate, Preprocess, crop_box
from distaff.data.image_modes import decode
from distaff.data.image_sets import Columns, label_names, load_images, split_images
from distaff.hub import new_image_processor, open_image_processor

RED, BLUE = (200, 30, 40), (10, 20, 240)


def stored(image, **options):
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def pixels(data, channels=3):
    return np.asarray(decode(data, channels=channels, name="x"))


def plain(color, size=(5, 3), mode="RGB"):
    return Image.new(mode, size, color)


# Modes (case T86).


def palette_image():
    image = plain(RED).quantize(4)
    image.putpixel((0, 0), 1)
    return stored(image, transparency=image.getpixel((1, 1)))


def grey_of_16_bits():
    return stored(Image.fromarray(np.full((3, 5), 51400, np.uint16)))


def turned():
    image = plain(RED, (5, 3))
    image.putpixel((0, 0), BLUE)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the left
    return stored(image, exif=exif)


def animated():
    return stored(plain(RED), format="GIF", save_all=True, append_images=[plain(BLUE)])


MODES = {
    "L": (stored(plain(77, mode="L")), 77),
    "LA": (stored(plain((77, 128), mode="LA")), 255 - (255 - 77) * 128 / 255),
    "RGB": (stored(plain(RED)), RED),
    "RGBA": (stored(plain((*RED, 51), mode="RGBA")), tuple(255 - (255 - each) / 5 for each in RED)),
    "P": (stored(plain(RED).quantize(4)), RED),
    "P with transparency": (palette_image(), (255, 255, 255)),
    "L with transparency": (stored(plain(77, mode="L"), transparency=77), 255),
    "1 bit": (stored(plain(1, mode="1")), 255),
    "16 bits": (grey_of_16_bits(), 200),
    "32 bits": (stored(Image.fromarray(np.full((3, 5), 51400, np.int32)), format="TIFF"), 200),
    "floats to 1": (stored(Image.fromarray(np.full((3, 5), 0.5, np.float32)), format="TIFF"), 128),
    "floats to 255": (stored(Image.fromarray(np.full((3, 5), 128.4, np.float32)), format="TIFF"), 128),
    "CMYK": (stored(plain((0, 255, 255, 0), mode="CMYK"), format="TIFF"), (255, 0, 0)),
    "JPEG CMYK": (stored(plain((0, 255, 255, 0), mode="CMYK"), format="JPEG"), (254, 0, 0)),
    "YCbCr": (stored(plain(RED), format="JPEG", quality=100), RED),
    "animated": (animated(), RED),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_three_channels(name):
    data, color = MODES[name]
    values = pixels(data)
    assert values.shape == (3, 5, 3)
    assert values.dtype == np.uint8
    assert np.abs(values[1:, 1:].astype(float) - color).max() <= 2


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_one_channel(name):
    data, color = MODES[name]
    grey = np.dot(np.broadcast_to(color, 3), (0.299, 0.587, 0.114))
    values = pixels(data, channels=1)
    assert values.shape == (3, 5)
    assert np.abs(values[1:, 1:].astype(float) - grey).max() <= 2


def test_the_rotation_of_a_camera_is_applied():
    values = pixels(turned())
    assert values.shape == (5, 3, 3)
    assert tuple(values[0, 2]) == BLUE
    assert tuple(values[0, 0]) == RED


@pytest.mark.parametrize("size", [(1, 1), (5000, 10)])
@pytest.mark.parametrize("name", ["16 bits", "RGBA"])
def test_pixels_are_floats_of_the_models_size(size, name):
    """1 x 1, 5000 x 10: white stays the largest number, and nothing runs over."""
    color, mode = {"16 bits": (65535, "I;16"), "RGBA": ((255, 255, 255, 255), "RGBA")}[name]
    preprocess = Preprocess(new_image_processor(height=8, width=6, channels=3), channels=3)
    found = preprocess([decode(stored(plain(color, size, mode)), channels=3, name="x")])
    assert found.shape == (1, 3, 8, 6)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no image at all", "no format that PIL knows"),
        (b"", "no format that PIL knows"),
        (stored(plain(RED, (60, 60)))[:90], "truncated"),
        (stored(Image.fromarray(np.array([[0.0, 900.0]], np.float32)), format="TIFF"), "0 to 900"),
        (stored(Image.fromarray(np.array([[0, 70000]], np.int32)), format="TIFF"), "0 to 70000"),
        (np.zeros((2, 3, 3, 3), np.uint8), "[height, width]"),
        (np.zeros((2, 3, 3), np.int64), "int64"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data, words):
    with pytest.raises(DataError) as caught:
        decode(data, channels=3, name="folder/file.png")
    assert words in str(caught.value)
    assert "folder/file.png" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.real_data
def test_real_files_of_many_kinds(shared_data):
    folder = shared_data / "images" / "awkward"
    for line in (folder / "MANIFEST.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["loads"]:
            assert pixels(folder / row["file"]).std() > 20  # a photograph, and neither black nor white
        else:
            with pytest.raises(DataError, match=row["file"]):
                decode(folder / row["file"], channels=3, name=row["file"])


# Sets.


def write_images(folder, names, *, size=(6, 6)):
    """A file of its own colour for each name."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plain((number, 7, 250 - number), size).save(path)


def table(dataset):
    """The file name and the label of each row."""
    return [(row["image"]["path"].rpartition("/")[2], row["label"]) for row in dataset]


def test_class_folders(tmp_path, caplog):
    write_images(tmp_path, ["b/1.png", "b/deep/0.jpg", "a/x.PNG", "c/y.webp"])
    (tmp_path / "a" / "notes.txt").write_text("not an image, and says so")
    (tmp_path / "a" / ".DS_Store").write_text("hidden")
    (tmp_path / ".cache").mkdir()
    dataset, names = load_images(tmp_path)
    assert names == ["a", "b", "c"]
    assert table(dataset) == [("x.PNG", 0), ("1.png", 1), ("0.jpg", 1), ("y.webp", 2)]
    assert "notes.txt" in caplog.text
    assert ".DS_Store" not in caplog.text
    assert load_images(tmp_path, names=["c", "b", "a"])[0]["label"][:] == [2, 1, 1, 0]


def test_labels_that_are_numbers_stand_in_their_order():
    assert label_names(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert label_names(["10", "9", "x"]) == ["10", "9", "x"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_files_of_paths(tmp_path, suffix):
    write_images(tmp_path, ["some/0.png", "some/1.png", "2.png"])
    rows = [("some/0.png", 3), ("some/1.png", 12), (str(tmp_path / "2.png"), 3)]
    path = tmp_path / f"list{suffix}"
    if suffix == ".csv":
        path.write_text("class,path\n" + "".join(f"{label},{name}\n" for name, label in rows))
    else:
        records = [{"path": name, "class": label} for name, label in rows]
        lines = "\n".join(json.dumps(record) for record in records)
        path.write_text(json.dumps(records) if suffix == ".json" else lines)
    dataset, names = load_images(str(path))
    assert names == ["3", "12"]
    assert table(dataset) == [("0.png", 0), ("1.png", 1), ("2.png", 0)]


def test_columns_by_name(tmp_path):
    write_images(tmp_path, ["0.png", "1.png"])
    (tmp_path / "list.csv").write_text("label,kind,where,path\nx,a,0.png,1.png\n")
    dataset, names = load_images(str(tmp_path / "list.csv"), columns=Columns("where", "kind"))
    assert (names, table(dataset)) == (["a"], [("0.png", 0)])
    with pytest.raises(DataError, match=r"list\.csv, line 1: no column 'nope'.*--label_column_name"):
        load_images(str(tmp_path / "list.csv"), columns=Columns("where", "nope"))


def test_images_without_labels(tmp_path):
    write_images(tmp_path, ["1.png", "deep/0.png"])
    (tmp_path / "list.csv").write_text("path\n1.png\ndeep/0.png\n")
    for source in (tmp_path, str(tmp_path / "list.csv")):
        dataset, _ = load_images(source, names=["a"], columns=Columns(labelled=False))
        assert table(dataset) == [("1.png", -1), ("0.png", -1)]


def fake(folder):
    (folder / "a" / "fake.png").write_text("a text")


def empty_class(folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "notes.txt").write_text("x")


def outside(folder):
    plain(RED).save(folder / "lost.png")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fake, ["1 of 3 files", "a/fake.png", "no format that PIL knows"]),
        (lambda folder: (folder / "a" / "none.png").write_bytes(b""), ["a/none.png", "0 bytes"]),
        (empty_class, ["/empty'", "holds no image"]),
        (outside, ["lost.png", "no class's folder"]),
        (lambda folder: (folder / "a" / "gone.png").symlink_to(folder / "nowhere"), ["gone.png", "No such file"]),
    ],
)
def test_folders_that_are_refused(tmp_path, change, words):
    write_images(tmp_path, ["a/1.png", "b/2.png"])
    change(tmp_path)
    with pytest.raises(DataError) as caught:
        load_images(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_other_folders_that_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no folders"):
        load_images(tmp_path)
    write_images(tmp_path, ["train/a/1.png", "validation/a/2.png"])
    with pytest.raises(DataError, match=r"train, validation, which are no classes.*/train'"):
        load_images(tmp_path)
    with pytest.raises(DataError, match=r"2\.png.*label 'a' is none of the model's 2: b, c"):
        load_images(tmp_path / "validation", names=["b", "c"])
    with pytest.raises(DataError, match="There is no file"):
        load_images(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label\n0.png,a\n9.png,a\n", ["9.png", "No such file", "list.csv, line 3"]),
        ("path,label\n0.png,a\n0.png,\n", ["list.csv, line 3", "no label"]),
        ("path,label\n0.png,a\n,a\n", ["list.csv, line 3", "must be a path"]),
        ("path,label\nhttps://x.org/0.png,a\n", ["list.csv, line 2", "download"]),
        ("path,label\n0.png,d\n", ["list.csv, line 2", "'d' is none of the model's 2: a, b"]),
        ("path,kind\n0.png,d\n", ["list.csv, line 1", "--label_column_name"]),
        ("path,label\nlist.csv,a\n", ["list.csv", "no format that PIL knows"]),
        ("path,label\n", ["names no image"]),
    ],
)
def test_files_that_are_refused(tmp_path, text, words):
    write_images(tmp_path, ["0.png"])
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        load_images(str(tmp_path / "list.csv"), names=["a", "b"])
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_sets_of_the_hub(tmp_path):
    rows = [stored(plain(color)) for color in (RED, BLUE)]
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["z", "a", "m"])})
    values = {"img": [{"bytes": row, "path": None} for row in rows], "fine_label": [2, 0]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(tmp_path / "set")
    dataset, names = load_hub_images(str(tmp_path / "set"))
    assert names == ["z", "a", "m"]
    assert dataset["label"][:] == [2, 0]
    assert dataset[1]["image"]["bytes"] == rows[1]
    assert "row 1" in dataset[1]["place"]
    with pytest.raises(DataError, match="row 0: the label 'm' is none of the model's 1: z"):
        load_hub_images(str(tmp_path / "set"), names=["z"])
    with pytest.raises(DataError, match="holds ClassLabel"):
        load_hub_images(str(tmp_path / "set"), columns=Columns(image="fine_label"))
    batch = make_batches(dataset, 2)(0)
    assert batch["labels"].tolist() == [2, 0]


def test_a_split_takes_of_every_class(tmp_path):
    write_images(tmp_path, [f"{label}/{number}.png" for label in "abc" for number in range(10)] + ["d/0.png"])
    train, validation = split_images(load_images(tmp_path)[0], percentage=20)
    assert sorted(validation["label"][:]) == [0, 0, 1, 1, 2, 2]
    assert sorted(table(train) + table(validation)) == sorted(table(load_images(tmp_path)[0]))
    assert table(split_images(load_images(tmp_path)[0], percentage=20)[1]) == table(validation)
    (tmp_path / "one").mkdir()
    write_images(tmp_path / "one", ["a/0.png", "b/0.png"])
    with pytest.raises(DataError, match="one a class"):
        split_images(load_images(tmp_path / "one")[0], percentage=20)


# Batches.


def make_batches(dataset, batch_size, *, augment=None, seed=0, threads=1, shuffle=False, size=(4, 4), **process):
    preprocess = Preprocess(new_image_processor(height=size[0], width=size[1], channels=3), channels=3)
    collate = ImageCollate(augment, seed, preprocess.mark, preprocess, threads)
    return Batches(dataset, collate=collate, batch_size=batch_size, seed=seed, shuffle=shuffle, **process)


@pytest.fixture
def noise(tmp_path):
    """Seven images of random pixels."""
    rng = np.random.default_rng(0)
    for number in range(7):
        path = tmp_path / "noise" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3)).astype(np.uint8)).save(path)
    return load_images(tmp_path / "noise")[0]


ALL = Augment(least_area=0.2, flip=True, mixup_alpha=0.0)


def rows_of(batches, epochs=1):
    """The pixels by (epoch, row number)."""
    found = {}
    for step in range(epochs * batches.steps_per_epoch):
        numbers, weights = batches.indices(step)
        for number, weight, image in zip(numbers, weights, batches(step)["pixel_values"]):
            if weight:
                found[step // batches.steps_per_epoch, int(number)] = image
    return found


def test_what_is_drawn_for_a_row_depends_on_seed_and_epoch_alone(noise):
    one = rows_of(make_batches(noise, 1, augment=ALL, shuffle=True), epochs=2)
    many = rows_of(make_batches(noise, 3, augment=ALL, shuffle=True, threads=3), epochs=2)
    assert one.keys() == many.keys()
    assert len(one) == 14
    for key, image in one.items():
        np.testing.assert_array_equal(image, many[key])
    assert all(not np.array_equal(one[0, row], one[1, row]) for row in range(7))
    other = rows_of(make_batches(noise, 3, augment=ALL, shuffle=True, seed=1))
    assert all(not np.array_equal(one[0, row], other[0, row]) for row in range(7))


def test_two_processes_share_a_batch(noise):
    whole = make_batches(noise, 4, augment=ALL, shuffle=True)(1)
    parts = [
        make_batches(noise, 4, augment=ALL, shuffle=True, process_index=index, process_count=2)(1) for index in (0, 1)
    ]
    for name, values in whole.items():
        real = whole["weights"] > 0
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts])[real], values[real])


def test_evaluation_is_what_the_processor_makes(noise):
    batches = make_batches(noise, 3)
    processor = new_image_processor(height=4, width=4, channels=3)
    for (_, row), image in rows_of(batches).items():
        with Image.open(noise[row]["image"]["path"]) as source:
            wanted = processor(images=source, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(image, wanted)
    last = batches(2)
    assert last["weights"].tolist() == [1, 0, 0]
    assert last["labels"].dtype == np.int32


def test_crops_are_parts_of_the_image_and_of_the_area_asked_for():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(200):
        left, top, right, bottom = crop_box((40, 30), rng.random(40), 0.3)
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 30
        assert 0.7 < (right - left) / (bottom - top) < 1.4
        areas.append((right - left) * (bottom - top) / 1200)
    assert 0.28 < min(areas) < 0.35
    assert max(areas) > 0.9


@pytest.mark.parametrize("size", [(600, 3), (3, 600), (1, 1)])
def test_images_without_room_for_a_crop_give_their_middle(size):
    left, top, right, bottom = crop_box(size, np.full(40, 0.999), 0.08)
    assert abs((left + right) - size[0]) <= 1
    assert abs((top + bottom) - size[1]) <= 1
    assert min(right - left, bottom - top) == min(size)


def test_a_flip_exchanges_left_and_right_of_half_of_the_images(noise):
    still = rows_of(make_batches(noise, 7))
    flips = []
    for seed in range(6):
        found = rows_of(make_batches(noise, 7, augment=Augment(flip=True), shuffle=True, seed=seed))
        for row in range(7):
            flipped = np.array_equal(found[0, row], still[0, row][:, :, ::-1])
            assert flipped or np.array_equal(found[0, row], still[0, row])
            flips.append(flipped)
    assert 0.25 < np.mean(flips) < 0.75


def test_mixup_mixes_an_image_with_the_next_real_one(noise):
    plain_rows = rows_of(make_batches(noise, 4, shuffle=True))
    batches = make_batches(noise, 4, augment=Augment(mixup_alpha=0.4), shuffle=True)
    labels, shares = noise["label"][:], []
    for step in range(2):
        numbers, _ = batches.indices(step)
        batch, real = batches(step), (4, 3)[step]
        for place in range(real):
            own, other = int(numbers[place]), int(numbers[(place + 1) % real])
            share = float(batch["shares"][place])
            wanted = share * plain_rows[0, own] + (1 - share) * plain_rows[0, other]
            np.testing.assert_allclose(batch["pixel_values"][place], wanted, atol=1e-5)
            assert (batch["labels"][place], batch["other_labels"][place]) == (labels[own], labels[other])
            shares.append(share)
    assert 0 <= min(shares) < 0.5 < max(shares) <= 1


def test_the_identity_says_what_batches_are_made_of(noise):
    base = make_batches(noise, 2, augment=ALL).identity()
    json.dumps(base)
    for changed in (
        make_batches(noise, 2, augment=Augment(flip=True)),
        make_batches(noise, 2, augment=ALL, size=(5, 5)),
        make_batches(noise.select(range(6)), 2, augment=ALL),
    ):
        assert changed.identity() != base
    assert make_batches(noise, 2, augment=ALL, threads=2).identity() == base


def test_a_file_that_is_damaged_inside_is_named_when_its_batch_is_made(noise, tmp_path):
    path = tmp_path / "noise" / "1" / "3.png"
    path.write_bytes(path.read_bytes()[:200])
    assert load_images(tmp_path / "noise")  # its beginning is that of an image
    batches = make_batches(noise, 1)
    with pytest.raises(DataError, match=r"1/3\.png.*truncated"):
        rows_of(batches)


# Processors.


def test_processor_files(tmp_path):
    with pytest.raises(DistaffError, match=r"preprocessor_config\.json.*image_processor_name"):
        open_image_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(DistaffError, match="does not open"):
        open_image_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    with pytest.raises(DistaffError, match="does not open") as caught:
        open_image_processor(tmp_path)
    assert len(str(caught.value)) < 400
    saved = {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875, "size": {"shortest_edge": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved))
    processor = open_image_processor(tmp_path)
    assert type(processor).__name__ == "ConvNextImageProcessorPil"
    assert Preprocess(processor, channels=3).size == (16, 16)


def test_a_processor_of_many_sizes_is_refused(tmp_path):
    saved = {"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="--image_size"):
        Preprocess(open_image_processor(tmp_path), channels=3)


@pytest.mark.parametrize(
    "saved",
    [
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 6}},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 8}, "crop_pct": 0.5},
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 9},
            "crop_size": {"height": 6, "width": 8},
        },
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 8},
        {"do_resize": True, "size": 8},  # as google/vit-base-patch16-224 has it
    ],
)
def test_what_was_cropped_is_scaled_and_nothing_else(saved, tmp_path):
    """After a random crop of the right size, the processor's own resizing and cropping are left out."""
    scale = {"image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.25, 1.0]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**saved, **scale}))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    preprocess = Preprocess(open_image_processor(tmp_path), channels=3)
    height, width = preprocess.size
    assert 6 <= height <= 8
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)
    found = preprocess([Image.fromarray(values)] * 2, resized=True)
    wanted = (values / 255 - scale["image_mean"]) / scale["image_std"]
    np.testing.assert_allclose(found, np.stack([wanted.transpose(2, 0, 1)] * 2), atol=1e-6)
