"""Processes of their own, to be killed or run as several ranks. They are forked from a server that
has imported everything, so that each starts at once."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from engine import load, lora, policy
from rloo import update
from runtime import cli, ranks

HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])  # for the server
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["processes", "train"])


def start(function, *args, device="cpu", **environment):
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = SERVER.Process(target=enter, args=(environment, function, *args))
    process.start()
    return process


def enter(environment, function, *args):
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    function(*args)


def start_ranks(world, function, *args, device="cpu"):
    """As torchrun does: one process a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, device=device)
    common["TORCHELASTIC_RUN_ID"] = "tests"
    return [start(function, *args, RANK=r, LOCAL_RANK=r, **common) for r in range(world)]


def finish(processes, code=0, seconds=120):
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [code] * len(processes)


def run_in(directory, main, arguments=""):
    """A script's main() with these arguments. Its output goes to directory/log-RANK."""
    os.chdir(directory)
    sys.argv = [f"{main.__module__}.py", *arguments.split()]
    log = os.open(f"log-{os.environ.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cli.run_script(main)


def train_and_print_rows():
    """train.main(), with a line for each update on how many rows this rank was given."""
    import train

    def print_rows(policy, optimizer, rows, *more):
        print(len(rows), "rows")
        return update(policy, optimizer, rows, *more)

    train.update = print_rows
    return train.main()


def weights_of_a_new_policy(model_dir, path):
    """Those from which training in bf16 begins; rank 0 saves them."""
    ranks.init_ranks()
    model = load.load_model(model_dir, "cpu", torch.bfloat16)
    model = policy.Policy(model, dtype=torch.bfloat16)
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(weights, path)
    dist.barrier()
    dist.destroy_process_group()


def two_updates(cases, rows, budget, lr, path):
    """Two optimizer steps in each case, (the model's directory, the rank of LoRA or None); rank 0
    saves what they did."""
    device, found = ranks.init_ranks(), []
    for model_dir, lora_rank in cases:
        model = load.load_model(model_dir, "cpu", torch.float32).to(device)
        whole = not lora_rank
        model = policy.Policy(model) if whole else lora.LoraPolicy(model, lora_rank, "dither", 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        done = [update(model, optimizer, rows, lr, budget) for _ in range(2)]
        weights = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
        found.append((done, weights))
    if dist.get_rank() == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()
