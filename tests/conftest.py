import copy
import io
import os
import shutil
import signal
import statistics
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import processes  # noqa: F401  what the server of processes imports
import pytest
import torch
import torch.distributed as dist
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import train
from engine.load import load
from engine.tokens import vocabulary
from rloo import TrainingRow
from rollout import sample, to_group
from runtime import cli, ranks
from runtime.files import LOGS, append_rows, checkpoints, read_rows
from tasks import data, toy, toy_model

ROOT = Path(__file__).parents[1]
forkserver.ensure_running()  # it imports what it needs while the first tests run
# nohup, and a shell in the background, start pytest with these ignored.
for number in signal.SIGINT, signal.SIGHUP:
    signal.signal(number, signal.default_int_handler)
torch.set_num_threads(1)  # models this small only lose by threads that wait for each other

SHARED = Path(__file__).parents[2] / "shared"  # where it is there: texts of others
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = "cpu", pytest.param("cuda", marks=needs_cuda)
on_devices = pytest.mark.parametrize("device", DEVICES, indirect=True)


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


@pytest.fixture(scope="session")
def tokenizer():
    return toy_model.build_tokenizer()


@pytest.fixture
def own_tokenizer(tokenizer):
    """A copy of it, which the test may change."""
    return copy.deepcopy(tokenizer)


REAL = SHARED / "data" / "qwen3_tokenizer"


@pytest.fixture(scope="session", params=["like Qwen3's", "Qwen3's"] if REAL.is_dir() else [""])
def qwen_tokenizer(request):
    """A small tokenizer like Qwen3's. Where the real one is there, the tests run with it, too."""
    real = request.param == "Qwen3's"
    return AutoTokenizer.from_pretrained(REAL) if real else build_tokenizer_like_qwens()


# What Qwen's tokenizer does not merge across: words with a character before them, single digits,
# and punctuation with the line break after it.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Braces are merged with what is beside them. The two bytes of ö are one token, two of the four of
# an emoji another. Ċ is a line break, Ġ a space.
MERGES = (
    r"$ .|} }|) }|} $|} Ċ|{ \|{ (|b o|bo x|box e|boxe d|\ boxed|f r|fr a|fra c|\ frac|Ġ Ġ|Ã ¶|ð Ł"
)
SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer_like_qwens():
    """With merges of braces, ids that are not used, special tokens beyond them, an added token that
    is not special, and a normalizer that composes accents."""
    merges = [tuple(merge.split(" ")) for merge in MERGES.split("|")]
    merged = ["".join(merge) for merge in merges]
    ids = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids |= {token: 260 + i for i, token in enumerate(merged)}
    ids |= {token: 300 + i for i, token in enumerate([*SPECIAL, "<think>"])}
    backend = Tokenizer(models.BPE(ids, merges))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        extra_special_tokens=[*SPECIAL[1:]],
        chat_template=CHAT,
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


# --------------------------------------------------------------------------- scripts and their runs


def run_script(module, arguments, *more):
    """Run a script in this process -> (exit code, stdout, stderr)."""
    if dist.is_initialized():
        dist.destroy_process_group()
    handlers = {number: signal.getsignal(number) for number in ranks.SIGNALS}
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [module.__file__, *arguments.split(), *more])
        with pytest.raises(SystemExit) as stop:
            cli.run_script(module.main)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    while ranks.LOCKS:  # the end of a process closes them
        ranks.LOCKS.pop().close()
    return stop.value.code or 0, out.getvalue(), err.getvalue()


@pytest.fixture
def script(monkeypatch, tmp_path):
    """script(module, "--flag value ...") -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return run_script


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory):
    """The toy's model after a short warm start: it boxes answers, mostly wrong ones."""
    directory = tmp_path_factory.mktemp("toy") / "model"
    toy_model.warm_start(directory, seed=0, steps=60)
    return directory


