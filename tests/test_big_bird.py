"""BigBird and all its heads; the battery's rows are short, so that attention is full there, and sparse below."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import BigBirdConfig

import distaff
from battery import Battery
from battery.family import (
    CLOSE,
    assert_trees_equal,
    config_of,
    flat_outputs,
    loss_and_gradients,
    model_class,
    tensor_inputs,
)
from distaff.core.errors import ConfigError, DataError, UsageError
from distaff.models._block_sparse import draw_blocks, least_sparse, legal_blocks
from golden import cases as golden

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class TestBigBird(Battery):
    family = "big_bird"
    base, masked_lm, classifier = "model", "masked_lm", "classification"
    refused = (
        {"hidden_act": "no_such_activation"},
        {"attention_type": "no_such_attention"},
        {"is_decoder": True},
        {"block_size": 0},
        {"num_random_blocks": -1},
    )

    def long_inputs(self) -> dict[str, np.ndarray]:
        return tensor_inputs(self.cases["masked_lm_sparse"].runs["ragged"])

    def test_ragged_rows_equal_rows_padded_by_hand(self, store):
        """37 tokens in blocks of 4 give what 40 tokens with 3 masked ones give, cut back everywhere."""
        model, inputs = store.model(self.cases["model_sparse"]), self.long_inputs()
        by_hand = {name: np.pad(value, ((0, 0), (0, 3))) for name, value in inputs.items()}
        options = {"output_hidden_states": True, "output_attentions": True}
        found, padded = flat_outputs(model(**inputs, **options)), flat_outputs(model(**by_hand, **options))
        for name, value in found.items():
            cut = padded[name]
            if name.startswith("attentions"):
                assert value.shape == (3, 4, 37, 37)
                cut = cut[:, :, :37, :37]
            elif name != "pooler_output":
                assert value.shape == (3, 37, 32)
                cut = cut[:, :37]
            np.testing.assert_allclose(value, cut, rtol=0, atol=CLOSE, err_msg=name)
        # Without a mask, the padding inside is not attended to either.
        ids = inputs["input_ids"][:1]
        alone = model(ids).last_hidden_state
        masked = model(np.pad(ids, ((0, 0), (0, 3))), attention_mask=np.arange(40)[None] < 37).last_hidden_state
        np.testing.assert_allclose(alone, masked[:, :37], rtol=0, atol=CLOSE)

    def test_limit_of_full_attention(self, store):
        """Up to the limit PyTorch attends in full: its 36 tokens here, two blocks more than any that is sparse."""
        case = self.cases["model_sparse"]
        assert least_sparse(4, 2) == 36
        model, full = (
            store.model(case),
            model_class(case).from_pretrained(store.folder(case), attention_type="original_full"),
        )
        for length, same in ((36, True), (37, False)):
            ids = np.random.default_rng(0).integers(6, 64, (1, length))
            found, wanted = model(ids).last_hidden_state, full(ids).last_hidden_state
            difference = float(np.abs(found - wanted).max())
            assert difference < CLOSE if same else difference > 1e-3

    def test_random_blocks_follow_the_key(self):
        """Without dropout: other keys give other blocks, and no key is traced into the program."""
        case = self.cases["model_sparse"]
        config = config_of(case, **QUIET, initializer_range=0.2)
        model = model_class(case)(config)
        ids = np.random.default_rng(0).integers(6, 64, (1, 64))
        keys = jax.random.key(0), jax.random.key(1)
        one, other, again = (
            np.asarray(model(ids, dropout_rng=key, train=True).last_hidden_state) for key in (*keys, keys[0])
        )
        np.testing.assert_array_equal(one, again)
        assert np.abs(one - other).max() > 1e-3
        evaluated = [np.asarray(model(ids, dropout_rng=key).last_hidden_state) for key in (None, *keys)]
        for each in evaluated[1:]:
            np.testing.assert_array_equal(evaluated[0], each)
        assert np.abs(one - evaluated[0]).max() > 1e-3
        # One program for training, and one for evaluation with and one without a key.
        assert model._jitted._cache_size() == 3

    def test_each_layer_draws_its_own_blocks(self, store):
        for scan in (False, True):
            model = store.model(self.cases["model_sparse"], scan_layers=scan)
            ids = np.random.default_rng(0).integers(6, 64, (1, 64))
            outputs = model(ids, dropout_rng=jax.random.key(0), train=True, output_attentions=True)
            first, second = (np.asarray(weights) > 0 for weights in outputs.attentions)
            assert not np.array_equal(first, second)
            # Two random blocks a head and inner block, beside global and neighbouring ones.
            row = first[0, :, 5 * 4].reshape(4, 16, 4).all(-1)  # [heads, key blocks]
            assert (row.sum(1) == 5 + 2).all()
            np.testing.assert_allclose(outputs.attentions[0].sum(-1), np.ones((1, 4, 64)), rtol=0, atol=CLOSE)

    @pytest.mark.parametrize(("blocks", "size", "count"), [(10, 4, 2), (16, 64, 3), (64, 64, 3), (12, 1, 3)])
    def test_drawn_blocks_are_legal(self, blocks, size, count):
        """Different ones, none that is attended to anyway, from the beginning of the row as PyTorch draws them."""
        drawn = np.asarray(draw_blocks(jax.random.key(3), blocks, size, num_random=count, num_heads=50))
        assert drawn.shape == (50, blocks - 2, count)
        reach = 1024 // size if blocks * size in (1024, 4096) else 5 + 2 * count
        rows = np.arange(1, blocks - 1)[None, :, None]
        assert (np.abs(drawn - rows) > 1).all()
        assert ((drawn > 0) & (drawn < min(reach, blocks - 1))).all()
        assert all(len(set(each)) == count for each in drawn.reshape(-1, count))
        for row, legal in enumerate(legal_blocks(blocks, size, count)):  # each of them is drawn by some head
            assert set(np.flatnonzero(legal)) == set(drawn[:, row].ravel())

    @pytest.mark.parametrize("options", [{"scan_layers": True}, {"gradient_checkpointing": True}], ids=str)
    def test_sparse_routes_agree(self, options, store):
        """Scan and remat draw the same blocks twice, and change nothing."""
        case, inputs = self.cases["masked_lm_sparse"], self.long_inputs()
        labels = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
        run = golden.Run({**inputs, "labels": labels}, {})
        plain, other = store.model(case), store.model(case, **options)
        train = {} if "scan_layers" in options else {"train": True, "dropout_rng": jax.random.key(0)}
        loss, gradients = loss_and_gradients(plain, run, **train)
        other_loss, other_gradients = loss_and_gradients(other, run, **train)
        np.testing.assert_allclose(loss, other_loss, rtol=0, atol=CLOSE)
        if "scan_layers" not in options:
            assert_trees_equal(gradients, other_gradients, atol=CLOSE)
        else:
            layers = other_gradients["bert"]["encoder"]["stacked"]
            for index in range(2):
                one = jax.tree.map(lambda leaf, index=index: leaf[index], layers)
                assert_trees_equal(gradients["bert"]["encoder"][str(index)], one, atol=CLOSE)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_sparse_is_finite_in_narrow_dtypes(self, dtype, store):
        case, inputs = self.cases["masked_lm_sparse"], self.long_inputs()
        inputs["attention_mask"] = inputs["attention_mask"] * np.array([[1], [0], [1]])
        model = store.model(case, dtype=dtype)
        found = np.asarray(model(**inputs).logits, np.float32)
        assert np.isfinite(found).all()
        wide = np.asarray(store.model(case)(**inputs).logits)
        assert np.abs(found - wide)[[0, 2]].max() / np.abs(wide).max() < 5e-2

    def test_memory_grows_linearly_with_length(self):
        """Temporary bytes of a forward and backward pass double with the length; full attention's grow fourfold."""
        fields = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        fields |= {"intermediate_size": 32, "max_position_embeddings": 4096, "block_size": 16, "num_random_blocks": 2}

        def bytes_at(length: int, **more) -> int:
            way = "eager" if more else "auto"
            model = distaff.FlaxBigBirdModel(BigBirdConfig(**fields, **more), _do_init=False, attn_implementation=way)

            def loss(params, ids, key):
                return model(ids, params=params, train=True, dropout_rng=key).last_hidden_state.sum()

            ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
            key = jax.eval_shape(lambda: jax.random.key(0))
            lowered = jax.jit(jax.grad(loss)).lower(model.params_shape_tree, ids, key)
            return lowered.compile().memory_analysis().temp_size_in_bytes

        one, two, four = (bytes_at(length) for length in (1024, 2048, 4096))
        print(f"temporary bytes at 1,024, 2,048 and 4,096 tokens: {one:,}, {two:,}, {four:,}")
        # A little more than double where XLA packs larger buffers less tightly; 8,192 tokens take twice those of 4,096.
        assert two < 2.5 * one
        assert four < 2.5 * two
        full = bytes_at(4096, attention_type="original_full")
        print(f"with full attention at 4,096: {full:,}")
        assert full > 8 * four

    def test_question_lengths(self, store):
        """Given or found by the separator, the question is out of the competition, and its first token stays in."""
        case = self.cases["question_answering"]
        model, inputs = store.model(case), tensor_inputs(case.runs["question"])
        found = model(**inputs)
        lengths = np.array([3, 2, 8])  # up to the first separator, which is the last token of the last row
        given = model(**inputs, question_lengths=lengths)
        np.testing.assert_array_equal(found.start_logits, given.start_logits)
        column = model(**inputs, question_lengths=lengths[:, None])
        np.testing.assert_array_equal(found.end_logits, column.end_logits)
        low = np.asarray(given.start_logits) < -1e5
        np.testing.assert_array_equal(low, [[0 < place < length for place in range(8)] for length in lengths])
        with pytest.raises(UsageError, match="question_lengths"):
            store.model(self.cases["model"])(inputs["input_ids"], question_lengths=lengths)

    def test_natural_questions(self, store, tmp_path):
        """Start and end are those of question answering, the categories a dense layer on the pooled first token."""
        case = self.cases["question_answering"]
        shapes = {"cls.weight": (5, 32), "cls.bias": (5,), "bert.pooler.weight": (32, 32), "bert.pooler.bias": (32,)}

        def change(state):
            return {**state, **{name: golden.tensor(name, shape) for name, shape in shapes.items()}}

        folder = golden.write(case, tmp_path, change=change)
        model = distaff.FlaxBigBirdForNaturalQuestions.from_pretrained(folder)
        assert not model.loading_report.new
        assert not model.loading_report.unused
        inputs = tensor_inputs(case.runs["mixed"])
        outputs = model(**inputs, output_hidden_states=True)
        for name in ("start_logits", "end_logits"):
            np.testing.assert_allclose(outputs[name], case.runs["mixed"].outputs[name], rtol=0, atol=1e-4)
        first = np.asarray(outputs.hidden_states[-1])[:, 0]
        pooled = np.tanh(
            first @ golden.tensor("bert.pooler.weight", (32, 32)).T + golden.tensor("bert.pooler.bias", (32,))
        )
        categories = pooled @ golden.tensor("cls.weight", (5, 32)).T + golden.tensor("cls.bias", (5,))
        assert outputs.category_logits.shape == (3, 5)
        np.testing.assert_allclose(outputs.category_logits, categories, rtol=0, atol=CLOSE)

    def test_refused(self, store):
        case = self.cases["model_sparse"]
        model = store.model(case)
        ids = np.full((1, 40), 7, np.int32)
        with pytest.raises(DataError, match="attention_type"):
            model.module.apply({"params": model.params}, ids, attention_mask=np.ones((1, 40, 40), np.int32))
        with pytest.raises(DataError, match="max_position_embeddings"):
            model(np.full((1, 129), 7, np.int32))
        with pytest.raises(ConfigError, match="attention_type"):
            model_class(case).from_pretrained(store.folder(case, attention_type="sliding"))

    def test_longest_row_may_end_within_a_block(self):
        """Positions beyond the table are not asked for by the padding inside."""
        case = self.cases["masked_lm_sparse_odd"]
        model = model_class(case)(config_of(case, max_position_embeddings=40))
        ids = np.random.default_rng(0).integers(6, 64, (1, 40))
        assert np.isfinite(np.asarray(model(ids).logits)).all()
