"""A vocabulary of another size: entries kept, new ones made, tied and untied heads and biases with it."""

import jax
import numpy as np
import pytest

from battery.causal import continued
from battery.family import model_class
from distaff.core.errors import DataError, UsageError
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten
from golden import cases as golden

CASES = {
    "bert": ("masked_lm", "masked_lm_untied", "classification"),
    "gpt2": ("causal_lm", "causal_lm_untied", "model"),
    "opt": ("causal_lm_post",),
}
IDS = [(family, name) for family, names in CASES.items() for name in names]


def load(family, name, folder, **options):
    case = golden.read(family)[name]
    return case, model_class(case).from_pretrained(golden.write(case, folder), **options)


def answer(model, ids):
    outputs = model(ids)
    return np.asarray(outputs[0])


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(("family", "name"), IDS)
def test_rows_are_kept_and_new_ones_made(family, name, scan_layers, tmp_path):
    case, model = load(family, name, tmp_path / "a", scan_layers=scan_layers)
    ids = np.asarray(case.runs["mixed"].inputs["input_ids"])
    before, old, config = answer(model, ids), flatten(model.params), model.config
    params = model.resize_token_embeddings(70)
    new = flatten(model.params)
    assert model.config.vocab_size == 70
    assert config.vocab_size == 64  # the caller's config is the caller's
    changed = {path for path in old if old[path].shape != new[path].shape}
    # Embeddings, and where there are some a head of its own and its bias.
    heads = {"masked_lm": 1, "masked_lm_untied": 2, "causal_lm_untied": 1}.get(name, 0)
    assert len(changed) == 1 + heads
    for path, leaf in old.items():
        kept = np.asarray(new[path])[tuple(slice(size) for size in leaf.shape)]
        np.testing.assert_array_equal(kept, leaf, err_msg=path)
    words = next(np.asarray(new[path]) for path in changed if path.endswith("embedding"))
    deviation = 0.02
    assert 0.5 * deviation < words[64:].std() < 2 * deviation
    np.testing.assert_array_equal(flatten(params)[min(changed)], new[min(changed)])
    after = answer(model, ids)
    np.testing.assert_allclose(after[..., : before.shape[-1]], before, rtol=0, atol=1e-5)
    assert after.shape[-1] == (70 if before.shape[-1] == 64 else before.shape[-1])
    assert np.isfinite(answer(model, np.full((1, 3), 69, np.int32))).all()


def test_resized_models_are_saved_and_loaded(tmp_path):
    _, model = load("gpt2", "causal_lm", tmp_path / "a")
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path / "b")
    again = type(model).from_pretrained(tmp_path / "b")
    assert again.config.vocab_size == 70
    np.testing.assert_array_equal(again.params["transformer"]["wte"]["embedding"][64:], np.asarray(words(model))[64:])


def words(model):
    return model.params["transformer"]["wte"]["embedding"]


def test_smaller_seeded_and_sharded(tmp_path):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    _, model = load("gpt2", "causal_lm", tmp_path / "a", mesh=mesh)
    first = np.asarray(words(model))
    model.resize_token_embeddings(70, seed=1)
    assert len(words(model).sharding.device_set) == 8
    one = np.asarray(words(model))[64:]
    model.resize_token_embeddings(32)
    np.testing.assert_array_equal(words(model), first[:32])
    model.resize_token_embeddings(64)
    model.resize_token_embeddings(70, seed=2)
    assert not np.array_equal(np.asarray(words(model))[64:], one)


def test_parameters_that_are_passed(tmp_path):
    """A model made for its shapes alone holds none afterwards either."""
    case = golden.read("gpt2")["causal_lm"]
    model, params = model_class(case).from_pretrained(golden.write(case, tmp_path), _do_init=False)
    resized = model.resize_token_embeddings(70, params)
    ids = np.array([[69, 3]], np.int32)
    assert model(ids, params=resized).logits.shape == (1, 2, 70)
    with pytest.raises(UsageError, match="_do_init"):
        _ = model.params


