"""The Hub: resolving, downloading, pushing with the real client against `hub_server`, and model cards.

huggingface_hub reads its settings when it is imported, so everything that talks to the server runs in a process of its
own with the server's environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distaff.core.errors import CheckpointError, UsageError
from distaff.hub import open_checkpoint, resolve, save_msgpack, save_safetensors, write_card
from hub_server import HubServer

WEIGHTS = {"encoder.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "encoder.bias": np.ones(3, np.float32)}

# Reads calls as lines of JSON and answers each with its result, or with the error and its class, and what was logged.
CLIENT = """
import io, json, logging, sys
from distaff.core.errors import DistaffError
from distaff.hub import push_folder, resolve
log = io.StringIO()
logging.getLogger("distaff").addHandler(logging.StreamHandler(log))
for line in sys.stdin:
    name, args, kwargs = json.loads(line)
    try:
        answer = {"result": str({"push": push_folder, "resolve": resolve}[name](*args, **kwargs))}
    except DistaffError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print("answer", json.dumps(answer | {"log": log.getvalue()}), flush=True)
"""


@pytest.fixture
def call():
    """Call "push" or "resolve" in a process with the given environment, one process for each environment."""
    processes: dict[str, subprocess.Popen] = {}

    def ask(env: dict[str, str], name: str, *args, **kwargs) -> dict:
        key = json.dumps(env, sort_keys=True)
        if key not in processes:
            command = [sys.executable, "-W", "error::DeprecationWarning:distaff", "-c", CLIENT]
            processes[key] = subprocess.Popen(
                command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        process = processes[key]
        process.stdin.write(json.dumps([name, [str(arg) for arg in args], kwargs]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the client ended with code {process.wait()}")

    yield ask
    for process in processes.values():
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture
def server():
    with HubServer() as running:
        yield running


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "my model"
    save_safetensors(folder, WEIGHTS)
    for name in ("config.json", "tokenizer.json", "vocab.txt", "recipe.yaml", "eval_results.json"):
        (folder / name).write_text("{}")
    for name in (
        "runs/events.1",
        "checkpoints/10/state",
        "checkpoints-left-behind/9/state",
        ".env",
        ".model-00001.safetensors.tmp",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    write_card(folder, model_name="m", model_type="bert", metrics={"loss": 1.5}, task="fill-mask")
    return folder


def test_folders_of_sentence_transformers_come_with_the_model(server, call, model, tmp_path):
    env = server.env(tmp_path / "home")
    for name in ("modules.json", "1_Pooling/config.json", "1_Pooling/notes.json", "onnx/config.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    assert "result" in call(env, "push", model, "tester/sentences")
    folder = Path(call(env, "resolve", "tester/sentences")["result"])
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert [path.name for path in folder.glob("*/*")] == ["config.json"]


def test_push_then_download_then_push_again(server, call, model, tmp_path):
    env = server.env(tmp_path / "home")
    assert call(env, "push", model, "tester/m")["result"] == f"{server.url}/tester/m"
    pushed = server.repos["tester/m"].files()
    assert set(pushed) == {
        "README.md", "config.json", "eval_results.json", "model.safetensors", "recipe.yaml", "runs/events.1",
        "tokenizer.json", "vocab.txt",
    }  # fmt: skip
    assert pushed["model.safetensors"].content == (model / "model.safetensors").read_bytes()

    folder = Path(call(env, "resolve", "tester/m")["result"])
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "eval_results.json", "model.safetensors", "tokenizer.json", "vocab.txt",
    }  # fmt: skip
    checkpoint = open_checkpoint(folder)
    assert all(np.array_equal(checkpoint[name], WEIGHTS[name]) for name in WEIGHTS)

    save_safetensors(model, WEIGHTS, max_shard_size=48)
    assert "result" in call(env, "push", model, "tester/m", commit_message="shards")
    weights = {name for name in server.repos["tester/m"].files() if name.startswith("model")}
    assert weights == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    }  # fmt: skip
    checkpoint = open_checkpoint(call(env, "resolve", "tester/m")["result"])
    assert len(checkpoint.files) == 2
    assert all(np.array_equal(checkpoint[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_pushed_repository_can_be_private_and_in_the_users_namespace(server, call, model, tmp_path):
    env = server.env(tmp_path / "home")
    assert call(env, "push", model, "m", private=True)["result"] == f"{server.url}/tester/m"
    assert server.repos["tester/m"].private
    refused = call(server.env(tmp_path / "other", token=None), "resolve", "tester/m")
    assert refused["error"] == "CheckpointError"
    assert "hf auth login" in refused["message"]


def test_push_failures_end_with_the_command_that_tries_again(server, call, model, tmp_path):
    retry = f"distaff push '{model}' tester/m"
    no_token = call(server.env(tmp_path / "home", token=None), "push", model, "tester/m")
    wrong = call(server.env(tmp_path / "home", token="hf_wrong"), "push", model, "tester/m")
    offline = call(server.env(tmp_path / "home", HF_HUB_OFFLINE="1"), "push", model, "tester/m")
    with HubServer() as gone:
        closed = gone.env(tmp_path / "home")
    unreachable = call(closed, "push", model, "tester/m")
    for answer, cause in (
        (no_token, "no token"), (wrong, "not valid"), (offline, "HF_HUB_OFFLINE"), (unreachable, "cannot be reached"),
    ):  # fmt: skip
        assert answer["error"] == "DistaffError"
        assert cause in answer["message"]
        assert answer["message"].endswith(retry)
    assert not server.repos
    bad = call(server.env(tmp_path / "home"), "push", model, "a/b/c")
    assert bad["error"] == "UsageError"
    missing = call(server.env(tmp_path / "home"), "push", tmp_path / "none", "tester/m")
    assert missing["error"] == "UsageError"


def test_only_the_preferred_format_is_fetched(server, call, model, tmp_path):
    save_msgpack(model, {"encoder/kernel": WEIGHTS["encoder.weight"]})
    safetensors, msgpack = ((model / name).read_bytes() for name in ("model.safetensors", "flax_model.msgpack"))
    files = {"config.json": b"{}", "flax_model.msgpack": msgpack, "pytorch_model.bin": b"never read", "notes.md": b"x"}
    server.add("tester/both", files | {"model.safetensors": safetensors})
    server.add("tester/old", {name: files[name] for name in ("config.json", "flax_model.msgpack")})
    server.add("tester/deep", {f"inner/{name}": content for name, content in files.items()} | {"config.json": b"no"})
    server.add("gpt", {"config.json": b"{}"})
    env = server.env(tmp_path / "home", token=None)

    def names(*args, **kwargs):
        return sorted(os.listdir(call(env, "resolve", *args, **kwargs)["result"]))

    assert names("tester/both") == ["config.json", "model.safetensors"]
    assert names("tester/old") == ["config.json", "flax_model.msgpack"]
    assert names("tester/deep", subfolder="inner") == ["config.json", "pytorch_model.bin"]
    assert names("gpt", weights=False) == ["config.json"]
    assert "holds no weights" in call(env, "resolve", "gpt")["message"]
    assert "subfolder" in call(env, "resolve", "tester/both", subfolder="inner")["message"]


def test_the_cache_serves_offline_and_without_a_connection(server, call, model, tmp_path):
    server.add("tester/m", {"config.json": b"{}", "model.safetensors": (model / "model.safetensors").read_bytes()})
    server.add("tester/partial", {"config.json": b"{}", "model.safetensors": b"x"})
    env = server.env(tmp_path / "home")
    first = call(env, "resolve", "tester/m")["result"]
    call(env, "resolve", "tester/partial", weights=False)
    server.requests.clear()
    offline = env | {"HF_HUB_OFFLINE": "1"}
    assert call(offline, "resolve", "tester/m")["result"] == first
    assert call(env, "resolve", "tester/m", local_files_only=True)["result"] == first
    absent = call(offline, "resolve", "tester/absent")
    assert absent["error"] == "CheckpointError"
    assert "in the cache" in absent["message"]
    assert "offline" in absent["message"]
    assert "without its weights" in call(offline, "resolve", "tester/partial")["message"]
    assert not server.requests
    server.__exit__()
    unconnected = env | {"IN_A_NEW_PROCESS": "1"}  # one that has no open connection left
    answer = call(unconnected, "resolve", "tester/m")
    assert answer["result"] == first
    assert "using the cached copy" in answer["log"]
    assert "cannot be reached" in call(unconnected, "resolve", "tester/absent")["message"]


def test_download_refusals(server, call, tmp_path):
    server.add("tester/m", {"config.json": b"{}", "model.safetensors": b"x"})
    server.add("tester/gated", {"config.json": b"{}"}, gated=True)
    env, anonymous = server.env(tmp_path / "home"), server.env(tmp_path / "home", token=None)
    for answer, words in (
        (call(env, "resolve", "tester/none"), ("tester/none", "neither a folder nor a repository", server.url)),
        (call(env, "resolve", "tester/m", revision="v9"), ("tester/m", "v9", "no revision")),
        (call(anonymous, "resolve", "tester/gated"), ("tester/gated", "gated", "hf auth login")),
        (call(env, "resolve", "tester/m", token="hf_wrong"), ("tester/m", "token", "hf auth login")),
    ):
        assert answer["error"] == "CheckpointError"
        assert all(word in answer["message"] for word in words), answer["message"]
    assert call(env, "resolve", "not a name!")["error"] == "UsageError"


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "a/b/c", "~/no-such-folder", "half/missing"])
def test_what_looks_like_a_path_never_reaches_the_network(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half").mkdir()
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    with pytest.raises(CheckpointError, match=f"'{name}' does not exist"):
        resolve(name)


def test_a_folder_resolves_to_itself_or_its_subfolder(tmp_path):
    (tmp_path / "größe x" / "inner").mkdir(parents=True)
    assert resolve(tmp_path / "größe x") == tmp_path / "größe x"
    assert resolve(tmp_path / "größe x", subfolder="inner") == tmp_path / "größe x" / "inner"
    with pytest.raises(CheckpointError, match="no subfolder 'other'"):
        resolve(tmp_path / "größe x", subfolder="other")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")


def card(folder: Path):
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md")


def test_a_card_parses_back(tmp_path):
    log = [{"step": step, "loss": 9.0 / (step + 1)} for step in range(50)]
    write_card(
        tmp_path, model_name="roberta-als", model_type="roberta", task="fill-mask", repo_id="tester/roberta-als",
        base_model="roberta-base", tags=["alemannic"], language=["gsw", "de"], license="apache-2.0",
        datasets=["oscar", "data/train.txt"], metrics={"loss": 2.25, "perplexity": 9.48773583635853, "bad": float("nan")},
        command="distaff train mlm --output_dir x", hyperparameters={"learning_rate": 3e-4, "pattern": "a|b"},
        training_log=log, versions={"jax": "0.10.2"},
    )  # fmt: skip
    written = card(tmp_path)
    data = written.data
    assert (data.base_model, data.pipeline_tag, data.license) == ("roberta-base", "fill-mask", "apache-2.0")
    assert (data.datasets, data.language) == (["oscar"], ["gsw", "de"])
    assert {"distaff", "flax", "jax", "roberta", "alemannic"} <= set(data.tags)
    assert {result.metric_type: result.metric_value for result in data.eval_results} == {
        "loss": 2.25,
        "perplexity": 9.48774,
    }
    assert data.model_name == "roberta-als"
    text = written.text
    assert text.count("| 0 |") == text.count("| 49 |") == 1
    assert 20 <= text.count("\n| ") < 40
    for piece in (
        "# roberta-als",
        "distaff train mlm --output_dir x",
        "a\\|b",
        "- jax 0.10.2",
        "`data/train.txt`",
        "nan",
    ):
        assert piece in text


def test_a_card_without_metrics_or_metadata_is_valid(tmp_path):
    write_card(tmp_path, model_name="m", model_type="bert", base_model="/somewhere/else")
    data = card(tmp_path).data.to_dict()
    assert "model-index" not in data
    assert "base_model" not in data
    assert "model_name" not in data


def test_the_users_part_of_a_card_stays(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("---\n# mine\nlicense: mit\ntags: [own]\n---\n\n# My model\n\nIt is good.\n")
    write_card(tmp_path, model_name="m", model_type="bert", metrics={"loss": 3.0}, license="apache-2.0")
    readme.write_text(readme.read_text() + "\nWritten below.\n")
    write_card(tmp_path, model_name="m", model_type="bert", metrics={"loss": 2.0}, license="apache-2.0")
    once = readme.read_text()
    write_card(tmp_path, model_name="m", model_type="bert", metrics={"loss": 2.0}, license="apache-2.0")
    assert readme.read_text() == once
    assert once.startswith("---\n# mine\nlicense: mit\ntags: [own]\n")
    assert once.count("# My model\n\nIt is good.\n") == once.count("Written below.") == once.count("| loss |") == 1
    data = card(tmp_path).data
    assert (data.license, data.tags) == ("mit", ["own"])
    assert data.eval_results[0].metric_value == 2.0


def test_a_readme_without_metadata_keeps_every_byte_of_its_text(tmp_path):
    text = "# Notes\n\nA line.\n---\nnot metadata\n"
    (tmp_path / "README.md").write_text(text)
    write_card(tmp_path, model_name="m", model_type="bert")
    assert text.rstrip() in (tmp_path / "README.md").read_text()
    assert card(tmp_path).data.library_name == "transformers"


def test_bad_sizes_and_names_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="'5XB' is not a size"):
        save_safetensors(tmp_path, WEIGHTS, max_shard_size="5XB")
