"""examples/one_file.py computes what cer.py and rloo.py compute, and both what naive.py does.
test_cer.py compares cer.py with naive.py, also for unusual answers and tokenizers."""

import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import naive
import one_file
import pytest
import torch
from conftest import group_of, tiny_model
from test_rloo import flat, gradient_of_update
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import cer
from engine.load import load
from engine.tokens import split_answer, vocabulary
from reward_functions import Judged
from rloo import leave_one_out, rloo_rows
from rollout import sample
from runtime.files import append_rows
from tasks import toy
from tasks.data import Problem, load_problems
from tasks.prompts import encode_prompt


@pytest.fixture(scope="module")
def sampled(toy_model_dir):
    """The toy's model, its tokenizer, three groups that it sampled, and one written by hand."""
    model, tokenizer = load(toy_model_dir, "cpu")
    torch.manual_seed(1)
    groups = sample(model, tokenizer, load_problems("toy", 3), 6, 18)
    answers = [answer for group in groups for answer in group.answers]
    assert None in answers and len(set(answers)) > 6
    texts = [r"so \boxed{}", r"\boxed{7} \boxed{14}", "no box", r"\boxed{ 14 }", r"\boxed{14", "so"]
    return model, tokenizer, [*groups, group_of(tokenizer, texts, "14")]


def rewards_of(model, tokenizer, prompt, completions, references):
    boxes = [one_file.cut(tokenizer, ids) for ids in completions]
    return one_file.rewards(model, tokenizer, prompt, boxes, references)


# ---------------------------------------------------------------------------------------- rewards


def test_the_rewards_are_those_of_cer(sampled):
    model, tokenizer, groups = sampled
    for group in groups:
        inputs = model, tokenizer, group.prompt, group.completions
        reference = group.problem.reference
        for references in [reference], [reference, "twenty eggs"]:
            R, _ = cer.rewards(*inputs, references)
            assert (R - rewards_of(*inputs, references)).abs().max() < 1e-6
    no_boxes = [tokenizer.encode("no box")] * 2
    assert rewards_of(model, tokenizer, [5], no_boxes, ["14"]).tolist() == [0, 0]


TEXTS = [
    r"a half: \boxed{\frac{1}{2}}.",
    r"once more: \boxed{\frac{1}{2}}",
    r"the letter \boxed{\text{(C)}}.",
    r"a set \boxed{\{1, 2\}}$",
    r"half of a set: \boxed{\left\{1}.",
    r"one in the other: \boxed{x = \boxed{3}}",
    r"a new line \\\boxed{14} eggs",
    r"the first is closed: \boxed{14}, \boxed{1",
    "café \\boxed{cafe\u0301 größer als 5 µm} 🙂",
    r"} open: \boxed{\frac{1}{2}",
    r"empty: \boxed{}",
]


def test_answers_with_braces_and_in_all_spellings(qwen_tokenizer):
    """With a tokenizer that merges them, and a model that has ids which spell nothing. Two
    references that the tokenizer makes one count once."""
    vocab = vocabulary(qwen_tokenizer)
    model = tiny_model(len(vocab.bytes) + 11, hidden_size=16, num_hidden_layers=1)
    completions = [vocab.encode(text) for text in TEXTS]
    for ids in completions:
        box, found = vocab.locate_answer(ids), one_file.cut(qwen_tokenizer, ids)
        assert found == (box and (ids[: box.solution_length], box.answer))
    beyond = [*completions[0], len(vocab.bytes) + 3]
    assert one_file.cut(qwen_tokenizer, beyond)[1] == r"\frac{1}{2}"
    inputs = model, qwen_tokenizer, vocab.encode("How many?\n"), completions
    for references in [r"\frac{1}{2}"], [r"\text{(C)}", "caf\xe9", "cafe\u0301"]:
        R, _ = cer.rewards(*inputs, references)
        assert R.max() > 0  # and next to nothing, since the weights are random
        distinct = one_file.to_question(qwen_tokenizer, "How many?", references).references
        torch.testing.assert_close(rewards_of(*inputs, distinct), R, rtol=1e-3, atol=0)


