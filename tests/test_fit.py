"""`distaff fit`: the step as shapes, what it needs and sends, the search for less memory, and errors of memory."""

import dataclasses
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from distaff.cli import find_command, main
from distaff.core.errors import UsageError
from distaff.core.mesh import parse_mesh
from distaff.tasks import _flops, _slices, clm, fit, mlm, t5_mlm
from distaff.tasks._levers import Setting, search
from distaff.tasks._report import Answer
from distaff.train import abstract_state, create_state, place_rows
from distaff.train.collectives import Collective, collectives
from distaff.train.exhausted import OutOfMemoryError, exhausted, memory_errors
from distaff.train.footprint import Footprint
from distaff.train.state import planned_state
from distaff.train.step import planned_rows
from recipe_cases import one_line

GIB = 2**30
SHAPE = "n_layer=2,n_embd=16,n_head=8,n_positions=16"


def clm_flags(**flags):
    given = {"model_type": "gpt2", "config_overrides": f"{SHAPE},vocab_size=64", "block_size": 16}
    return clm.ClmFlags(**{**given, "per_device_train_batch_size": 2, **flags})


def measured(mesh, **flags):
    flags, mesh = clm_flags(mesh=mesh, **flags), parse_mesh(mesh, jax.devices())
    planned = clm.plan(flags, mesh)
    return planned, planned.measure(flags, mesh)


# The step as shapes.


def test_a_planned_state_and_batch_are_like_the_real_ones():
    mesh = parse_mesh("fsdp=2", jax.devices()[:2])
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.ones(6)}
    shardings = jax.tree.map(lambda leaf: jax.sharding.NamedSharding(mesh, jax.P("fsdp")), params)
    options = {"mesh": mesh, "shardings": shardings, "carried": {"mean": jnp.zeros(3)}, "averaged": True}
    tx = optax.adamw(1e-3)
    real = abstract_state(create_state(params, tx, **options))
    planned = planned_state(jax.eval_shape(lambda: params), tx, **options)
    assert jax.tree.structure(planned) == jax.tree.structure(real)
    for ours, theirs in zip(jax.tree.leaves(planned), jax.tree.leaves(real)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)

    batch = {"ids": np.zeros((8, 3), np.int64), "weights": np.zeros(8, np.float32)}
    for accumulation in (1, 2):
        placed = place_rows(batch, mesh, accumulation=accumulation)
        for name, leaf in planned_rows(batch, mesh, accumulation=accumulation).items():
            found = placed[name]
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (found.shape, found.dtype, found.sharding)


def test_gradients_accumulate_and_averages_are_kept():
    planned, found = measured("fsdp=8", ema_decay=0.9, gradient_accumulation_steps=2)
    assert planned.rows == 2 * 8 * 2
    assert found.average == found.parameters
    assert found.optimizer == 2 * found.parameters + 8  # and two counts of steps
    assert found.peak > found.held > found.parameters * 4
    assert found.needed == found.peak + 3 * found.batch


def test_an_eighth_of_parameters_and_optimizer_lies_on_each_of_eight_devices():
    flags, mesh = clm_flags(config_overrides=None, mesh="fsdp=8"), parse_mesh("fsdp=8", jax.devices())
    planned = clm.plan(flags, mesh)  # GPT-2 small
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(planned.model.params_shape_tree))
    found = planned.measure(flags, mesh, limit=1)  # with so little nothing is compiled
    assert whole / 8 <= found.parameters <= whole / 8 * 1.05
    assert whole / 4 <= found.optimizer <= whole / 4 * 1.05


# What is sent.


def test_tensor_parallel_steps_send_nothing_that_grows_with_the_vocabulary():
    # One does not divide and is padded.
    small = measured("tensor=8", config_overrides=f"{SHAPE},vocab_size=61")[1].collectives
    large = measured("tensor=8", config_overrides=f"{SHAPE},vocab_size=512")[1].collectives
    assert {each.kind for each in small} == {"all-reduce"}
    assert small == large
    # Each layer twice forwards and twice backwards; the embeddings, the losses, the norm of the gradients.
    assert 2 * 4 <= small[0].count <= 2 * 4 + 10


