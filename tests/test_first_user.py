"""What a first user meets at the edges: unusable data, two processes on one run, data that changes,
interruptions, rewards and verifiers of one's own. Nothing is silent, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import group_of, tiny_model, trained_tokenizer, written_by

import cer
import evaluate
import rewards
import train
import warm_start
from engine import checkpoints, cli, load, log, memory, policy
from engine.cli import InputError
from engine.files import read_rows
from engine.ranks import Stop
from engine.sampling import generate
from engine.supervised import supervise
from engine.tokens import vocabulary
from tasks import data, verifiers

# ------------------------------------------------------------------------------------------ data


def test_references_that_cannot_be_boxed(tmp_path, capsys):
    """A box around a reference is taken off. Whitespace stays and is counted."""
    answers = ["cold}", r"\boxed{3}", " 14 ", "a\\", r"\{1\}"]
    rows = [{"question": "q", "answer": answer} for answer in answers]
    path = tmp_path / "ROWS.JSONL"
    path.write_text("\ufeff" + "\n".join(map(json.dumps, rows)), encoding="utf-8")
    problems = data.load_problems(path, verifier="text")
    assert [problem.reference for problem in problems] == ["3", " 14 ", r"\{1\}"]
    said = capsys.readouterr().err
    assert "left out 2 of 5 rows (row 1: the reference 'cold}' cannot be boxed" in said
    assert "1 references begin or end with whitespace" in said
    (tmp_path / "rows.json").write_text(json.dumps({"split": "train", "data": rows}))
    assert data.load_problems(tmp_path / "rows.json", verifier="text") == problems


def test_a_file_without_usable_rows_says_why(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "1", "verifier": "contains"}\n')
    with pytest.raises(
        InputError, match="row 1: the verifier 'contains' is not one of .*no row is"
    ):
        data.load_problems(path)
    path.write_bytes(b'{"question": "q", "answer": "1"}\n{"question": "\xff"}\n')
    with pytest.raises(InputError, match="rows.jsonl, row 2: expected .*decode byte 0xff"):
        data.load_problems(path)


SAME_TEXT = {  # (reference, answer): whether they are the same
    ("Zürich", "Zu\u0308rich"): True,
    ("Paris", r"\text{Paris}."): True,
    ("Paris", "“$paris$”"): True,
    ("3,600 s", "3600 s"): True,
    (".5", "0.5"): False,
    (".5", "5"): False,
    (".5", "(.5."): False,
    ("5", "5."): True,
    ("...", ""): False,
    ("1,23", "123"): False,
}


@pytest.mark.parametrize("pair, same", SAME_TEXT.items())
def test_the_text_verifier(pair, same):
    assert verifiers.same_text(*pair[::-1]) == same


def test_a_verifier_of_ones_own_that_fails_is_named(monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "mine", lambda answer, reference: 1 / 0)
    with pytest.raises(InputError, match="'mine' fails on the answer '15' to .* 'Why.'"):
        verifiers.verdict(data.Problem("Why?", "14", "mine"), "15")


def test_equal_answers_are_verified_once(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(rewards, "verdict", lambda problem, a: asked.append(a) or "right")
    rewards.REWARDS["rule"]([group_of(tokenizer, [r"\boxed{7}", "no", r"\boxed{7}"], "7")])
    assert asked == ["7"]


@pytest.mark.parametrize(
    "returned, says",
    [
        ((torch.ones(2, 1), [{}]), r"R \(1, 2\)"),
        ((torch.tensor([[1.0, torch.nan]]), [{}]), "must return finite numbers"),
        (([[1.0, 0.0]], [{}]), "must return finite numbers"),
        ((torch.ones(1, 2), []), "must return a record"),
    ],
)
def test_a_reward_of_ones_own_is_checked(tokenizer, monkeypatch, returned, says):
    def mine(groups, **_):
        return returned

    monkeypatch.setitem(rewards.REWARDS, "mine", mine)
    with pytest.raises(InputError, match=rf"'mine' .*{says}|{says}"):
        rewards.compute_rewards("mine", [group_of(tokenizer, ["a", "b"], "7")])


def test_inputs_that_would_give_wrong_rewards_are_refused(tokenizer):
    model = tiny_model(len(tokenizer))
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
            cer.rewards(model, tokenizer, *inputs)


# --------------------------------------------------------------------------------- the same run


def test_a_second_process_on_a_run_is_refused(script, tmp_path, toy_model_dir):
    held = tmp_path / "held"
    held.mkdir()
    hold = "import fcntl, os, sys, time; f = open('held/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
    hold += "f.write(str(os.getpid())); f.flush(); print(flush=True); time.sleep(99)"
    other = subprocess.Popen([sys.executable, "-c", hold], cwd=tmp_path, stdout=subprocess.PIPE)
    other.stdout.readline()
    flags = f"--model {toy_model_dir} --out held --dataset"
    for module, more in (train, "toy"), (evaluate, "toy-test"):
        code, _, err = script(module, f"{flags} {more}")
        assert code == 2 and f"held: process {other.pid} is writing to it" in err
    other.kill()
    other.wait()


@pytest.fixture
def finished_run(script, tmp_path, toy_model_dir):
    (tmp_path / "mine.jsonl").write_text('{"question": "Q?", "answer": "14"}\n' * 8)
    flags = f"--model {toy_model_dir} --dataset mine.jsonl --verifier toy-rule --questions 2"
    flags += " --samples 2 --max-new-tokens 24 --eval-dataset mine.jsonl --eval-every 2 --out run"
    code, _, err = script(train, f"{flags} --steps 2")
    assert code == 0, err
    return tmp_path / "run"


def test_a_run_resumes_only_with_its_data_and_if_steps_are_left(script, finished_run, monkeypatch):
    monkeypatch.setattr(train, "load", None)  # all of this is known before a model loads
    code, _, err = script(train, "--out run --resume")
    assert code == 2 and "has completed 2 steps" in err
    code, _, err = script(train, "--out run --resume --steps 4 --verifier text")
    assert code == 2 and "verifier was toy-rule and is text" in err
    (finished_run.parent / "mine.jsonl").write_text('{"question": "Q?", "answer": "15"}\n' * 3)
    code, _, err = script(train, "--out run --resume --steps 4")
    assert code == 2 and "the data has changed (8 questions" in err and "3 questions" in err


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(script, finished_run):
    """As if the run had been stopped at step 2, where an evaluation was due."""
    whole = shutil.copytree(finished_run, finished_run.parent / "whole")
    assert script(train, "--out whole --resume --steps 3")[0] == 0
    lines = read_rows(finished_run / "metrics.jsonl")
    lines[-1] = {k: v for k, v in lines[-1].items() if "pass_at_1" not in k and "eval" not in k}
    (finished_run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    code, _, err = script(train, "--out run --resume --steps 3")
    assert code == 0 and "resuming after step 2" in err and "after step 2  pass@1" in err
    assert written_by(finished_run) == written_by(whole)


def test_an_interrupted_evaluation_goes_on(script, tmp_path, toy_model_dir, monkeypatch):
    flags = f"--model {toy_model_dir} --limit 3 --runs 1 --max-new-tokens 24 --out e --dataset"
    real, calls = evaluate.evaluate, []

    def interrupted(model, tokenizer, problems, *args, **settings):
        calls.append(len(problems))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, tokenizer, problems, *args, **settings)

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    assert script(evaluate, f"{flags} toy-test,toy")[0] == 130
    code, out, err = script(evaluate, f"{flags} toy-test,toy")
    assert code == 0 and len(calls) == 3 and "goes on" in err and "toy-test" in out
    assert len(read_rows(tmp_path / "e" / "samples.jsonl")) == 6
    code, _, err = script(evaluate, f"{flags} toy")
    assert code == 2 and "other flags" in err


def test_a_stopped_supervised_start_is_saved(script, tmp_path, toy_model_dir, monkeypatch):
    demos = [{"question": "Q?", "solution": r"so \boxed{7}"}] * 4
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demos))

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return supervise(*args)

    monkeypatch.setattr(warm_start, "supervise", stopped)
    flags = f"--model {toy_model_dir} --data demos.jsonl --epochs 50 --out warm"
    code, _, err = script(warm_start, flags)
    assert code == 143 and "supervised start 1/25" in err and "start 2/25" not in err
    assert (tmp_path / "warm" / "model.safetensors").exists()


def test_a_signal_that_is_passed_on_twice_is_one(monkeypatch):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    stop = Stop()
    for number in signal.SIGHUP, signal.SIGTERM:
        os.kill(os.getpid(), number)  # the second comes at once
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(time, "monotonic", lambda: stop.since + 10)
    stop.request(signal.SIGTERM, None)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert stop.signal == signal.SIGHUP and killed == [signal.SIGTERM]


def test_a_log_that_nobody_reads_does_not_end_the_run(monkeypatch):
    def gone(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(cli.tqdm, "write", gone)
    cli.say("step 1")


def test_long_parts_show_signs_of_life(monkeypatch, capsys):
    """A line a minute where there is no terminal."""
    bar = cli.progress("sample", total=4, delay=0, mininterval=0)
    monkeypatch.setattr(bar, "delay", 0), monkeypatch.setattr(bar, "mininterval", 0)
    bar.update(3)
    assert "sample:  75%" in capsys.readouterr().err


# ------------------------------------------------------------------------------- sampling, models


def test_one_long_prompt_shortens_no_other_sample(tokenizer, capsys):
    model = tiny_model(len(tokenizer), max_position_embeddings=64)
    load.reset_generation_config(model, tokenizer)
    model.generation_config.eos_token_id = [tokenizer.pad_token_id]  # hardly ever sampled
    prompts = [[9] * 4, [9] * 60, [9] * 70]
    lengths = [len(ids) for ids in generate(model, prompts, 16, temperature=0)[0]]
    assert lengths == [16, 4, 1]
    assert "2 of 3 samples have less room than 16 tokens" in capsys.readouterr().err


def test_a_models_own_attention_and_rope_settings(tokenizer, tmp_path):
    model = tiny_model(len(tokenizer))
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path / "eager")
    tokenizer.save_pretrained(tmp_path / "eager")
    settings = json.loads((tmp_path / "eager" / "config.json").read_text())
    (tmp_path / "eager" / "config.json").write_text(
        json.dumps(settings | {"attn_implementation": "eager"})
    )
    assert load.load(tmp_path / "eager", "cpu")[0].config._attn_implementation == "sdpa"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    tiny_model(len(tokenizer), rope_parameters=rope).save_pretrained(tmp_path / "dynamic")
    tokenizer.save_pretrained(tmp_path / "dynamic")
    with pytest.raises(InputError, match="dynamic RoPE is not supported"):
        load.load(tmp_path / "dynamic", "cpu")


def test_a_bf16_checkpoint_is_trained_in_fp32(tmp_path):
    tiny_model(64).to(torch.bfloat16).save_pretrained(tmp_path)
    whole, by_layer = (
        policy.Policy(load.load_model(tmp_path, "cpu", dtype)) for dtype in (torch.float32, "auto")
    )
    for ours, theirs in zip(by_layer.parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.full_tensor(), theirs.full_tensor())
    ids = torch.randint(64, (2, 9))
    at = torch.ones_like(ids, dtype=torch.bool)
    at[:, 0] = False
    assert torch.equal(whole(ids, at), by_layer(ids, at))


def test_a_control_token_in_a_question_is_refused(tokenizer):
    with pytest.raises(InputError, match="has a control token"):
        train.encode_prompt(tokenizer, data.Problem("How many<eos>?", "7"))


# ----------------------------------------------------------------------------- memory, checkpoints


def test_memory_and_disk_of_the_host_are_checked(tmp_path, monkeypatch):
    with torch.device("meta"):
        actor = tiny_model(64, hidden_size=4096, num_hidden_layers=4).to(torch.bfloat16)
    size = sum(p.numel() for p in actor.parameters())
    assert f"{4 * 14 * size / 1e9:.3g} of" in memory.check_host(actor, tmp_path, False, 4)
    with pytest.raises(
        InputError, match="checkpoints take .* GB of the disk are free: use a small"
    ):
        memory.check_host(actor, tmp_path, False, 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "host memory: about 6" in memory.check_host(actor, tmp_path, False, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    with pytest.raises(InputError, match="the host needs about"):
        memory.check_host(actor, tmp_path, False, 1)


def test_a_state_is_saved_in_several_files_and_before_adams_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "TENSORS_IN_A_FILE", 5)
    model = policy.Policy(tiny_model(64))
    optimizer = torch.optim.AdamW(model.parameters())

    class Nothing:
        def save_pretrained(self, directory):
            pass

    old = tmp_path / "checkpoints" / "step-1"
    old.mkdir(parents=True)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *args, **kwargs: None)  # nothing goes
    for step in 2, 3:
        arguments = tmp_path, step, 1, Nothing(), Nothing(), model, optimizer
        checkpoints.save_checkpoint(*arguments)
    saved = tmp_path / "checkpoints" / "step-3" / "training"
    assert len(list(saved.iterdir())) > 5
    assert {state["step"].item() for state in optimizer.state.values()} == {0}
    before = [p.full_tensor().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(2)
    assert checkpoints.load_checkpoint(tmp_path, model, optimizer) == 3
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters()))


# ---------------------------------------------------------------------------------------- the log


def test_hours_are_said_before_they_pass(capsys):
    actor = torch.nn.Linear(1000, 1000)
    actor.device = torch.device("cpu")
    log.say_hours(actor, 10, 10**9, "a step")
    log.say_hours(actor, 10, 10**3, "a step")
    assert capsys.readouterr().err.count("On this CPU a step of up to 1,000,000,000 tokens") == 1


def test_references_that_are_almost_never_given(tokenizer):
    group = group_of(tokenizer, [r"\boxed{7}", r"\boxed{8}"], "7")
    R = torch.tensor([1e-9, 2e-9])
    numbers = log.describe(group, R, R, {})
    assert numbers["tiny_reward_groups"] == 1
    numbers |= {"grad_norm": 0.1, "zero_advantage_groups": 0.0}
    assert "keep references short" in log.warning(numbers, boxed=True)
    numbers |= {"answered": 0.0, "truncated": 1.0}
    assert "supervised start" in log.warning(numbers, boxed=False)
    assert "supervised start" not in log.warning(numbers, boxed=True)


def test_the_brace_may_change_the_tokens_before_it():
    """This tokenizer spells "{(C)}" with the last token ")}", and "{(C)}}" with ")" and "}}". Both
    ways to write the answer count, once each."""
    pieces = r"\\boxed|\{|[^{}\\]?\}+|[^{}\\]|\\"
    tokenizer = trained_tokenizer(r"so \boxed {14 }} }} }} }} }} c)} d)} e)}", pieces)
    vocab, model = vocabulary(tokenizer), tiny_model(len(tokenizer))
    answer, context = r"\text{(C)}", vocab.encode(r"so \boxed")
    ways = [vocab.encode("{" + answer), vocab.encode("{" + answer + "}")[:-1]]
    assert vocab.join(ways[0][-1:]) == b")}" and vocab.join(ways[1][-1:]) == b")"
    text, whole = ("{" + answer + "}").encode(), set()  # all sequences of tokens that finish it
    for way in ways:
        for i in range(len(way) + 1):
            rest = text[len(vocab.join(way[:i])) :]
            whole |= {(*way[:i], t) for t, b in enumerate(vocab.bytes) if b.startswith(rest)}
    assert len(whole) == 3
    ids = [torch.tensor([context + list(tokens)]) for tokens in whole]
    logp = [
        model(input_ids=row).logits.log_softmax(-1)[0, :-1].gather(1, row[0, 1:, None])
        for row in ids
    ]
    naive = torch.stack([row[len(context) - 1 :].sum() for row in logp]).logsumexp(0)
    found = cer.answer_logprobs(model, tokenizer, [context], [answer])[0, 0]
    assert found == pytest.approx(naive.item(), abs=1e-4)
