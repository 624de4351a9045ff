"""What a first user meets at the edges: unusable data, two processes on one run, data that changes,
interruptions, rewards and verifiers of one's own. Nothing is silent, and nothing is lost."""

import os
import signal
import time

import pytest
import torch
from conftest import group_of, tiny_model

import cer
import evaluate
import rewards
import train
import warm_start
from engine import checkpoints, cli, files, load, log, memory, policy
from engine.cli import InputError
from engine.ranks import Stop
from engine.sampling import generate
from engine.supervised import supervise
from tasks import data, verifiers

# --------------------------------------------------------------------------------------------- data


def test_inputs_that_would_give_wrong_rewards_are_refused(tokenizer):
    group = group_of(tokenizer, [r"so \boxed{7}", r"\boxed{8}"], "7")
    prompt, completions = group.prompt, group.completions
    whole = [prompt + ids for ids in completions]
    cases = [
        ((torch.tensor(prompt), completions, "7"), "lists of token ids"),
        ((prompt, whole, "7"), "begin with the prompt"),
        ((prompt, [[len(tokenizer)]], "7"), "not in the tokenizer's range"),
        ((prompt, completions, 7), "must be a string"),
        ((prompt, completions, "7", 0), "M must be at least 1"),
    ]
    for inputs, says in cases:
        with pytest.raises(ValueError, match=says):
            cer.rewards(tiny_model(len(tokenizer)), tokenizer, *inputs)


# --------------------------------------------------------------- rewards and verifiers of one's own


def test_a_verifier_that_fails_is_named(monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "mine", lambda answer, reference: 1 / 0)
    with pytest.raises(InputError, match="'mine' fails on the answer '15' to .* 'Why.'"):
        verifiers.verdict(data.Problem("Why?", "14", "mine"), "15")


RETURNED = [
    ((torch.ones(2, 1), [{}]), r"'mine' .*must return finite numbers R \(1, 2\)"),
    ((torch.tensor([[1.0, torch.nan]]), [{}]), "must return finite numbers"),
    ((torch.ones(1, 2), []), "'mine' must return a record"),
    ([[1.0, 0.0]], "'mine' must return a pair"),
]


@pytest.mark.parametrize("returned, says", RETURNED)
def test_a_reward_that_returns_something_else_is_named(tokenizer, monkeypatch, returned, says):
    monkeypatch.setitem(rewards.REWARDS, "mine", lambda groups, **_: returned)
    with pytest.raises(InputError, match=says):
        rewards.compute_rewards("mine", [group_of(tokenizer, ["a", "b"], "7")])


# ----------------------------------------------------------------------------------- the same run


def test_a_second_process_on_a_run_is_refused(script, tmp_path):
    """Before it loads anything."""
    for module in train, evaluate:
        files.lock(tmp_path / "held")
        code, _, err = script(module, "--model nowhere --out held --dataset toy")
        assert code == 2 and f"held: process {os.getpid()} is writing to it" in err, err


def test_a_run_resumes_only_with_its_data_and_if_steps_are_left(script, stopped_run, monkeypatch):
    monkeypatch.setattr(train, "load", None)  # all of this is known before a model loads
    code, _, err = script(train, "--out run --resume --steps 2")
    assert code == 2 and "has completed 2 steps" in err
    code, _, err = script(train, "--out run --resume --verifier text")
    assert code == 2 and "verifier was None and is text" in err
    config = stopped_run / "config.json"
    config.write_text(config.read_text().replace("50 questions", "49 questions"))
    code, _, err = script(train, "--out run --resume")
    assert code == 2 and "the data has changed (49 questions" in err and "50 questions" in err


def test_a_stopped_supervised_start_is_saved(script, tmp_path, toy_model_dir, monkeypatch):
    (tmp_path / "demos.jsonl").write_text('{"question": "Q?", "solution": "so \\\\boxed{7}"}\n' * 4)

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return supervise(*args)

    monkeypatch.setattr(warm_start, "supervise", stopped)
    flags = f"--model {toy_model_dir} --data demos.jsonl --epochs 50 --out warm"
    code, _, err = script(warm_start, flags)
    assert code == 143 and "supervised start 1/25" in err and "start 2/25" not in err
    assert (tmp_path / "warm" / "model.safetensors").exists()