def test_data_parallel_steps_only_add_gradients_up():
    _, found = measured("data=8")
    assert [each.kind for each in found.collectives] == ["all-reduce"]
    sent = found.collectives[0].bytes
    tables = 2 * 4 * 64 * 16  # the gradients of the table of words, as inputs and as outputs, may be sent apart
    assert found.parameters <= sent <= found.parameters + tables


PROGRAM = """\
HloModule jit_step, entry_computation_layout={()->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %r = f32[] add(%x, %y)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}

%gather_a (p: bf16[4]) -> bf16[32] {
  ROOT %g = bf16[32]{0:T(256)(128)(2,1)S(1)} all-gather(%p), channel_id=9, dimensions={0}, frontend_attributes={chain_id="1"}
}

%gather_b (p: bf16[4]) -> bf16[32] {
  ROOT %g = bf16[32]{0} all-gather(%p), channel_id=9, dimensions={0}, frontend_attributes={chain_id="1"}
}

%all-reduce-scatter.3 (input: f32[64]) -> f32[8] {
  %a = f32[64]{0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %s = f32[8]{0} dynamic-slice(%a, %n), dynamic_slice_sizes={8}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f = bf16[32]{0} fusion(%p), kind=kCustom, calls=%gather_a
  %h = bf16[32]{0} fusion(%p), kind=kCustom, calls=%gather_b
  %s = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3
}

%inner (p: f32[8]) -> f32[8] {
  ROOT %w = f32[8]{0} all-to-all(%p), channel_id=3, dimensions={0}
}

%odd (p: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[] {
  %t = (f32[8]{0}, /*index=1*/bf16[2,3]{1,0}, f32[]) all-reduce(%p, %q, %r), channel_id=2, to_apply=%add
  %b = (s32[], f32[8]) while(%t), condition=%cond, body=%body, metadata={op_name="while"}
  %k = (s32[], f32[8]) while(%t), condition=%odd, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], f32[8]) while(%t), condition=%odd, body=%inner
  %rs = f32[4]{0} reduce-scatter(%p), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %ags = ((f32[2]{0}, f32[3]{0}), (f32[16]{0}, f32[24]{0})) all-gather-start(%p, %q), channel_id=5, dimensions={0}
  %agd = (f32[16]{0}, f32[24]{0}) all-gather-done(%ags)
  %cps = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=6, source_target_pairs={{0,1}}
  %as = ((f32[8]), f32[8], s32[]) async-start(%p), calls=%inner
  %ad = f32[8] async-done(%as), calls=%inner
}
"""


def test_collectives_are_read_from_a_program():
    found = {each.kind: each for each in collectives(PROGRAM)}
    assert found["all-reduce"] == Collective("all-reduce", 1, 48, 48)
    # Five times what the fusions of one chain say twice, and once what was started before.
    assert found["all-gather"] == Collective("all-gather", 6, 5 * 64 + 160, 160)
    assert found["reduce-scatter"] == Collective("reduce-scatter", 6, 5 * 256 + 64, 256)
    assert found["all-to-all"] == Collective("all-to-all", 5, 5 * 32, 32, uncounted=1)
    assert found["collective-permute"] == Collective("collective-permute", 1, 32, 32)
    named = "  %r = f32[2]{0} reduce-scatter(%p), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}"
    assert collectives(f"ENTRY %main (p: f32[8]) -> f32[2] {{\n{named}\n}}\n")[0].bytes == 32


# Operations.


def test_operations_are_counted_as_papers_do():
    overrides = "n_layer=12,n_embd=768,n_head=12,n_positions=1024,vocab_size=50257"
    flags = clm_flags(config_overrides=overrides, block_size=1024, per_device_train_batch_size=8)
    mesh = parse_mesh(None, jax.devices()[:1])
    # GPT-2 small: 12 layers of 12 d^2 and the projection of d by the vocabulary, on each token; 12 L d T beside them.
    weights = 12 * 12 * 768**2 + 768 * 50257
    wanted = 8 * 1024 * (6 * weights + 12 * 12 * 768 * 1024)
    assert _flops.step_flops(clm.plan(flags, mesh)) == pytest.approx(wanted, rel=1e-12)