@pytest.fixture(scope="session")
def long_model_dir(tmp_path_factory, tokenizer):
    """A model that can be asked: it has positions enough for the prompt."""
    directory = tmp_path_factory.mktemp("long") / "model"
    for part in tiny_model(len(tokenizer), max_position_embeddings=1024), tokenizer:
        part.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def quick(toy_model_dir):
    """The flags of two steps of training in a second: the toy's model on eight questions, and
    three others in evaluation. Each reference is an answer that the model often gives."""
    model, tokenizer = load(toy_model_dir, "cpu")
    folder, rows = toy_model_dir.parent, [*toy.rows("toy")[:8], *toy.rows("toy-test")[:4]]
    problems = [data.to_problem(row, "math") for row in rows]
    for row, group in zip(rows, sample(model, tokenizer, problems, 8, 32, temperature=0.3)):
        row["answer"] = max(filter(None, group.answers), key=group.answers.count)
    rows[7]["answer"] = "as many as there are in all"  # it never gives this one
    append_rows(folder / "questions.jsonl", rows[:8])
    append_rows(folder / "held-out.jsonl", rows[8:])
    flags = f"--model {toy_model_dir} --dataset {folder}/questions.jsonl --steps 2 --questions 4"
    flags += f" --eval-dataset {folder}/held-out.jsonl --eval-limit 3 --eval-runs 2 --eval-every 2"
    return f"{flags} --samples 4 --max-new-tokens 24 --lr 6e-4"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, quick):
    """The directory of a run of four steps, which tests read or copy. Beside it: stderr."""
    return four_steps(tmp_path_factory.mktemp("finished"), quick)


def four_steps(folder, flags):
    """Train for four steps -> the directory of the run, in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        code, _, err = run_script(train, f"{flags} --steps 4 --save-every 2 --out run")
    assert code == 0, err
    (folder / "stderr").write_text(err)
    return folder / "run"


@pytest.fixture
def stopped_run(tmp_path, finished_run):
    return as_a_crash_leaves(finished_run, tmp_path / "run")


def as_a_crash_leaves(finished, run):
    """Copy a run of four steps to the directory `run`, as a crash in its second evaluation would
    leave it."""
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-4")
    for name in LOGS:  # the last line is half written
        (run / name).write_text((run / name).read_text()[:-40])
    return run


def steps_of(run):
    """The lines of metrics.jsonl that are no evaluations."""
    return [line for line in read_rows(run / "metrics.jsonl") if "reward" in line]


def written_by(run):
    """All logs, without the times in them, and the last weights: equal for equal runs."""
    lines = [line for name in LOGS for line in read_rows(run / name)]
    times = {"seconds", "tokens_per_second"}
    lines = [{k: v for k, v in line.items() if k not in times} for line in lines]
    step, last = checkpoints(run)[-1]
    return lines, step, (last / "model.safetensors").read_bytes()


def summary_of(rows):
    """What an evaluation says, computed again from its samples."""
    shares = [sum(row["right"]) / len(row["right"]) for row in rows]
    samples = [
        (answer, row["references"], truncated, tokens)
        for row in rows
        for answer, truncated, tokens in zip(row["answers"], row["truncated"], row["tokens"])
    ]
    count = len(samples)
    return {
        "pass_at_1": sum(shares) / len(shares),
        "stderr": statistics.stdev(shares) / len(shares) ** 0.5,
        "exact_match": sum(answer in references for answer, references, *_ in samples) / count,
        "answered": sum(bool(answer) for answer, *_ in samples) / count,
        "truncated": sum(truncated for _, _, truncated, _ in samples) / count,
        "tokens": sum(tokens for *_, tokens in samples) / count,
        "questions": len(shares),
        "runs": count // len(shares),
    }


# ------------------------------------------------------------------- models, tokenizers and samples

QWEN3_4B = dict(hidden_size=2560, num_hidden_layers=36, intermediate_size=9728, head_dim=128)
QWEN3_4B |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=151_936)


def tiny_model(rows, family="qwen3", tied=True, seed=0, **settings):
    """Random weights with grouped-query attention, larger than usual so that mistakes show."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    shape |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=512)
    shape |= dict(vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.3)
    config = AutoConfig.for_model(family, **shape | settings)
    return AutoModelForCausalLM.from_config(config).eval()


def group_of(tokenizer, texts, reference, verifier="toy-rule"):
    """A group with hand-written completions. reference: a string, or a list of strings."""
    vocab, stop = vocabulary(tokenizer), tokenizer.eos_token_id
    first, *others = [reference] if isinstance(reference, str) else reference
    problem = data.Problem("How many eggs?", first, verifier, tuple(others))
    prompt = "How many eggs?\n"
    completions = [vocab.encode(text) + [stop] for text in texts]
    entropies = [0.0] * len(texts)
    return to_group(tokenizer, [stop], problem, vocab.encode(prompt), completions, entropies)


def example_rows(rows=13, vocabulary_size=64):
    """Training rows of ragged lengths with random weights."""
    generator, made = torch.Generator().manual_seed(3), []
    for length in [2 + (i * i) % 29 for i in range(rows)]:
        ids = torch.randint(vocabulary_size, (length,), generator=generator).tolist()
        made.append(TrainingRow(ids, [0.0] + torch.randn(length - 1, generator=generator).tolist()))
    return made
