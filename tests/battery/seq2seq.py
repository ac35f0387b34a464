"""The checks that every family of encoder-decoders passes, against golden values of PyTorch.

A family's test file names what it has and inherits the rest:

    class TestBart(Seq2SeqBattery):  # of seq2seq_usage.py, which adds the checks of use
        family = "bart"
        base, lm, headed = "model", "lm", "classification"
        language_models = ("lm", "lm_odd")
"""

import json
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import distaff
from battery.family import (
    CLOSE,
    TOLERANCE,
    assert_trees_equal,
    flat_outputs,
    loss_and_gradients,
    model_class,
    tensor_inputs,
)
from battery.files import FileChecks
from distaff.core.errors import CheckpointError
from distaff.core.mesh import make_mesh
from distaff.core.tree import flatten, unflatten
from distaff.hub import open_checkpoint
from golden import cases as golden

AUTO = {
    "Model": "FlaxAutoModel",
    "ForConditionalGeneration": "FlaxAutoModelForSeq2SeqLM",
    "ForSequenceClassification": "FlaxAutoModelForSequenceClassification",
    "ForQuestionAnswering": "FlaxAutoModelForQuestionAnswering",
}
STACKS = "encoder_hidden_states", "decoder_hidden_states", "hidden_states"


def assert_parity(case: golden.Case, model: Any) -> None:
    """Fail unless `model` answers every run of `case` as PyTorch did."""
    compared = 0
    for name, run in case.runs.items():
        if not run.outputs:
            continue
        found = flat_outputs(
            model(
                **tensor_inputs(run),
                output_hidden_states=any(key.startswith(STACKS) for key in run.outputs),
                output_attentions=any("attentions" in key for key in run.outputs),
            )
        )
        for key, expected in run.outputs.items():
            message = f"{case.id}, run {name}, {key}"
            assert found[key].shape == expected.shape, message
            atol = CLOSE if key.endswith("hidden_states/0") else TOLERANCE
            np.testing.assert_allclose(found[key], expected, rtol=0, atol=atol, err_msg=message)
            compared += 1
    assert compared


def in_steps(model: Any, inputs: dict[str, np.ndarray], steps: tuple[int, ...], slots: int = 9) -> np.ndarray:
    """Return the logits of a cached decoding of so many tokens at a time."""
    encoded = model.encode(inputs["input_ids"], inputs["attention_mask"])
    ids, given = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
    mask = np.concatenate([given, np.ones((len(given), slots - given.shape[1]), given.dtype)], axis=1)
    cache = model.init_cache(len(ids), slots, encoded)
    logits, start = [], 0
    for step in steps:
        outputs = model.decode(
            ids[:, start : start + step],
            encoded if start == 0 else None,
            inputs["attention_mask"],
            mask,
            past_key_values=cache,
        )
        cache, start = outputs.past_key_values, start + step
        assert int(cache.filled) == start
        logits.append(np.asarray(outputs.logits))
    return np.concatenate(logits, axis=1)


