"""train.py with one more reward, 1 for any answer in a box: the control that shows how much of a
gain is learning to write an answer at all.

    python benchmarks/any_box.py --reward any-box --model MODEL --dataset FILE
"""

import torch

import train
from reward_functions import REWARDS, Reward
from runtime import cli


def any_box(judged):
    return torch.tensor([float(bool(answer)) for answer in judged.group.answers])


REWARDS["any-box"] = Reward(any_box, set())

if __name__ == "__main__":
    cli.run_script(train.main)
