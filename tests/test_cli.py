"""The command line itself: process set-up, config files, publishing, the quickstart."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, RobertaConfig

from distaff import FlaxRobertaForMaskedLM, cli
from distaff.cli import main
from distaff.quickstart import QuickstartFlags, check, masked_sentences, paragraphs, unigram_entropy, write_texts
from hub_server import HubServer

DISTAFF = Path(sys.executable).parent / "distaff"


def distaff(*words, **environment):
    """Run the installed command in a process of its own."""
    env = {**os.environ, "HF_HUB_OFFLINE": "0", **environment}
    return subprocess.run([DISTAFF, *map(str, words)], capture_output=True, text=True, env=env, check=False)


def test_help_loads_no_framework():
    code = "import sys; from distaff.cli import main; main(['--help']); print([n for n in ('jax', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_process_is_started_again_once_with_huge_pages(tmp_path):
    done = distaff("config", "create", "--model_type", "bert", "--output_dir", tmp_path / "bert")
    assert done.returncode == 0
    assert done.stderr.count("started again with huge pages") == 1
    done = distaff("config", "create", "--model_type", "bert", "--output_dir", tmp_path / "two", "--no_hugepages")
    assert done.returncode == 0
    assert "huge pages" not in done.stderr


def test_config_create(tmp_path, capsys):
    words = ["config", "create", "--model_type", "roberta", "--output_dir", str(tmp_path / "a")]
    assert (
        main(
            [
                *words,
                "--config_overrides",
                "hidden_size=64,num_attention_heads=4,num_hidden_layers=2,layer_norm_eps=1e-5",
            ]
        )
        == 0
    )
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["layer_norm_eps"]) == (64, 2, 1e-5)
    words = ["config", "create", "--config_name", str(tmp_path / "a"), "--output_dir", str(tmp_path / "b")]
    assert main([*words, "--config_overrides", "hidden_size=128"]) == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (128, 2)
    capsys.readouterr()
    anew = [*words, "--overwrite_output_dir"]
    assert main([*anew, "--config_overrides", "hidden_size=130"]) == 2
    assert "hidden_size=130 does not divide" in capsys.readouterr().err
    assert main([*words, "--config_overrides", "hidden_size=64"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    assert main([*anew, "--config_overrides", "hidden_size=64"]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["hidden_size"] == 64
    tokenizer = tiny_folder(tmp_path)
    words = ["config", "create", "--model_type", "bert", "--output_dir", str(tmp_path / "d")]
    assert main([*words, "--tokenizer_name", str(tokenizer), "--config_overrides", "vocab_size=100"]) == 2
    assert "vocab_size of 100" in capsys.readouterr().err
    assert main(["config", "create", "--output_dir", str(tmp_path / "c")]) == 2
    assert main(["config", "create", "--model_type", "robberta", "--output_dir", str(tmp_path / "c")]) == 2
    assert "did you mean 'roberta'?" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def tiny_folder(folder: Path) -> Path:
    """A model and a tokenizer worth publishing."""
    (folder / "a.txt").write_text("one two three four\n" * 20)
    words = ["--train_file", str(folder / "a.txt"), "--vocab_size", "280", "--output_dir", str(folder / "tiny")]
    assert main(["tokenizer", "train", *words]) == 0
    config = RobertaConfig(
        vocab_size=280,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=34,
        type_vocab_size=1,
    )
    FlaxRobertaForMaskedLM(config).save_pretrained(folder / "tiny")
    return folder / "tiny"


def test_training_publishes_what_another_machine_downloads(tmp_path):
    """The real client against the conformance server: train, push, push again by command, download and use."""
    folder = tiny_folder(tmp_path)
    with HubServer() as server:
        env = server.env(tmp_path / "home")
        done = distaff(
            *("train", "mlm", "--model_name_or_path", folder, "--output_dir", tmp_path / "out"),
            *(
                "--train_file",
                tmp_path / "a.txt",
                "--validation_file",
                tmp_path / "a.txt",
                "--max_seq_length",
                "16",
                "--max_steps",
                "2",
                "--push_to_hub",
            ),
            *("--per_device_train_batch_size", "2", "--hub_model_id", "tester/tiny"),
            **env,
        )
        assert done.returncode == 0, done.stderr
        assert "tester/tiny" in server.repos, done.stderr
        files = set(server.repos["tester/tiny"].files())
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "recipe.yaml"} <= files
        assert any(name.startswith("runs/") for name in files)
        assert not any(name.startswith("checkpoints/") for name in files)
        assert "hf_test" not in (tmp_path / "out" / "README.md").read_text()
        done = distaff("push", tmp_path / "out", "tester/again", **env)
        assert done.returncode == 0, done.stderr
        assert "tester/again" in done.stdout
        elsewhere = server.env(tmp_path / "other-home")
        done = distaff("predict", "fill-mask", "tester/tiny", "one <mask> three", **elsewhere)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("one <mask> three")


def test_publishing_without_a_token_leaves_the_run_whole(tmp_path):
    folder = tiny_folder(tmp_path)
    with HubServer() as server:
        env = {**server.env(tmp_path / "home"), "HF_TOKEN": ""}
        done = distaff(
            *("train", "mlm", "--model_name_or_path", folder, "--output_dir", tmp_path / "out"),
            *(
                "--train_file",
                tmp_path / "a.txt",
                "--validation_file",
                tmp_path / "a.txt",
                "--max_seq_length",
                "16",
                "--max_steps",
                "1",
                "--push_to_hub",
            ),
            *("--per_device_train_batch_size", "2", "--hub_model_id", "tester/tiny"),
            **env,
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    last = done.stderr.strip().splitlines()[-1]
    assert f"distaff push {tmp_path / 'out'} tester/tiny" in last


def test_commands_that_are_none(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("mine")
    for words, answer in (
        (["-x"], "-x stands where a command belongs"),
        (["push", str(tmp_path / "a.txt"), "x/y"], "is a file, not a folder"),
        (["push", "", "x/y"], "does not exist"),
    ):
        assert main(words) == 2
        assert answer in capsys.readouterr().err


def test_a_recipe_that_is_not_utf_8_is_one_sentence(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_bytes("output_dir: Zürich\n".encode("latin-1"))
    assert main(["train", "mlm", str(tmp_path / "recipe.yaml")]) == 2
    assert "recipe.yaml' is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["predict", "--help"], ["--version"]])
def test_help_that_nobody_reads(words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([DISTAFF, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_nobody_reads_or_that_lacks_characters(tmp_path):
    """`| head -1`, and a terminal that knows ASCII alone."""
    folder = tiny_folder(tmp_path)
    words = [DISTAFF, "predict", "fill-mask", folder, *["one <mask> drü"] * 2000, "--top_k", "1"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words[:5], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one <mask> dr\\xfc")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read().decode()
    assert process.returncode == 141
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_a_save_that_fails_is_one_sentence(tmp_path):
    """A disk that is full, by a limit of the process."""
    folder = tiny_folder(tmp_path)
    train = [DISTAFF, "train", "mlm", "--model_name_or_path", folder, "--output_dir", tmp_path / "out"]
    train += ["--train_file", tmp_path / "a.txt", "--validation_file", tmp_path / "a.txt", "--max_seq_length", "16"]
    train += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--report_to", "none"]
    limited = f"ulimit -f 16; exec {shlex.join(map(str, train))}"
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("distaff: A checkpoint could not be written")
    assert "Traceback" not in done.stderr
    assert "Event loop" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (OSError(errno.ENOSPC, "no space", "out/a.csv"), 1, "distaff: 'out/a.csv' cannot be written (No space left on"),
        (KeyboardInterrupt(), 130, "distaff: interrupted"),
    ],
)
def test_what_ended_a_command_is_said_where_cleaning_up_failed_too(monkeypatch, capsys, ending, code, said):
    """A full disk, wherever something was written, and Ctrl-C while workers are waited for."""

    def call(*words):
        try:
            raise ending
        finally:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(cli, "call", call)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err.startswith(said)


def test_ctrl_c_is_heard_where_python_drops_it():
    """While garbage is collected, say: jax has a callback there."""
    code = """