class Seq2SeqFiles(FileChecks):
    """Files: what is written is what PyTorch and old Flax wrote."""

    #: Cases of language models that are decoded with a cache.
    language_models: ClassVar[tuple[str, ...]] = ()
    #: Of the base's keys inside a head.
    prefix: ClassVar[str] = ""

    def test_values_equal_pytorch(self, case, store):
        assert_parity(case, store.model(case))

    def test_written_keys_and_values_are_those_of_pytorch(self, case, store, keep):
        folder = keep / case.id / "safetensors"
        store.model(case).save_pretrained(folder)
        written = open_checkpoint(folder)
        shared = next(name for name in case.keys if name.endswith("shared.weight"))
        # Where the head is untied, Transformers ties no embeddings either: each place has its copy.
        copies = {name for name in written if name.endswith("embed_tokens.weight")}
        assert bool(copies) == (case.name.endswith("tie_broken") and self.family != "t5")
        assert {name: tuple(written[name].shape) for name in written if name not in copies} == case.keys
        for name in {*case.keys, *copies} - set(case.dead):
            source = shared if name in copies else name
            np.testing.assert_array_equal(written[name], golden.tensor(source, case.keys[source]), err_msg=name)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [case.class_name]
        # What loads a head that is not tied may say so.
        free = {"transformers_version", *(["tie_word_embeddings"] if case.name.endswith("tie_broken") else [])}
        # PyTorch's class has two labels whatever the config says, and says so in what it saves.
        free |= {"id2label", "label2id"} if case.name == "question_answering" else set()
        assert {**case.config, **dict.fromkeys(free)} == {**config, **dict.fromkeys(free)}

    def test_msgpack_of_old_flax(self, old_folder, tmp_path):
        """A real file of the old classes loads, answers as PyTorch, and is written again name for name."""
        case = self.cases[old_folder.name.removeprefix(f"{self.family}-")]
        model = model_class(case).from_pretrained(old_folder)
        assert not model.loading_report.new
        assert not model.loading_report.unused
        assert_parity(case, model)
        model.save_pretrained(tmp_path, save_format="msgpack")
        theirs, ours = open_checkpoint(old_folder), open_checkpoint(tmp_path)
        assert set(ours) == set(theirs)
        for path in theirs:
            np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)

    def test_auto_class_finds_the_class(self, case, store):
        head = next(head for head in ("EncoderModel", *AUTO) if case.class_name.endswith(head))
        if head in AUTO:
            model = getattr(distaff, AUTO[head]).from_pretrained(store.folder(case), _do_init=False)[0]
            assert type(model) is model_class(case)

    def test_base_into_head_and_back(self, store, tmp_path):
        """The base's tensors arrive, and exactly the head's are new or left over."""
        base, head = self.cases[self.base], self.cases[self.lm]
        loaded = model_class(head).from_pretrained(store.folder(base))
        prefix = self.prefix
        new = {name for name in head.keys if name.removeprefix(prefix) not in base.keys}
        assert set(loaded.loading_report.new) == new
        loaded.save_pretrained(tmp_path)
        written = open_checkpoint(tmp_path)
        for name, shape in base.keys.items():
            np.testing.assert_array_equal(written[f"{prefix}{name}"], golden.tensor(name, shape))
        back = model_class(base).from_pretrained(store.folder(head))
        assert set(back.loading_report.unused) == new
        assert not back.loading_report.new

    def test_copies_of_the_embeddings_are_read_and_must_agree(self, store, tmp_path):
        """Files of Transformers 4 hold the word embeddings three times, some not under the name "shared"."""
        case = self.cases[self.lm]
        shared = next(name for name in case.keys if name.endswith("shared.weight"))
        copies = [shared.replace("shared", f"{side}.embed_tokens") for side in ("encoder", "decoder")]

        def load(name, change):
            return model_class(case).from_pretrained(golden.write(case, tmp_path / name, change=change))

        plain = store.model(case).params
        assert_trees_equal(
            load("thrice", lambda state: {**state, **dict.fromkeys(copies, state[shared])}).params, plain
        )
        renamed = load("renamed", lambda state: {copies[0] if key == shared else key: state[key] for key in state})
        assert_trees_equal(renamed.params, plain)
        with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight .*differ"):
            load("unlike", lambda state: {**state, copies[0]: state[shared] + 1})


