"""mBART and all its heads."""

import numpy as np
import pytest

from battery.family import config_of, model_class
from battery.seq2seq import Seq2SeqNumbers
from distaff.core.errors import ConfigError


class TestMBart(Seq2SeqNumbers):
    family = "mbart"
    prefix = "model."
    base, lm, headed = "model", "lm", "classification"
    language_models = ("lm", "lm_odd")

    def test_norms_of_bart_are_refused(self):
        case = self.cases[self.lm]
        with pytest.raises(ConfigError, match="add_final_layer_norm"):
            model_class(case)(config_of(case, add_final_layer_norm=False), _do_init=False)

    def test_rows_start_with_their_language(self, store):
        case = self.cases[self.lm]
        labels = np.array([[4, 5, 2, 30], [6, 2, 31, -100]])
        model = store.model(case)
        assert model.decoder_start_token_id is None
        found = model.prepare_decoder_input_ids_from_labels(labels)
        np.testing.assert_array_equal(found, [[30, 4, 5, 2], [31, 6, 2, 31]])
        fixed = model_class(case)(config_of(case, decoder_start_token_id=33), _do_init=False)
        # As in PyTorch, where the start of generation is no start of labels.
        np.testing.assert_array_equal(fixed.prepare_decoder_input_ids_from_labels(labels), found)
