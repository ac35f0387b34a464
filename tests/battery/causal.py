"""Checks of decoder-only families: the cache, left padding, tokens that are continued, a resized vocabulary."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from battery.family import CLOSE, assert_parity, layers_of, model_class, tensor_inputs
from battery.files import FileChecks
from battery.loading import LoadingChecks
from battery.numbers import NumberChecks
from battery.usage import UsageChecks
from distaff.core.errors import DistaffError
from distaff.hub import open_checkpoint
from golden import cases as golden

# Of every cache here: few shapes compile few programs.
SLOTS = 22


def positions_of(mask: np.ndarray) -> np.ndarray:
    """Return the positions of tokens in rows that are padded on the left."""
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0)


def grown(mask: np.ndarray, count: int) -> np.ndarray:
    """Return the mask `[batch, length]` with `count` more columns of real tokens."""
    return np.concatenate([mask, np.ones((len(mask), count), mask.dtype)], axis=1)


def continued(model: Any, ids: np.ndarray, mask: np.ndarray, count: int, *, say_positions: bool) -> np.ndarray:
    """Return `ids` with `count` more tokens, each the likeliest, by one call for the prompt and one for each token."""
    length, slots = ids.shape[1], grown(mask, SLOTS - mask.shape[1])
    positions, cache = positions_of(slots), model.init_cache(len(ids), SLOTS)
    start, new = 0, ids
    while start < length + count - 1:
        end = start + new.shape[1]
        where = {"position_ids": positions[:, start:end]} if say_positions else {}
        outputs = model(new, attention_mask=slots, past_key_values=cache, **where)
        cache, start = outputs.past_key_values, end
        new = np.asarray(outputs.logits[:, -1:]).argmax(-1).astype(ids.dtype)
        ids = np.concatenate([ids, new], axis=1)
    return ids


class CausalBattery(FileChecks, LoadingChecks, NumberChecks, UsageChecks):
    """Everything for a decoder-only family; `cached` names the cases whose cache is checked, `greedy` those continued."""

    base, lm, headed = "model", "causal_lm", "causal_lm_untied"
    refused = ({"activation_function": "no_such_activation"},)
    cached: ClassVar[tuple[str, ...]]
    greedy: ClassVar[tuple[str, ...]] = ("causal_lm",)
    # Buffers of layer `{}` that old files hold.
    buffers: ClassVar[tuple[str, ...]] = ()
    # PyTorch's name of the word embeddings inside the base model.
    words: ClassVar[str]

    def pytest_generate_tests(self, metafunc):
        super().pytest_generate_tests(metafunc)
        for fixture in ("cached", "greedy"):
            if f"{fixture}_case" in metafunc.fixturenames:
                names = getattr(self, fixture)
                metafunc.parametrize(f"{fixture}_case", [self.cases[name] for name in names], ids=names)

    def placed(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the argument that a batch with left padding needs: nothing where the mask says positions."""
        return {} if self.left_padding_is_free else {"position_ids": positions}

    @pytest.mark.parametrize(
        ("chunks", "scan_layers"),
        [((12, *[1] * 8), False), ((5, 3, 7, 5), True)],
        ids=["one by one", "several at once, scanned"],
    )
    def test_cached_equals_uncached(self, cached_case, chunks, scan_layers, store):
        case, run = cached_case, self.cases[self.lm].runs["greedy"]
        model, rng = store.model(case, scan_layers=scan_layers), np.random.default_rng(0)
        mask = grown(run.inputs["attention_mask"], 8)
        ids = rng.integers(0, case.config["vocab_size"], mask.shape).astype(np.int32)
        positions = positions_of(mask)
        full = model(ids, attention_mask=mask, **self.placed(positions)).logits
        cache, start, found = model.init_cache(3, SLOTS), 0, []
        slots = grown(mask, SLOTS - 20)
        for count in chunks:
            part = slice(start, start + count)
            outputs = model(
                ids[:, part], attention_mask=slots, past_key_values=cache, **self.placed(positions[:, part])
            )
            cache, start = outputs.past_key_values, part.stop
            found.append(np.asarray(outputs.logits))
        assert int(cache.filled) == 20
        real = mask.astype(bool)
        np.testing.assert_allclose(np.concatenate(found, axis=1)[real], full[real], rtol=0, atol=CLOSE)

    def test_more_tokens_after_a_cache(self, cached_case, store):
        """No mask and no positions: tokens are counted on from those in the cache."""
        model, ids = store.model(cached_case), np.array([[5, 9, 7, 30, 12]], np.int32)
        full = np.asarray(model(ids).logits)
        first = model(ids[:, :3], past_key_values=model.init_cache(1, 9))
        second = model(ids[:, 3:], past_key_values=first.past_key_values)
        np.testing.assert_allclose(first.logits, full[:, :3], rtol=0, atol=CLOSE)
        np.testing.assert_allclose(second.logits, full[:, 3:], rtol=0, atol=CLOSE)

    def test_continuations_equal_pytorch_and_single_rows(self, greedy_case, store):
        """Prompts of 3, 7 and 12 ids in one batch, padded on the left."""
        model, run = store.model(greedy_case), greedy_case.runs["greedy"]
        ids, mask, expected = run.inputs["input_ids"], run.inputs["attention_mask"], run.outputs["sequences"]
        count = expected.shape[1] - ids.shape[1]
        together = continued(model, ids, mask, count, say_positions=not self.left_padding_is_free)
        np.testing.assert_array_equal(together, expected)
        for row in range(len(ids)):
            real = mask[row].astype(bool)
            alone = continued(model, ids[row : row + 1, real], mask[row : row + 1, real], count, say_positions=False)
            np.testing.assert_array_equal(alone[0, real.sum() :], expected[row, ids.shape[1] :])

    def test_full_cache_is_refused(self, store):
        model, ids = store.model(self.cases[self.lm]), np.array([[5, 9, 7]], np.int32)
        cache = model(ids, past_key_values=model.init_cache(1, 4)).past_key_values
        with pytest.raises(DistaffError, match="init_cache"):
            model(ids[:, :2], past_key_values=cache)
        with pytest.raises(DistaffError, match="attention_mask"):
            model(ids[:, :1], attention_mask=np.ones((1, 1), np.int32), past_key_values=cache)

    def test_cache_has_the_dtype_of_the_computation(self, store):
        case = self.cases[self.lm]
        model = store.model(case, dtype=jnp.bfloat16)
        ids, cache = case.runs["mixed"].inputs["input_ids"][:1], model.init_cache(1, 8)
        assert {leaf.dtype for leaf in jax.tree.leaves(cache.layers)} == {jnp.dtype(jnp.bfloat16)}
        outputs = model(ids, past_key_values=cache)
        kept, full = (np.asarray(logits, np.float32) for logits in (outputs.logits, model(ids).logits))
        assert np.abs(kept - full).max() < 5e-2 * np.abs(full).max()

    def test_nothing_looks_ahead(self, store):
        model, ids = store.model(self.cases[self.lm]), self.cases[self.lm].runs["mixed"].inputs["input_ids"][:1].copy()
        ids[0, 5] = 8
        before = np.asarray(model(ids).logits)
        ids[0, 5] = 9
        after = np.asarray(model(ids).logits)
        np.testing.assert_allclose(before[0, :5], after[0, :5], rtol=0, atol=CLOSE)
        assert np.abs(before[0, 5:] - after[0, 5:]).max() > 1e-2

    def test_packed_texts_do_not_see_each_other(self, store):
        """Two texts in a row, a mask by query and positions of each: the answers of each alone."""
        model = store.model(self.cases[self.lm])
        ids = np.array([[5, 9, 7, 30, 12, 8, 41, 6]], np.int32)
        segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
        mask = (segments[:, :, None] == segments[:, None]).astype(np.int32)
        positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4]], np.int32)
        packed = model(ids, attention_mask=mask, **self.placed(positions)).logits
        for part in (slice(0, 3), slice(3, 8)):
            np.testing.assert_allclose(packed[:, part], model(ids[:, part]).logits, rtol=0, atol=CLOSE)

    def test_lazy_logits_are_the_logits(self, store):
        model, ids = store.model(self.cases[self.lm]), self.cases[self.lm].runs["mixed"].inputs["input_ids"]
        apply = jax.jit(model.module.apply, static_argnames="lazy_logits")
        projection = apply({"params": model.params}, jnp.asarray(ids), lazy_logits=True).logits
        assert projection.hidden.shape[:2] == ids.shape
        np.testing.assert_allclose(projection.logits(), model(ids).logits, rtol=0, atol=CLOSE)

    def test_names_of_old_files(self, tmp_path):
        """Without the base's prefix, with buffers, and with the second name of a tied tensor."""

        def older(state):
            bare = {name.removeprefix(self.prefix): value for name, value in state.items()}
            layers = range(layers_of(self.cases[self.lm]))
            bare |= {name.format(index): np.ones(1, np.float32) for name in self.buffers for index in layers}
            return bare | {"lm_head.weight": bare[self.words]}

        case = self.cases[self.lm]
        model = model_class(case).from_pretrained(golden.write(case, tmp_path, change=older))
        assert not model.loading_report.new
        assert not model.loading_report.unused
        assert_parity(case, model)
        model.save_pretrained(tmp_path / "again")
        assert set(open_checkpoint(tmp_path / "again")) == set(case.keys)

    def test_outputs_are_objects_and_tuples(self, store):
        case = self.cases[self.base]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs)
        assert list(outputs.keys()) == ["last_hidden_state"]
        np.testing.assert_array_equal(outputs.last_hidden_state, outputs[0])
        plain = model(**inputs, return_dict=False)
        assert isinstance(plain, tuple)
        np.testing.assert_array_equal(plain[0], outputs[0])
        full = model(**inputs, output_hidden_states=True, output_attentions=True)
        layers = layers_of(case)
        assert (len(full.hidden_states), len(full.attentions)) == (layers + 1, layers)
        np.testing.assert_array_equal(full.hidden_states[-1], full.last_hidden_state)
        for weights in full.attentions:
            np.testing.assert_allclose(weights.sum(-1), np.ones(weights.shape[:-1]), rtol=0, atol=CLOSE)
        ids = inputs["input_ids"]
        assert list(model(ids, past_key_values=model.init_cache(3, 8)).keys()) == [
            "last_hidden_state",
            "past_key_values",
        ]

    def test_wrong_inputs_are_refused(self, store):
        case = self.cases[self.lm]
        model, ids = store.model(case), case.runs["mixed"].inputs["input_ids"]
        with pytest.raises(DistaffError, match="float"):
            model(ids.astype(np.float32))
        with pytest.raises(DistaffError, match="input_ids"):
            model(ids[0])
        with pytest.raises(DistaffError, match="positions of the model"):
            model(np.tile(ids, 20))
        with pytest.raises(DistaffError, match="position_ids"):
            model(ids, position_ids=np.full_like(ids, model.longest_input))
        for length in (7, 1):
            with pytest.raises(DistaffError, match="attention_mask"):
                model(ids, attention_mask=np.ones((3, length), np.int32))
