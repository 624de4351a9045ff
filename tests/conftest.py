import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import pytest
import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from engine import cli, ranks
from engine.files import checkpoints, read_rows
from engine.tokens import vocabulary
from rollout import to_group
from tasks import data, toy

torch.set_num_threads(1)  # models this small only lose by threads that wait for each other

SHARED = Path(__file__).parents[2] / "shared" / "data"  # real rows and the real Qwen3 tokenizer
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """The CPU, unless the test asks for a device by @on_devices. And a process group of one, as
    train.py and evaluate.py open."""
    name = getattr(request, "param", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name == "cuda")
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.init_ranks()
    torch.manual_seed(0)
    return name


on_devices = pytest.mark.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(scope="session")
def tokenizer():
    return toy.build_tokenizer()


@pytest.fixture(scope="session")
def qwen_tokenizer():
    local = SHARED / "qwen3_tokenizer"
    try:
        return AutoTokenizer.from_pretrained(local if local.is_dir() else "Qwen/Qwen3-4B-Base")
    except OSError:
        pytest.skip("the real Qwen3 tokenizer is neither in ../shared nor in the hub's cache")


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip("the sample data sets are not here")
    return SHARED


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory):
    """The toy's model after a short warm start: it boxes answers, mostly wrong ones."""
    directory = tmp_path_factory.mktemp("toy") / "model"
    toy.warm_start(directory, seed=0, steps=150)
    return directory


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """script(module, "--flag value ...") -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_it(module, arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments.split()])
        if dist.is_initialized():
            dist.destroy_process_group()
        handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        with pytest.raises(SystemExit) as stop:
            cli.run_script(module.main)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return stop.value.code or 0, *capsys.readouterr()

    return run_it


# Two steps of training, in a second or two.
FAST = "--dataset toy --steps 2 --questions 4 --samples 4"
FAST += " --eval-limit 8 --eval-runs 2 --eval-every 2"


def written_by(run):
    """Both logs, without the times in them, and the last weights: equal for equal runs."""
    lines = read_rows(run / "metrics.jsonl") + read_rows(run / "samples.jsonl")
    times = {"seconds", "tokens_per_second"}
    lines = [{k: v for k, v in line.items() if k not in times} for line in lines]
    step, last = checkpoints(run)[-1]
    return lines, step, (last / "model.safetensors").read_bytes()


def tiny_model(rows, family="qwen3", tied=True, seed=0, **settings):
    """Random weights with grouped-query attention, larger than usual so that mistakes show."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    shape |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=512)
    shape |= dict(vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.3)
    config = AutoConfig.for_model(family, **shape | settings)
    return AutoModelForCausalLM.from_config(config).eval()


def trained_tokenizer(text, pieces=".+", add_prefix_space=False):
    """Byte-level BPE, trained on one text. No token spans two pieces."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)
    split = pre_tokenizers.Split(Regex(pieces), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=byte_level.alphabet())
    backend.train_from_iterator([text] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def group_of(tokenizer, texts, reference, verifier="toy-rule"):
    """A group with hand-written completions."""
    vocab, stop = vocabulary(tokenizer), tokenizer.eos_token_id
    problem, prompt = data.Problem("How many eggs?", reference, verifier), "How many eggs?\n"
    completions = [vocab.encode(text) + [stop] for text in texts]
    entropies = [0.0] * len(texts)
    return to_group(tokenizer, [stop], problem, vocab.encode(prompt), completions, entropies)
