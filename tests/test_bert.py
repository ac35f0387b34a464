"""BERT and all its heads."""

from battery import Battery


class TestBert(Battery):
    family = "bert"
    base, masked_lm, classifier = "model", "masked_lm", "classification"
    refused = (
        {"hidden_act": "no_such_activation"},
        {"position_embedding_type": "relative_key"},
        {"add_cross_attention": True},
        {"num_attention_heads": 5},
    )
