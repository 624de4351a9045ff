"""What the benchmarks share: models of real shapes with random weights, time, memory, and tables
that say where they come from."""

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import policy  # noqa: E402

import toy  # noqa: E402

QWEN3 = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN3 |= dict(vocab_size=151_936, max_position_embeddings=40_960)
SMALL = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=4096)
SHAPES = {
    "tiny": SMALL | dict(hidden_size=64, num_hidden_layers=2, intermediate_size=192, head_dim=16),
    "small": SMALL | dict(hidden_size=256, num_hidden_layers=8, intermediate_size=768),
    "qwen3-4b": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3-8b": QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}


def add_arguments(parser):
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: as train.py)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="also write the tables to this file")


def set_up(args):
    """-> (model with random weights, tokenizer). The tokenizer is the toy's: no hub is needed, and
    what the tokens say does not matter here."""
    device = policy.init_ranks()
    torch.manual_seed(args.seed)
    tokenizer = toy.build_tokenizer()
    tokenizer.chat_template = None
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    with device:
        model = AutoModelForCausalLM.from_config(config(args), dtype=getattr(torch, args.dtype))
    policy.neutralise_generation(model, tokenizer)
    return model.eval(), tokenizer


def config(args):
    return Qwen3Config(eos_token_id=1, **SHAPES[args.shape])


def synchronise():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(function, repeats=1):
    """-> (result, median seconds, peak memory in GiB beyond what was held before)."""
    seconds = []
    peak = start_peak()
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        result = function()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds), peak()


def start_peak():
    """-> a function that says by how many GiB memory has peaked since."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        return lambda: (torch.cuda.max_memory_allocated() - held) / 2**30
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    held = resident("VmRSS")
    return lambda: resident("VmHWM") - held


def resident(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 2**20


def commit():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def where():
    """The line that every result carries."""
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    script = Path(sys.argv[0])
    command = " ".join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    return f"`{command}`, commit {commit()}, {hardware}, torch {torch.__version__}"


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write(text, path):
    print(text)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")