PRODUCT = re.compile(
    r"dot_general .*?contracting_dims = \[(\d+)\].*? : \(tensor<([\dx]+)x\w+>, .*?\) -> tensor<([\dx]+)x\w+>"
)


@pytest.mark.parametrize("model_type", ["t5", "bert"])
def test_operations_are_the_products_of_the_program(model_type):
    if model_type == "t5":
        shape = "d_model=128,d_kv=32,d_ff=512,num_layers=1,num_decoder_layers=2,num_heads=4,vocab_size=300"
        recipe, flags = t5_mlm, t5_mlm.T5MlmFlags(model_type="t5", config_overrides=shape, max_seq_length=32)
    else:
        shape = "hidden_size=128,num_hidden_layers=2,num_attention_heads=4,intermediate_size=512,vocab_size=300"
        recipe, flags = mlm, mlm.MlmFlags(model_type="bert", config_overrides=shape, max_seq_length=32)
    planned = recipe.plan(flags, parse_mesh(None, jax.devices()[:1]))

    def loss(params, batch):
        return planned.loss_fn(params, batch, jax.random.key(0))["loss"][0]

    text = jax.jit(jax.grad(loss)).lower(planned.model.params_shape_tree, planned.batch).as_text()
    total = 0
    for dimension, left, out in PRODUCT.findall(text):
        inner = int(left.split("x")[int(dimension)])
        total += 2 * inner * math.prod(map(int, out.split("x")))
    assert _flops.step_flops(planned) == pytest.approx(total, rel=0.05)


# The search.


def setting(**changed):
    flags = {
        "gradient_checkpointing": "none",
        "scan_layers": False,
        "mesh": None,
        "moment_dtype": None,
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
    }
    able = frozenset({"gradient_checkpointing", "scan_layers", "moment_dtype"})
    mesh = {"data": 8, "fsdp": 1, "tensor": 1}
    return Setting(**{"flags": flags, "mesh": mesh, "rows": 96, "local": 8, "able": able, **changed})


def tried(setting, enough):
    """What is found, and all that was tried on the way."""
    seen = []

    def fits(changes):
        seen.append(changes)
        return enough(changes)

    return search(setting, fits), seen


LIGHT = {"gradient_checkpointing": "full", "scan_layers": True}


def test_the_cheapest_lever_comes_first():
    found, seen = tried(setting(), lambda changes: True)
    assert found == LIGHT == seen[0]


def test_fewer_rows_at_a_time_keep_the_rows_of_a_step():
    found, seen = tried(setting(), lambda changes: changes.get("per_device_train_batch_size", 12) <= 3)
    assert found == {**LIGHT, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    assert [changes.get("per_device_train_batch_size", 12) for changes in seen] == [12, 1, 6, 3]


def test_then_parameters_are_split_and_moments_halved():
    found, seen = tried(setting(), lambda changes: changes.get("mesh") == "fsdp=-1,tensor=2")
    assert found == {**LIGHT, "mesh": "fsdp=-1,tensor=2", "gradient_accumulation_steps": 2}
    assert [changes.get("mesh") for changes in seen] == [None, None, "fsdp=-1", "fsdp=-1", "fsdp=-1,tensor=2"]
    found, seen = tried(setting(), lambda changes: "moment_dtype" in changes)
    assert found == {**LIGHT, "moment_dtype": "bfloat16"}
    found, seen = tried(setting(), lambda changes: False)
    assert found is None
    assert len({json.dumps(changes, sort_keys=True) for changes in seen}) == len(seen) == 2 * 5 * 2


def test_only_what_model_and_devices_have_is_tried():
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    _, seen = tried(setting(able=frozenset(), mesh=mesh, rows=12), lambda changes: False)
    assert seen == [{}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}]


# The command.


def answer_of(peak, limit=None, **flags):
    found = Footprint(parameters=GIB, optimizer=2 * GIB, average=0, carried=0, batch=0, peak=peak, limit=limit)
    return Answer(
        footprint=found,
        kind="TPU v5 lite",
        mesh={"data": 8, "fsdp": 1, "tensor": 1},
        local=8,
        rows=16,
        tokens={"": 16},
        flops=1e12,
        parameters=2**28,
        able=frozenset({"scan_layers"}),
    )


