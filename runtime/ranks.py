"""The processes of a run: their group, their random numbers, and when they stop."""

import atexit
import datetime
import math
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from runtime.cli import as_input_error, is_rank_0, require, say
from runtime.files import lock


def init_ranks():
    """Join torchrun's process group, or make one of a single process -> this rank's device."""
    transformers.utils.logging.disable_progress_bar()  # loading and saving models is quick
    transformers.utils.logging.set_verbosity_error()  # what it warns of we check, and refuse
    cuda = torch.cuda.is_available()
    if cuda:
        version = torch.__version__  # which compares itself with tuples
        require(version >= (2, 10), f"torch {version} is too old for a GPU: install 2.10 or later")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # A prefill that is padded on the left has fully masked rows. cuDNN's attention, which torch
        # prefers on Hopper, need not return numbers there; the efficient kernel returns 0.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Batches of many shapes leave holes in segments of fixed size.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:  # set by torchrun; a cluster may export a MASTER_ADDR of its own
        launched = dist.is_torchelastic_launched()
        require(launched, "RANK is set: start with torchrun, or unset it")
        # Ranks wait for the one that samples longest, and for rank 0 to write files.
        with as_input_error("the other ranks of torchrun cannot be reached"):
            dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    else:
        for name in "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE":  # srun, mpirun
            several = f"{name} is not 1, and each task would be a whole run: start torchrun in one"
            require(os.environ.get(name, "1") == "1", several)
        # One process has nobody to talk to. A cluster may name an interface that is not here.
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.pop(name, None)
        with as_input_error("torch needs a network interface, if only lo (ip link set lo up)"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # Without this, a script that ends early is sometimes aborted by its threads.
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def all_gather(part):
    """The lists of all ranks, concatenated in rank order, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return [item for part in parts for item in part]


LOCKS = []  # open until this process ends


def open_run_directory(out, name, resume=False):
    """The directory of a run: --out, or runs/TIME-NAME-PID, the same on all ranks. It is made, and
    locked until this process ends. InputError if another process holds it, or if it is not empty
    and the run is not resumed."""
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    out = Path(all_gather([out or default])[0])
    if is_rank_0():
        # What a run leaves that was refused before its first step; it may be started again. Names
        # with a dot are the file system's, such as .nfs and .snapshot.
        leftovers = {"lock", "warm-start", "config.json.partial", "lost+found"}
        leftovers |= {"selected.jsonl", "selected.jsonl.partial"}
        empty = {path.name for path in out.glob("[!.]*")} <= leftovers
        require(resume or empty, f"--out {out} is not empty: use another or (train.py) --resume")
        LOCKS.append(lock(out))
    dist.barrier()
    return out


def seed_everything(*key):
    """Make torch's random numbers a function of the key, such as (seed, step), and of the rank. So
    a resumed run draws the same numbers without saved state. (On a GPU samples can still differ,
    because free memory decides which rows are sampled together, and so which number goes to which
    row.)"""
    torch.manual_seed(random.Random(repr((*key, dist.get_rank()))).getrandbits(63))


# Besides Ctrl-C and a closed terminal, what schedulers send some time before they kill a job, and
# what the kernel sends at a limit of CPU time.
SIGNALS = [signal.Signals["SIG" + name] for name in "TERM INT HUP USR1 USR2 XCPU".split()]


class Stop:
    """What ends a run before its last step: one of SIGNALS, or three gradients in a row that are
    not finite, so that an unattended run does not burn days. The run finishes its step and saves.
    Further signals change nothing, since torchrun and SLURM may both pass on the same one."""

    def __init__(self):
        self.received = self.signal = 0  # the signal of this rank, and of any rank after a step
        self.skipped = 0  # updates in a row whose gradient was not finite
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self.request)

    def request(self, signum, frame):
        if not self.received:  # SIGXCPU comes every second
            say(f"{signal.Signals(signum).name}: stopping after this step (kill -9 stops now)")
        self.received = signum

    def after(self, grad_norm):
        """Whether the run stops after this step. All ranks call this together."""
        self.signal = max(all_gather([self.received]))
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1
        return bool(self.signal) or self.skipped == 3
