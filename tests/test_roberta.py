"""RoBERTa, XLM-RoBERTa and all their heads."""

import numpy as np
import pytest

from battery import Battery
from battery.family import CLOSE


class TestRoberta(Battery):
    family = "roberta"
    base, masked_lm, classifier = "model", "masked_lm", "classification"
    left_padding_is_free = True
    refused = (
        {"hidden_act": "no_such_activation"},
        {"position_embedding_type": "relative_key_query"},
        {"add_cross_attention": True},
    )

    @pytest.mark.parametrize("name", ["model", "model_pad_zero"])
    def test_positions_follow_the_padding_id(self, name, store):
        """Positions count from the padding id + 1, and padding keeps the padding id."""
        case = self.cases[name]
        model, pad = store.model(case), case.config["pad_token_id"]
        inputs = case.runs["padded_pair"].inputs
        explicit = np.array([[1, 2, 3, 4, 0, 0], [1, 2, 3, 0, 0, 0]]) + pad
        found = model(**inputs).last_hidden_state
        np.testing.assert_array_equal(found, model(**inputs, position_ids=explicit).last_hidden_state)
        for row, length in enumerate((4, 3)):
            alone = model(inputs["input_ids"][row : row + 1, :length]).last_hidden_state[0]
            np.testing.assert_allclose(found[row, :length], alone, rtol=0, atol=CLOSE)

    def test_causal_model_does_not_look_ahead(self, store):
        case = self.cases["causal_lm"]
        model, ids = store.model(case), case.runs["mixed"].inputs["input_ids"][:1].copy()
        before = model(ids).logits
        ids[0, 5] = 9
        np.testing.assert_allclose(before[0, :5], model(ids).logits[0, :5], rtol=0, atol=CLOSE)