FIT = ("fit", "clm", "--model_type", "gpt2", "--per_device_train_batch_size", "2")


def test_a_step_is_compiled_in_a_process_of_its_own(tmp_path, capsys):
    config = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--devices", "2", "--device_memory", "0.5", "--image_size", "8", "--per_device_train_batch_size", "2")
    assert main(["fit", "image-classification", "--config_name", str(tmp_path), *words]) == 0
    printed = capsys.readouterr().out
    assert "mesh data=2,fsdp=1,tensor=1" in printed
    assert "a step: 4 rows" in printed
    assert "running statistics" in printed
    assert "fits the 0.50 GiB of a device" in printed
    assert "all-reduce" in printed


def test_what_does_not_fit_is_searched_and_said(monkeypatch, capsys):
    asked = []

    def compiled(recipe, flags, given):
        asked.append(flags)
        return answer_of(8 * GIB) if flags.scan_layers else answer_of(20 * GIB, limit=int(15.75 * GIB))

    monkeypatch.setattr(fit, "compiled", compiled)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert main([*FIT, "--topology", "v5e-8"]) == 1
    printed = capsys.readouterr().out
    assert "peak                               20.00\n  does not fit the 15.75 GiB of a device" in printed
    assert "It fits with --scan_layers\n" in printed
    assert "8.00\n  fits the 15.75 GiB of a device" in printed
    assert len(asked) == 2

    assert main([*FIT, "--topology", "v5e-8", "--no_search"]) == 1
    assert "It fits" not in capsys.readouterr().out
    assert main([*FIT, "--topology", "v5e-8", "--device_memory", "4"]) == 1
    assert "Nothing that was tried fits; with --scan_layers 4.00 GiB are missing" in capsys.readouterr().out


def test_a_bare_config_is_fitted_by_its_pretraining(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 1}))
    seen = []
    monkeypatch.setattr(fit, "compiled", lambda recipe, flags, given: seen.append(flags) or answer_of(GIB))
    assert main(["fit", str(tmp_path), "--devices", "8", "--max_seq_length", "32", "--adafactor"]) == 0
    assert capsys.readouterr().out.startswith("t5-mlm on 8 simulated devices of the CPU")
    assert type(seen[0]).__name__ == "T5MlmFlags"
    assert (seen[0].max_seq_length, seen[0].adafactor, seen[0].config_name) == (32, True, str(tmp_path))
    assert find_command(["fit", "x"])[0] == ("fit",)