def test_a_signal_that_is_passed_on_twice_is_one(monkeypatch):
    killed, clock = [], iter([0, 1, 9])  # seconds
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stop = Stop()
    for number in signal.SIGHUP, signal.SIGTERM, signal.SIGINT:
        stop.request(number, None)
    assert stop.received == signal.SIGHUP and killed == [signal.SIGINT]


def test_a_log_that_nobody_reads_ends_no_run(monkeypatch):
    def gone(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(cli.tqdm, "write", gone)
    cli.say("step 1")


def test_long_work_shows_signs_of_life(monkeypatch, capsys):
    """A line a minute where there is no terminal, and the hours before they pass."""
    bar = cli.progress("sample", total=4)
    bar.start_t -= 70
    bar.last_print_t -= 70
    bar.update(3)
    assert "sample:  75%" in capsys.readouterr().err
    actor = torch.nn.Linear(1000, 1000)
    actor.device = torch.device("cpu")
    for tokens in 10**9, 10**3:
        log.say_hours(actor, 10, tokens, "a step")
    assert capsys.readouterr().err.count("On this CPU a step of up to 1,000,000,000 tokens") == 1


# --------------------------------------------------------------------------- models and their state


def test_one_long_prompt_shortens_no_other_sample(tokenizer, capsys):
    model = tiny_model(len(tokenizer), max_position_embeddings=64)
    load.reset_generation_config(model, tokenizer)
    model.generation_config.eos_token_id = [tokenizer.pad_token_id]  # hardly ever sampled
    prompts = [[9] * 4, [9] * 60, [9] * 70]
    lengths = [len(ids) for ids in generate(model, prompts, 16, temperature=0)[0]]
    assert lengths == [16, 4, 1]
    assert "2 of 3 samples have less room than 16 tokens" in capsys.readouterr().err


def test_a_bf16_checkpoint_is_trained_in_fp32(tmp_path):
    tiny_model(64).to(torch.bfloat16).save_pretrained(tmp_path)
    trained = policy.Policy(load.load_model(tmp_path, "cpu", "auto"))
    whole = load.load_model(tmp_path, "cpu", torch.float32)
    for ours, theirs in zip(trained.parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.full_tensor(), theirs)


def test_memory_and_disk_of_the_host_are_checked(tmp_path, monkeypatch):
    with torch.device("meta"):
        actor = tiny_model(64, hidden_size=4096, num_hidden_layers=4).to(torch.bfloat16)
    size = sum(p.numel() for p in actor.parameters())
    said = f"4 more checkpoints take {4 * 14 * size / 1e9:.3g} of"
    assert said in memory.check_host(actor, tmp_path, False, 4)
    with pytest.raises(InputError, match="more checkpoints .* free disk: use a smaller --keep"):
        memory.check_host(actor, tmp_path, False, 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "host memory: about 6" in memory.check_host(actor, tmp_path, False, 1)
    monkeypatch.setattr(memory, "container_limit", lambda: 5e9)
    for ranks, needed in (1, "6"), (10**9, r"\d.*e\+"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with pytest.raises(InputError, match=f"the host needs about {needed}.* and 5 GB are free"):
            memory.check_host(actor, tmp_path, False, 1)


def test_a_state_before_adams_first_step(tokenizer, tmp_path, monkeypatch):
    """And an old checkpoint that cannot be deleted ends no run."""
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *args, **kwargs: None)
    actor, model = tiny_model(64), policy.Policy(tiny_model(64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in 1, 2, 3:
        checkpoints.save_checkpoint(tmp_path, step, 1, actor, tokenizer, model, optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {0}
    before = [p.full_tensor().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(2)
    assert checkpoints.load_checkpoint(tmp_path, model, optimizer) == 3
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters()))