def test_impossible_sizes_are_refused(tmp_path):
    _, model = load("gpt2", "causal_lm", tmp_path)
    with pytest.raises(UsageError, match="0 entries"):
        model.resize_token_embeddings(0)


def test_pad_token_beyond_the_vocabulary(tmp_path):
    """A tokenizer of 65 entries, a model of 64: refused with the remedy, and after it as if padded with a known token."""
    case, model = load("gpt2", "causal_lm", tmp_path)
    run = case.runs["greedy"]
    mask = run.inputs["attention_mask"]
    ids = np.where(mask == 1, run.inputs["input_ids"], 64).astype(np.int32)
    with pytest.raises(DataError, match=r"64.*eos_token.*resize_token_embeddings"):
        model(ids, attention_mask=mask)
    # The new entry is made small, so that no logit of it wins.
    model.resize_token_embeddings(65)
    found = continued(model, ids, mask, 10, say_positions=True)
    np.testing.assert_array_equal(found[:, ids.shape[1] :], run.outputs["sequences"][:, ids.shape[1] :])


PADDED = [("bert", "masked_lm"), ("bert", "masked_lm_untied"), ("gpt2", "causal_lm"), ("gpt2", "causal_lm_untied")]
PADDED += [("t5", "tiny_lm"), ("t5", "tiny_lm_v11_tie_broken"), ("bart", "tiny_lm")]


@pytest.mark.parametrize(("family", "name"), PADDED)
def test_padding_is_invisible(family, name, tmp_path):
    """Rows up to a multiple of 16 for 61 entries: the same answers, losses and files as without them."""
    _, model = load(family, name, tmp_path / "a")
    _, padded = load(family, name, tmp_path / "b")
    model.resize_token_embeddings(61)
    padded.resize_token_embeddings(61, pad_to_multiple_of=16)
    table = {path: leaf for path, leaf in padded._table.items() if "vocab" in leaf.axes}
    assert all(64 in flatten(padded.params)[path].shape for path in table)
    assert padded.config.vocab_size == 61
    ids = np.array([[5, 60, 7, 8]], np.int32)
    inputs = (ids, np.ones_like(ids), ids) if padded.config.is_encoder_decoder else (ids,)
    found = padded(*inputs).logits
    assert found.shape[-1] == 61
    np.testing.assert_array_equal(found, model(*inputs).logits)
    with pytest.raises(DataError, match="vocab_size is 61"):
        padded(*(ids + 3 for ids in inputs))
    gradients = jax.grad(lambda params: padded(*inputs, params=params).logits.sum())(padded.params)
    for path, leaf in table.items():
        rows = np.moveaxis(np.asarray(flatten(gradients)[path]), leaf.axes.index("vocab"), 0)
        assert not rows[61:].any(), path
    for each, folder in ((model, "plain"), (padded, "cut")):
        each.save_pretrained(tmp_path / folder)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name


def test_padding_comes_and_goes(tmp_path):
    _, model = load("gpt2", "causal_lm", tmp_path / "a", mesh=make_mesh(data=4, tensor=2))
    first = np.asarray(words(model))
    model.resize_token_embeddings(61)
    assert words(model).shape[0] == 62  # 61 rows do not divide
    assert words(model).sharding.spec[0] == "tensor"
    np.testing.assert_array_equal(words(model)[:61], first[:61])
    prompt = np.array([[5, 6, 7]], np.int32)
    longer = model.generate(prompt, max_new_tokens=5, eos_token_id=60).sequences
    _, model = load("gpt2", "causal_lm", tmp_path / "a")
    model.resize_token_embeddings(61, pad_to_multiple_of=8)
    assert words(model).shape[0] == 64
    np.testing.assert_array_equal(model.generate(prompt, max_new_tokens=5, eos_token_id=60).sequences, longer)
    model.resize_token_embeddings(61)
    assert words(model).shape[0] == 61
    np.testing.assert_array_equal(model.generate(prompt, max_new_tokens=5, eos_token_id=60).sequences, longer)
    with pytest.raises(UsageError, match="pad_to_multiple_of is 0"):
        model.resize_token_embeddings(61, pad_to_multiple_of=0)