def test_the_recipe_of_a_training_is_taken_as_it_is(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: clm\nmodel_type: gpt2\nblock_size: 32\nnum_processes: 2\nfreeze_nothing: 1\n")
    seen = []
    monkeypatch.setattr(fit, "compiled", lambda recipe, flags, given: seen.append(flags) or answer_of(GIB))
    assert main(["fit", "clm", str(recipe), "--devices", "8"]) == 2
    assert "has no flag --freeze_nothing" in one_line(capsys)
    recipe.write_text(recipe.read_text().replace("freeze_nothing: 1\n", ""))
    assert main(["fit", "clm", str(recipe), "--devices", "8", "--block_size", "16"]) == 0
    assert (seen[0].model_type, seen[0].block_size, seen[0].report_to) == ("gpt2", 16, ["none"])
    assert "nobody says how much a device has" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--topology v5e-8, or --devices 8"),
        (("--topology", "v5e-8", "--devices", "8"), "one of both"),
        (("--topology", "v9:2x2"), "name one of v2-8, v3-8"),
        (("--topology", "v5e:2"), "--topology 'v5e:2' is not known"),
        (("--devices", "0"), "--devices is 0"),
        (("--devices", "2", "--device_memory", "0"), "--device_memory is 0"),
        (("--topology", "v5e-8"), "pip install 'distaff[tpu]'"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(monkeypatch, capsys, words, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*FIT, *words]) == 2
    assert said in one_line(capsys)


def test_slices_have_names():
    assert _slices.topology("v5litepod-8") == ("v5e", (2, 4))
    assert _slices.topology("v4:2x2x2") == ("v4", (2, 2, 2))
    assert _slices.memory("v3-8") == int(15.48 * GIB)
    for name in _slices.RENTED:
        _slices.topology(name)
    with pytest.raises(UsageError, match="of v2, v3, v4, v5e"):
        _slices.topology("h100:2x4")


# Too little memory.

# As XLA and its users' reports have them.
MESSAGES = {
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (31.48G) exceeds available HBM (15.75G).": (
        31.48 * GIB,
        15.75 * GIB,
    ),
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm.\n Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:\n    reserved        530.00M": (
        21.95 * GIB,
        15.48 * GIB,
    ),
    "RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. That was not possible. There are 8.97G free, 0B reserved, and 8.97G reservable.": (
        10.51 * GIB,
        8.97 * GIB,
    ),
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 129.50M. That was not possible. There are 78.17M free.; (0x0x0_HBM0)": (
        129.5 * 2**20,
        78.17 * 2**20,
    ),
    "RESOURCE_EXHAUSTED: Error loading program 'jit__multi_slice': Attempting to reserve 6.14G at the bottom of memory. That was not possible.": (
        6.14 * GIB,
        None,
    ),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.\nBufferAssignment OOM Debugging.": (
        4770354232,
        None,
    ),
    "RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0": (6.27 * GIB, None),
    "RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes.": (2**40, None),
    "RESOURCE_EXHAUSTED: something new": (None, None),
}


@pytest.mark.parametrize("text", MESSAGES)
def test_sizes_are_read_from_the_messages_of_xla(text):
    found = exhausted(jax.errors.JaxRuntimeError(text))
    wanted = [None if size is None else round(size) for size in MESSAGES[text]]
    assert [found.asked, found.there] == pytest.approx(wanted)
    assert exhausted(jax.errors.JaxRuntimeError(text.replace("RESOURCE_EXHAUSTED", "INTERNAL"))) is None
    with pytest.raises(OutOfMemoryError, match="A device has no room for a step"), memory_errors("a step"):
        raise jax.errors.JaxRuntimeError(text)


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(OutOfMemoryError, match="were asked for"), memory_errors("a thing"):
        jax.block_until_ready(jnp.zeros((2**24, 2**24), jnp.float32))


def test_a_step_without_room_ends_the_run_in_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.txt").write_text("a b c d\n" * 50)
    words = ("tokenizer", "train", "--train_file", str(tmp_path / "train.txt"), "--vocab_size", "300")
    assert main([*words, "--output_dir", str(tmp_path / "tokens")]) == 0

    def fails(*words, **options):
        def step(state, batch):
            raise jax.errors.JaxRuntimeError(next(iter(MESSAGES)))

        return step

    monkeypatch.setattr("distaff.train.loop.make_train_step", fails)
    capsys.readouterr()
    words = ("--tokenizer_name", str(tmp_path / "tokens"), "--config_overrides", SHAPE, "--block_size", "8")
    files = ("--train_file", str(tmp_path / "train.txt"), "--output_dir", str(tmp_path / "out"), "--do_eval", "False")
    assert main(["train", "clm", "--model_type", "gpt2", *words, *files, "--report_to", "none"]) == 1
    said = one_line(capsys)
    assert "(31.48 GiB were asked for of 15.75 GiB)" in said
    for remedy in ("--gradient_accumulation_steps", "--scan_layers", "--mesh fsdp=-1", "--moment_dtype", "distaff fit"):
        assert remedy in said


def test_answers_survive_json():
    answer = dataclasses.asdict(answer_of(None, limit=GIB))
    answer["footprint"]["collectives"] = [{"kind": "all-reduce", "count": 1, "bytes": 2, "largest": 2, "uncounted": 0}]
    answer["able"] = sorted(answer["able"])
    read = Answer.from_json(json.loads(json.dumps(answer)))
    assert read.footprint.collectives == (Collective("all-reduce", 1, 2, 2),)
    assert not read.fits(None)
    assert read.footprint.needed == 3 * GIB