import time
from distaff.cli import _drop_echoes
_drop_echoes()
class Gone:
    def __del__(self):
        raise KeyboardInterrupt
try:
    Gone()
    time.sleep(20)
except KeyboardInterrupt:
    print("heard")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=True)
    assert (done.stdout, done.stderr) == ("heard\n", "")


def test_quickstart_leaves_what_is_not_its_own(tmp_path, capsys):
    (tmp_path / "train.txt").write_text("mine")
    words = ["quickstart", "--output_dir", str(tmp_path)]
    assert main(words) == 2
    assert "is not empty (it holds train.txt)" in capsys.readouterr().err
    assert main([*words, "--resume_from_checkpoint"]) == 2
    assert "no complete checkpoint to go on from" in capsys.readouterr().err
    assert main([*words, "--max_steps", "-3"]) == 2
    assert "--max_steps is -3" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]
    assert (tmp_path / "train.txt").read_text() == "mine"
    # What it wrote itself before it was interrupted stands in nobody's way.
    write_texts(tmp_path)
    check(QuickstartFlags(), tmp_path)


def test_quickstart_runs_whole_and_again(tmp_path):
    done = distaff("quickstart", "--output_dir", tmp_path / "quick", "--max_steps", "3")
    assert done.returncode == 0, done.stderr
    assert "unigram entropy" in done.stdout
    assert done.stdout.count("was: ") == 5
    assert "compilations: train_step 1, eval_step 1" in done.stderr
    assert len(AutoTokenizer.from_pretrained(tmp_path / "quick")) == 4_000
    again = distaff("quickstart", "--output_dir", tmp_path / "quick")
    assert again.returncode == 0
    assert "checkpoints of the steps 3" in again.stdout
    assert "--resume_from_checkpoint" in again.stdout
    assert "--overwrite_output_dir" in again.stdout


def test_unigram_entropy_by_hand():
    assert unigram_entropy([[1, 1], [2, 2]]) == pytest.approx(0.6931472)
    assert unigram_entropy([[5, 5, 5]]) == 0.0


def test_paragraphs_join_lines_and_drop_rules():
    assert paragraphs("Title\n*****\n\nOne line\nand its   rest.\n\n   \n====\n") == ["Title", "One line and its rest."]


def test_masked_sentences_hold_the_mask(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(tmp_path))
    found = masked_sentences(["Zero one two three two two three four one two three four."], tokenizer, count=5)
    assert found == [("Zero one two three two <mask> three four one two three four.", "two")] or len(found) == 1
    assert all(sentence.count("<mask>") == 1 for sentence, _ in found)


def test_a_group_of_commands_lists_them(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"train {name} " in shown for name in ("mlm", "clm", "translation"))
    assert "eval mlm" not in shown
    assert main(["train"]) == 2
    assert "'train' lacks its second word: there are train mlm, train clm" in capsys.readouterr().err


def test_help_of_an_opposite(capsys):
    with pytest.raises(SystemExit):
        main(["train", "clm", "--help"])
    assert "The same as --do_train False." in " ".join(capsys.readouterr().out.split())