def test_half_of_a_character_is_no_answer(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    ids = vocab.encode("\\boxed{🙂}")
    half = [i for i, token in enumerate(ids) if vocab.bytes[token] == "🙂".encode()[-1:]]
    cut_off = [token for i, token in enumerate(ids) if i not in half]
    assert (len(half) == 1) == (one_file.cut(qwen_tokenizer, cut_off) is None)
    assert one_file.cut(qwen_tokenizer, ids)[1] == "🙂"


def test_a_box_is_found_in_any_text(tokenizer):
    """Against split_answer, which keeps a stack of open braces."""
    rng, pieces = random.Random(0), ["\\boxed{", "{", "}", "}", "\\", "1", "\n", "\\boxed"]
    boxes = 0
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        found, expected = one_file.cut(tokenizer, tokenizer.encode(text)), split_answer(text)
        boxes += expected is not None
        assert (found and found[1]) == (expected and expected[1]), text
        assert found is None or tokenizer.decode(found[0]) == text[: expected[0]]
    assert boxes > 300


# ------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_naive_passes(qwen_tokenizer):
    """A pass for every pair, and every way to close a box found in the whole vocabulary. Contexts
    of other lengths beside one change nothing."""
    vocab = vocabulary(qwen_tokenizer)
    model = tiny_model(len(vocab.bytes), hidden_size=16, num_hidden_layers=1)
    texts = "so \\boxed", "3*4=12; 12+2=14 eggs\n\\boxed", "it is\\boxed"
    contexts = [vocab.encode(text) for text in texts]
    for answer in "14", r"\text{(C)}", r"\frac{1}{2}", "":
        scores = one_file.log_pi(model, qwen_tokenizer, contexts, answer)
        each = [naive.log_pi(model, qwen_tokenizer, context, answer) for context in contexts]
        assert (scores - torch.stack(each)).abs().max() < 1e-4


CAPPED = {"final_logit_softcapping": 1.0, "layer_types": ["full_attention"] * 2}
FAMILIES = {"gemma2": CAPPED, "granite": {"logits_scaling": 8.0}, "xglm": {"d_model": 32}}


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_a_padded_pass_is_that_of_each_row_alone(family):
    """Also for logits that are capped or scaled, and for positions that are embedded."""
    model = tiny_model(64, family, **FAMILIES.get(family, {}))
    contexts, tokens = [[5], [7, 8, 9, 10], [6, 7]], [11, 12, 13]
    logp = one_file.next_token_log_probs(model, contexts, tokens)
    for context, found in zip(contexts, logp):
        alone = naive.log_probs(model, context + tokens)[len(context) - 1 :]
        assert (found - alone).abs().max() < 1e-4


# ----------------------------------------------------------------------------- samples and training


def test_its_samples_are_those_of_each_prompt(sampled):
    """Prompts of other lengths beside them change nothing. Each ends at its first stop token."""
    model, tokenizer, _ = sampled
    prompts = [tokenizer.encode(text) for text in ("Ana has", "Ben has 3 bags of 4 eggs.\n", "A")]
    args = SimpleNamespace(max_new_tokens=1, rows_at_once=1999)
    samples = one_file.sample(model, 2000 * prompts, args)
    for k, prompt in enumerate(prompts):
        p = naive.log_probs(model, prompt)[-1].exp()
        counts = torch.bincount(torch.tensor([i for [i] in samples[k::3]]), minlength=len(p))
        assert (counts / 2000 - p).abs().max() < 0.05
    args = SimpleNamespace(max_new_tokens=40, rows_at_once=5)
    for ids in one_file.sample(model, 8 * prompts, args):
        assert tokenizer.eos_token_id not in ids[:-1] and 0 < len(ids) <= 40


@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_update_takes_the_gradient_of_one_file(sampled, toy_model_dir, budget):
    model, tokenizer, groups = sampled
    rows, loss, size = [], 0.0, sum(len(group.completions) for group in groups)
    for group in groups:
        R = torch.rand(6)
        A = leave_one_out(R)
        rows += rloo_rows(Judged(group, None, None), R, A, tokenizer)
        for ids, A_i in zip(group.completions, A):
            log_probs = one_file.next_token_log_probs(model, [group.prompt], ids)[0]
            loss -= A_i * log_probs[range(len(ids)), ids].sum() / size
    slow = flat(torch.autograd.grad(loss, list(model.parameters())))
    trained, _ = load(toy_model_dir, "cpu")
    fast_loss, fast = gradient_of_update(trained, rows, budget)
    assert fast_loss == pytest.approx(loss.item(), rel=1e-5)
    assert (fast - slow).norm() < 1e-5 * slow.norm()


def test_a_step_of_main_is_the_clipped_gradient(toy_model_dir, quick, script, monkeypatch):
    """Of what it sampled itself, with plain SGD in place of AdamW. The rewards are cer.py's, the
    advantages rloo.py's, and each completion has a naive pass."""
    calls, real = [], one_file.sample

    def remember(model, prompts, args):
        calls.append((prompts, real(model, prompts, args)))
        return calls[-1][1]

    def sgd(parameters, lr, weight_decay):
        return torch.optim.SGD(parameters, lr=lr)

    monkeypatch.setattr(one_file, "sample", remember)
    monkeypatch.setattr(torch.optim, "AdamW", sgd)
    file = toy_model_dir.parent / "questions.jsonl"
    flags = f"--model {toy_model_dir} --dataset {file} --steps 1 --questions 3 --samples 4 --lr 1"
    flags += f" --max-new-tokens 24 --rows-at-once 5 --eval-dataset {file}"
    code, out, err = script(one_file, f"{flags} --out trained")
    assert code == 0 and "step 1/1  right" in out and "before training: " in out, err
    assert out.count("  R 0.") == 4  # the group that is shown

    model, tokenizer = load(toy_model_dir, "cpu")
    _, (prompts, sampled), _ = calls  # the others are those held out
    references = {problem.question: problem.reference for problem in load_problems(file)}
    loss = 0.0
    for k in range(0, 12, 4):
        prompt, completions = prompts[k], sampled[k : k + 4]
        assert prompts[k : k + 4] == [prompt] * 4
        reference = references[tokenizer.decode(prompt).strip()]
        R, _ = cer.rewards(model, tokenizer, prompt, completions, reference)
        for ids, A_i in zip(completions, leave_one_out(R)):
            loss -= A_i * naive.completion_logprobs(model, prompt, ids).sum() / 12
    gradient = flat(torch.autograd.grad(loss, list(model.parameters())))
    gradient /= max(1.0, gradient.norm())
    trained, _ = load("trained", "cpu")
    moved = flat(model.parameters()) - flat(trained.parameters())
    assert gradient.norm() > 1e-3 and (moved - gradient).norm() < 1e-3 * gradient.norm()


def test_without_flags_it_trains_the_toy(toy_model_dir, script, monkeypatch):
    def warm_start(out, seed):
        shutil.copytree(toy_model_dir, out)

    monkeypatch.setattr("tasks.toy_model.warm_start", warm_start)
    code, out, err = script(one_file, "--steps 1 --questions 1 --samples 2 --out new")
    assert code == 0 and "step 1/1" in out and "/200 held-out right" in out, err
    assert len(load("new", "cpu")[1]) == len(load("new/start", "cpu")[1])


def test_exact_match_is_there_to_compare(toy_model_dir, quick, script):
    """A reward of 1 where the answer is the reference verbatim: its mean is the share of those."""
    file = toy_model_dir.parent / "questions.jsonl"
    flags = f"--model {toy_model_dir} --dataset {file} --steps 2 --reward exact --max-new-tokens 24"
    code, out, err = script(one_file, f"{flags} --out trained")
    assert code == 0, err
    for line in out.splitlines():
        if line.startswith("step"):
            words = line.split()
            assert words[words.index("verbatim") + 1] == words[words.index("reward") + 1]


def test_what_cannot_be_trained_is_refused_in_one_line(toy_model_dir, script, tmp_path):
    append_rows(tmp_path / "toy.jsonl", toy.rows("toy")[:1])
    with_model = f"--model {toy_model_dir}"
    cases = {
        "--samples 1": "--samples must be 2 or more",
        "--dataset toy.jsonl": "--model and --dataset need each other",
        with_model: "--model and --dataset need each other",
        f"{with_model} --dataset toy.jsonl --out {tmp_path}": "exists: name a new directory",
        f"{with_model} --dataset none.jsonl": "none.jsonl, line 1: FileNotFoundError",
        f"{with_model} --dataset toy.jsonl --eval-dataset none.jsonl": "none.jsonl, line 1: File",
        "--lora 32": "unrecognized arguments",
    }
    rows = {
        b"": "is empty",
        b"\n": "line 1: JSONDecodeError",
        b"3\n": "line 1: TypeError",
        b'{"question": "A set?"}\n': "line 1: KeyError: 'answer'",
        b'{"question": 5, "answer": "4"}\n': "line 1: TypeError",
        b'{"question": "2?", "answer": "2"}\n{"question": "A set?", "answer": "{1"}': "line 2: ",
        b'{"question": "Caf\xe9?", "answer": "4"}': "line 1: UnicodeDecodeError",
        b'{"question": "A \\ud83d", "answer": "4"}': "line 1: ",
        # "\text" without a second backslash begins with a tab, and "\frac" with a form feed.
        b'{"question": "A set?", "answer": "a \\text{b}"}': "'a \\text{b}' is no text, empty",
        b'{"question": "A set?", "answer": "\\frac{1}{2}"}': "{1}{2}' is no text, empty",
    }
    for answer in (
        "null",
        "true",
        "0.5",
        "[]",
        '""',
        '" "',
        "{}",
        '["a", null]',
        '"x = \\\\boxed{3}"',
    ):
        rows[b'{"question": "A set?", "answer": %b}' % answer.encode()] = "is no text, empty"
    for i, (row, says) in enumerate(rows.items()):
        (tmp_path / f"{i}.jsonl").write_bytes(row)
        cases[f"{with_model} --dataset {i}.jsonl"] = says
    for flags, says in cases.items():
        code, out, err = script(one_file, f"--out new {flags}")
        assert code == 2 and says in err.splitlines()[-1] and not out, (flags, err)
        assert "Traceback" not in err and not (tmp_path / "new").exists()
        assert len(err.splitlines()) == 1 or "--lora" in flags


def test_a_tokenizer_of_another_kind_is_refused_in_one_line(toy_model_dir, script, tmp_path):
    """One that writes spaces as Llama 2's does."""
    shutil.copytree(toy_model_dir, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    path.write_text(json.dumps(content))
    append_rows(tmp_path / "toy.jsonl", toy.rows("toy")[:1])
    code, out, err = script(one_file, "--model other --dataset toy.jsonl --out new")
    assert code == 2 and not out
    assert err == "other: its tokenizer is not byte-level BPE\n"


def test_a_copy_needs_no_other_file(toy_model_dir, tmp_path):
    """In an empty folder, in a Python that does not find the repository."""
    shutil.copy(one_file.__file__, tmp_path / "alone.py")
    rows = [{"question": "How many eggs?", "answer": ["14", "fourteen"]}]
    append_rows(tmp_path / "mine.jsonl", rows)
    flags = f"--model {toy_model_dir} --dataset mine.jsonl --steps 1 --questions 1 --samples 2"
    command = [sys.executable, "alone.py", *flags.split(), "--max-new-tokens", "8", "--out", "new"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and "step 1/1" in run.stdout, run.stderr
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_its_prompts_are_those_of_train(qwen_tokenizer, toy_model_dir):
    """With the template of Qwen, with the toy's, and without one. References are told apart by
    their tokens, and a number is a text."""
    without = PreTrainedTokenizerFast.from_pretrained(toy_model_dir, chat_template=None)
    for tokenizer in (
        qwen_tokenizer,
        PreTrainedTokenizerFast.from_pretrained(toy_model_dir),
        without,
    ):
        question = one_file.to_question(tokenizer, "How many?", [" 14", "14", 14])
        assert question.references == ["14"]
        assert question.prompt == encode_prompt(tokenizer, Problem("How many?", "14"))
    two = one_file.to_question(qwen_tokenizer, "Where?", ["caf\xe9", "cafe\u0301"])
    assert len(two.references) == 1


def test_the_held_out_questions_do_not_change_the_training(toy_model_dir, quick, script):
    file = toy_model_dir.parent / "questions.jsonl"
    flags = f"--model {toy_model_dir} --dataset {file} --steps 2 --questions 2 --samples 2"
    runs = []
    for more in "", f" --eval-dataset {file}":
        code, out, err = script(one_file, f"{flags} --max-new-tokens 24{more} --out out{len(runs)}")
        assert code == 0 and ("held-out" in out) == bool(more), err
        runs.append(
            [line.rsplit("  ", 1)[0] for line in out.splitlines() if line.startswith("step")]
        )
    assert runs[0] == runs[1] and len(runs[0]) == 2


def test_transformers_4_finds_what_it_needs(tmp_path):
    """What config.json says of the two matrices is what the model has, RoPE's settings are at its
    top, and 5 reads the same config."""
    for tied, rope in (
        (True, {"rope_type": "default"}),
        (False, {"rope_type": "linear", "factor": 2}),
    ):
        rope = rope | {"rope_theta": 5e5}
        model = tiny_model(64, tied=tied, rope_parameters=rope)
        model.config.tie_word_embeddings = not tied  # what its file said
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
        one_file.save(model, tmp_path)
        modes = {path.stat().st_mode for path in tmp_path.iterdir()}
        assert len(modes) == 1  # the umask's, also for the weights
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["tie_word_embeddings"] == tied and config["rope_theta"] == 5e5
        assert (config["rope_scaling"] or {}).get("factor") == rope.get("factor")
        tokens = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert tokens["tokenizer_class"] == "PreTrainedTokenizerFast"
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.config.rope_parameters == model.config.rope_parameters
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert torch.equal(
            again(torch.tensor([[5, 6]])).logits, model(torch.tensor([[5, 6]])).logits
        )