class Seq2SeqNumbers(Seq2SeqFiles):
    """Numbers: the routes that must give the same as the plain one."""

    def gradient_case(self) -> tuple[golden.Case, golden.Run]:
        case = self.cases[self.lm]
        return case, case.runs["gradient"]

    def test_cached_equals_uncached(self, store):
        """One token at a time, and then several at once."""
        for name in self.language_models:
            case = self.cases[name]
            model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
            real = inputs["decoder_attention_mask"].astype(bool)
            found, expected = in_steps(model, inputs, (1, 1, 1, 3)), np.asarray(model(**inputs).logits)
            np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=CLOSE, err_msg=name)

    def test_cache_with_scan_and_remat(self, store):
        case = self.cases[self.lm]
        inputs = tensor_inputs(case.runs["mixed"])
        real = inputs["decoder_attention_mask"].astype(bool)
        expected = np.asarray(store.model(case)(**inputs).logits)
        model = store.model(case, scan_layers=True, gradient_checkpointing=True)
        np.testing.assert_allclose(in_steps(model, inputs, (4, 2))[real], expected[real], rtol=0, atol=CLOSE)

    def test_halves_equal_the_whole(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        whole = model(**inputs, output_hidden_states=True, output_attentions=True)
        options: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
        encoded = model.encode(inputs["input_ids"], inputs["attention_mask"], **options)
        decoded = model.decode(
            inputs["decoder_input_ids"],
            encoded,
            inputs["attention_mask"],
            inputs["decoder_attention_mask"],
            **options,
        )
        pairs = [(whole.logits, decoded.logits), (whole.encoder_last_hidden_state, encoded.last_hidden_state)]
        for name, half in (("hidden_states", "decoder_hidden_states"), ("attentions", "decoder_attentions")):
            pairs += zip(getattr(whole, half), getattr(decoded, name), strict=True)
        pairs += zip(whole.cross_attentions, decoded.cross_attentions, strict=True)
        pairs += zip(whole.encoder_hidden_states, encoded.hidden_states, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE)

    def test_padding_changes_nothing(self, store):
        """Real tokens of a padded row get what they get alone."""
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        padded = np.asarray(model(**inputs).logits)
        for row in (0, 1):
            real, target = (inputs[name][row].astype(bool) for name in ("attention_mask", "decoder_attention_mask"))
            alone = model(
                inputs["input_ids"][row : row + 1, real],
                decoder_input_ids=inputs["decoder_input_ids"][row : row + 1, target],
            ).logits
            np.testing.assert_allclose(padded[row][target], alone[0], rtol=0, atol=CLOSE, err_msg=f"row {row}")

    def test_the_decoder_does_not_look_ahead(self, store):
        case = self.cases[self.lm]
        model, inputs = store.model(case), tensor_inputs(case.runs["mixed"])
        before, ids = np.asarray(model(**inputs).logits), inputs["decoder_input_ids"].copy()
        ids[0, 4] = 9 if ids[0, 4] != 9 else 8
        after = np.asarray(model(**{**inputs, "decoder_input_ids": ids}).logits)
        np.testing.assert_allclose(before[0, :4], after[0, :4], rtol=0, atol=CLOSE)
        assert np.abs(before[0, 4:] - after[0, 4:]).max() > 1e-3

    def test_remat_changes_nothing(self, store):
        case, run = self.gradient_case()
        self.assert_same_gradients(store.model(case), store.model(case, gradient_checkpointing=True), run)

    def test_scan_equals_the_loop(self, store, tmp_path):
        case, run = self.gradient_case()
        plain, scan = store.model(case), store.model(case, scan_layers=True)
        assert len(flatten(scan.params)) < len(flatten(plain.params))
        loss, gradients = loss_and_gradients(plain, run)
        scan_loss, scan_gradients = loss_and_gradients(scan, run)
        np.testing.assert_allclose(loss, scan_loss, rtol=0, atol=CLOSE)
        plain.save_pretrained(tmp_path / "plain", params=gradients)
        scan.save_pretrained(tmp_path / "scan", params=scan_gradients)
        one, other = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "scan")
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=CLOSE, err_msg=name)

    def test_eight_devices_change_nothing(self, store):
        case, run = self.gradient_case()
        sharded = model_class(case).from_pretrained(store.folder(case), mesh=make_mesh(data=2, fsdp=2, tensor=2))
        leaves = flatten(sharded.params)
        assert all(len(leaf.sharding.device_set) == 8 for leaf in leaves.values())
        split = {path for path, leaf in leaves.items() if leaf.addressable_shards[0].data.shape != leaf.shape}
        assert {path for path in leaves if path.endswith("kernel")} <= split
        self.assert_same_gradients(store.model(case), sharded, run)

    def assert_same_gradients(self, one, other, run):
        loss, gradients = loss_and_gradients(one, run)
        other_loss, other_gradients = loss_and_gradients(other, run)
        np.testing.assert_allclose(loss, other_loss, rtol=0, atol=CLOSE)
        assert_trees_equal(gradients, other_gradients, atol=CLOSE)

    def test_bfloat16_is_near(self, store):
        case = self.cases[self.lm]
        inputs = tensor_inputs(case.runs["gradient"])
        wide = np.asarray(store.model(case)(**inputs).logits)
        narrow = store.model(case, dtype=jnp.bfloat16)(**inputs).logits
        assert narrow.dtype == jnp.bfloat16
        real = inputs["decoder_attention_mask"].astype(bool)
        difference = np.abs(np.asarray(narrow, np.float32) - wide)[real]
        assert difference.mean() < 0.05 * wide[real].std()

    def test_each_weight_is_noticed(self, store):
        """One number of each tensor of the base model, changed by 0.05."""
        case = self.cases[self.base]
        model, flat = store.model(case), flatten(store.model(case).params)
        run = golden.Case(case.family, case.name, case.class_name, case.config, {}, runs={"mixed": case.runs["mixed"]})
        unnoticed = []
        try:
            for path, leaf in flat.items():
                # A column of a table, of which every row has its share, but the one that is added to scores.
                whole = path.endswith("embedding") and "relative" not in path
                changed = leaf.at[:, 0].add(0.05) if whole else leaf.at[(0,) * leaf.ndim].add(0.05)
                model.params = unflatten({**flat, path: changed})
                try:
                    assert_parity(run, model)
                except AssertionError:
                    continue
                unnoticed.append(path)
        finally:
            model.params = unflatten(flat)
        # A change of all keys' bias is invisible to a softmax.
        assert all(path.endswith("key/bias") for path in unnoticed), unnoticed
