"""The language model underneath: tokens as bytes, sampling, the policy."""

import copy
import json
import re

import pytest
import torch
from conftest import QWEN3_4B, on_devices, tiny_model
from naive import log_pi, log_probs
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

import rollout
from cer import answer_logprobs, check_scoring
from engine import checks, load, memory, policy, sampling, slots
from engine.export import export
from engine.sampling import generate
from engine.tokens import vocabulary
from rloo import TrainingRow, update
from rollout import sample
from runtime.cli import InputError
from tasks import data
from tasks.prompts import encode_prompt

# ------------------------------------------------------------------------------------------- tokens


def test_the_bytes_of_the_tokens_spell_the_text(tokenizer, qwen_tokenizer):
    texts = "3*4=12;\n\\boxed{14 eggs}", "größer 日本 🙂 \u200b\t", "$\\boxed{(-\\infty, 3]}$."
    for vocab in vocabulary(tokenizer), vocabulary(qwen_tokenizer):
        for text in *texts, "{<|im_end|>":  # the name of a special token is ordinary text
            assert vocab.join(vocab.encode(text)) == text.encode()
    end, think = qwen_tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>"])
    of_qwen = vocabulary(qwen_tokenizer).bytes
    assert of_qwen[end] == b"" and of_qwen[think] == b"<think>"  # the latter is not special


def test_tokenizers_that_cannot_be_scored_are_refused(tokenizer):
    prefixed, merged, plain = (copy.deepcopy(tokenizer) for _ in range(3))
    prefixed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    merged.add_tokens(["boxed{"])
    plain.backend_tokenizer.decoder = decoders.Fuse()
    reasons = "changes .* and is not supported", "merges 'boxed' and '{'", "only byte-level"
    for tokenizer, reason in zip((prefixed, merged, plain), reasons):
        with pytest.raises(ValueError, match=reason):
            vocabulary(tokenizer)


def test_tokens_that_are_added_later(own_tokenizer):
    size = len(vocabulary(own_tokenizer).bytes)
    own_tokenizer.add_tokens(["🙂"])
    assert vocabulary(own_tokenizer).join([size]) == "🙂".encode()


def test_sampled_ids_are_cut_as_they_are(qwen_tokenizer):
    """A sampler may spell "boxed" letter by letter, merge the closing brace with what follows, and
    break a character in two."""
    vocab = vocabulary(qwen_tokenizer)
    letters, half = [i for c in r"so \boxed" for i in vocab.encode(c)], [vocab.bytes.index(b"\xf0")]
    cases = [  # solution, what follows -> answer, closing, tokens of the answer
        (letters, vocab.encode("{14}$."), "14", "}", 2),
        (letters, vocab.encode("{14}\n$$"), "14", "}\n", 2),  # one token
        (half + letters, vocab.encode("{14}"), "14", "}", 2),
        (letters, [vocab.bytes.index(b"{("), *vocab.encode("1)}")], "(1)", "}", 3),
    ]
    for solution, rest, *expected in cases:
        assert vocab.locate_answer(solution + rest) == (len(solution), *expected)
    no_text = [*letters, *vocab.encode("{"), *half, *vocab.encode("}")]
    assert vocab.locate_answer(no_text) is None


# ------------------------------------------------------------------------ what transformers 4 reads


LLAMA_3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3 |= dict(rope_type="llama3", original_max_position_embeddings=64)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
EXPORTED = [  # family, settings, rope_parameters without the base -> rope_scaling
    ("qwen3", {}, {"rope_type": "default"}, None),
    ("llama", {}, LLAMA_3, LLAMA_3),
    ("qwen3_moe", EXPERTS | {"num_local_experts": 4}, {"rope_type": "default"}, None),
]


@pytest.mark.parametrize("family, settings, rope, scaling", EXPORTED)
def test_transformers_4_finds_what_it_needs(
    qwen_tokenizer, tmp_path, family, settings, rope, scaling
):
    """The files only; transformers 4.57.6 itself was asked once, for the same logits and ids. And
    5 reads them as the model and the tokenizer that were saved."""
    rope = rope | {"rope_theta": 1e6}
    model = tiny_model(
        len(vocabulary(qwen_tokenizer).bytes), family, rope_parameters=rope, **settings
    )
    export(model, qwen_tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config.get("rope_scaling")) == (1e6, scaling)
    assert "rope_parameters" not in config  # each setting stands once
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1, modes
    assert config.get("num_experts") == settings.get("num_local_experts")
    of_tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert of_tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|im_end|>" in of_tokenizer["additional_special_tokens"]
    assert of_tokenizer["extra_special_tokens"] == {}
    again, tokenizer = load.load(tmp_path, "cpu")
    assert again.config.rope_parameters == model.config.rope_parameters == rope
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    text = "cafe\u0301 <|im_end|> \\boxed{12}}$."
    for split in False, True:
        spelled = [t.encode(text, split_special_tokens=split) for t in (tokenizer, qwen_tokenizer)]
        assert spelled[0] == spelled[1]
    assert tokenizer.chat_template == qwen_tokenizer.chat_template
    assert tokenizer.all_special_tokens == qwen_tokenizer.all_special_tokens


def test_transformers_4_finds_the_rope_of_full_attention(tokenizer, tmp_path, capsys):
    """Where each kind of attention has its own. Of Nemotron it would scale none, and a line says
    so."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    for family in "olmo3", "nemotron":
        rope, more = yarn | {"rope_theta": 5e5}, {}
        if family == "olmo3":
            default = {"rope_type": "default", "rope_theta": 1e4}
            rope = {"full_attention": rope, "sliding_attention": default}
            more = {"layer_types": ["full_attention"] * 2, "sliding_window": 64}
        model = tiny_model(len(tokenizer), family, rope_parameters=rope, **more)
        export(model, tokenizer, tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text())
        scaling = {each: config["rope_scaling"][each] for each in yarn}
        assert (config["rope_theta"], scaling) == (5e5, yarn)
        again, ids = load.load_model(tmp_path / family, "cpu", "auto"), torch.arange(90)[None]
        assert torch.equal(again(ids).logits, model(ids).logits)
        says = "only transformers 5 reads the scaling of its RoPE"
        assert (says in capsys.readouterr().err) == (family == "nemotron")


CLASSES = ("GPT2Tokenizer", "qwen3"), ("Qwen2Tokenizer", "llama"), ("TokenizersBackend", "qwen2")


@pytest.mark.parametrize("name, family", CLASSES)
def test_the_tokens_are_those_of_tokenizer_json(own_tokenizer, tmp_path, monkeypatch, name, family):
    """The library builds these classes, and those of a Qwen2, anew, with a rule of their own for
    where text is split: here digits are joined. Also after the export."""
    made = own_tokenizer
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\\boxed|[{}]|\s+|\S"), "isolated")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    content = json.loads(made.backend_tokenizer.to_str())
    content["model"]["merges"] += [["1", "2"], ["12", "3"]]
    content["model"]["vocab"] |= {"12": len(made), "123": len(made) + 1}
    content["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["truncation"]["direction"] = "Right"  # which is not used
    save(tmp_path, tiny_model(len(made) + 2, family, pad_token_id=0), made, eos_token_id=1)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    text = "so 1234 eggs,\r\n\n  \\boxed{123}"
    of_file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    of_file.no_truncation()
    expected = of_file.encode(text).ids
    assert {len(made), len(made) + 1} & set(expected)
    model, tokenizer = load.load(tmp_path, "cpu")
    export(model, tokenizer, tmp_path / "saved")
    for each in tokenizer, load.load_tokenizer(tmp_path / "saved"):
        assert each.encode(text) == vocabulary(each).encode(text) == expected
    with monkeypatch.context() as patch:
        patch.setattr(load, "PreTrainedTokenizerFast", AutoTokenizer)
        with pytest.raises(InputError, match="gives other tokens than its tokenizer.json"):
            load.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"cannot load the model|has no tokenizer\.json"):
        load.load_tokenizer(tmp_path)


# ----------------------------------------------------------------------------------------- sampling


def save(directory, model, tokenizer, **generation):
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_bf16_on_a_cpu(tokenizer, tmp_path):
    """The actor is in bf16. The policy keeps fp32 weights, also of a bf16 checkpoint, gradients
    and sums, and computes in bf16: its log-probabilities are near those in fp32, and not equal."""
    directory = save(tmp_path, tiny_model(len(tokenizer)).to(torch.bfloat16), tokenizer)
    actor, _ = load.load(directory, "cpu", dtype="bf16")
    assert (
        actor.dtype == torch.bfloat16 and actor.base_model.embed_tokens.weight.dtype == actor.dtype
    )
    whole = load.load(directory, "cpu")[0]
    assert whole.dtype == torch.float32
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    found = {}
    for dtype in torch.float32, torch.bfloat16:
        trained = policy.Policy(load.load_model(directory, "cpu", "auto"), False, dtype)
        found[dtype] = trained(ids, torch.arange(6)[None] > 0)
        found[dtype].sum().backward()
        kinds = {(p.dtype, p.grad.dtype) for p in trained.parameters()}
        assert kinds == {(torch.float32, torch.float32)}
        for ours, theirs in zip(trained.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours.full_tensor().to(dtype), theirs.to(dtype))
    difference = (found[torch.float32] - found[torch.bfloat16]).abs().max()
    assert 1e-5 < difference < 0.2


def test_small_changes_survive_rounding_in_the_mean():
    """They move some weights to the next bf16 number. Rounded to the nearest, hardly any weight
    would move. Numbers of bf16 stay where they are, at both sides of a power of two and at 0."""
    W = torch.randn(300, 500).mul(0.02).bfloat16().float()
    for change in 1e-6, -1e-5, 3e-5:
        near, spread = ((x + change).bfloat16() - W for x in (W, policy.spread(W)))
        assert spread.mean() == pytest.approx(change, rel=0.05)
        assert abs(near.mean()) < 0.5 * abs(change)
    for value in 0.0, -0.0, 1.0, -1.0, 2**-7, 3.0, -1e-30, 3e38:
        numbers = torch.full((70_000,), value).bfloat16().float()
        assert torch.equal(policy.spread(numbers).bfloat16().float(), numbers), value
    finer = torch.randn(500, 500)  # fp32, between the numbers of bf16
    assert abs((policy.spread(finer).bfloat16() - finer).mean()) < 3e-5
    places = policy.spread(torch.ones(1000, 4096)).view(torch.int32) - torch.ones(()).view(
        torch.int32
    )
    for part in places, places[:, :50], places[7]:  # of all, of some columns, of a row
        share = torch.histc(part.float(), bins=8, min=-(2**15), max=2**15) / part.numel()
        assert (share - 1 / 8).abs().max() < 0.02


def test_weights_that_are_no_bf16_numbers_stay():
    """As a run in fp32 saves them. So the first actor is the model that evaluate.py would load."""
    model = tiny_model(64)
    for p in model.parameters():
        p.data[0] = p.data[0].bfloat16().float()  # these are
    loaded = copy.deepcopy(model)
    trained = policy.Policy(model, False, torch.bfloat16)
    moved = 0
    for (name, p), before in zip(trained.named_parameters(), loaded.parameters(), strict=True):
        now = p.full_tensor()
        assert torch.equal(now.bfloat16(), before.bfloat16()), name
        differs = now != before
        assert not differs[before != before.bfloat16()].any(), name
        moved += differs.sum().item()
    assert moved > 100


@pytest.mark.parametrize("rounding", ["dither", "nearest"])
def test_the_actor_has_the_weights_with_which_the_policy_computes(rounding):
    """To the bit, before an update in bf16 and after it. A small update changes the weights of bf16
    only with "dither"."""
    actor = tiny_model(64, initializer_range=0.1).to(torch.bfloat16)
    trained = policy.Policy(copy.deepcopy(actor), False, torch.bfloat16, rounding)
    loaded, used, moved = copy.deepcopy(actor), {}, []
    for name, module in trained.model.named_modules():
        for of, _ in module.named_parameters(recurse=False):
            path = f"{name}.{of}".lstrip(".")
            module.register_forward_hook(
                lambda m, *_, path=path, of=of: used.update({path: getattr(m, of).detach().clone()})
            )
    for step in range(2):
        trained.copy_weights(actor)
        trained(torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None] > 0)
        for name, p in actor.named_parameters():
            assert name in used and torch.equal(p, used[name]) and p.dtype == torch.bfloat16
            moved += [(p.float() - loaded.get_parameter(name).float()).flatten()]
        assert step or not torch.cat(moved).any()  # what was loaded are numbers of bf16 already
        trained.reshard()
        for p in trained.parameters():
            p.data.to_local().add_(1e-5)
    mean = torch.cat(moved).mean().item() * 2  # of both steps
    assert mean == pytest.approx(1e-5, rel=0.1) if rounding == "dither" else mean < 5e-6


def test_the_hubs_generation_settings_do_not_reach_the_sampler(own_tokenizer, tmp_path):
    """check_sampling asserts that scores equal logits; here load() has something to undo."""
    tokenizer = own_tokenizer
    tokenizer.add_tokens(["<|turn|>", "<|other|>"], special_tokens=True)
    stop, turn = tokenizer.convert_tokens_to_ids(["<eos>", "<|turn|>"])
    model = tiny_model(2 * len(tokenizer), initializer_range=0.02)
    penalties = dict(repetition_penalty=1.5, top_k=20, temperature=0.3, no_repeat_ngram_size=2)
    save(tmp_path, model, tokenizer, do_sample=True, eos_token_id=[stop, turn], **penalties)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_attn_implementation": "eager"}))
    model, _ = load.load(tmp_path, "cpu")
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.repetition_penalty in (None, 1.0)
    stops = {stop, turn, tokenizer.pad_token_id}  # its stop ids are kept
    assert model.generation_config.eos_token_id == sorted(stops)
    rows, entropies = generate(model, [[5, 6]] * 64, max_new_tokens=8)
    assert 0 < min(entropies) and max(entropies) < 7  # numbers, although some ids have none
    assert max(i for row in rows for i in row) < len(tokenizer)  # others spell no token


TURNS = {  # how a template writes an answer, and what ends it
    "{{ m.content }}<|done|>\n": "<|done|>",
    "{{ m.content.strip() }} \n[END]<|done|>": "[END]",
    "{{ m.content }}{% if not loop.last %}<|done|>{% endif %}": "<|done|>",
    "{{ m.content }}\n": "<|user|>",  # only what begins the next turn
    "said": None,
    "{{ raise_exception('no answers here') }}": None,
}


@pytest.mark.parametrize("turn, end", TURNS.items())
def test_a_sample_stops_where_the_chat_template_ends_a_turn(own_tokenizer, turn, end):
    tokenizer, model = own_tokenizer, tiny_model(256)
    own = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    marks = ["<|done|>", "[END]", "<|user|>", "\n", "<|other|>"]  # added, some not as special
    tokenizer.add_tokens(marks[:2], special_tokens=True), tokenizer.add_tokens(marks[2:])
    user = "{% if m.role == 'user' %}<|user|>{{ m.content }}\n{% else %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{user}{turn}{{% endif %}}{{% endfor %}}"
    load.reset_generation_config(model, tokenizer)
    expected = own | {tokenizer.convert_tokens_to_ids(end)} if end else own
    assert model.generation_config.eos_token_id == sorted(expected)


def test_qwens_model_stops_at_the_end_of_its_turn_and_of_its_text(qwen_tokenizer):
    load.reset_generation_config(model := tiny_model(256), qwen_tokenizer)
    stops = qwen_tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert stops == ["<|endoftext|>", "<|im_end|>"]


def test_a_stop_is_no_ordinary_text(tokenizer, own_tokenizer, capsys):
    """A config that names no end has the default of its class, an id that may be any character."""
    model, bare = tiny_model(256), own_tokenizer
    character = tokenizer.encode("!")
    model.generation_config.eos_token_id = [*character, tokenizer.eos_token_id]
    load.reset_generation_config(model, tokenizer)
    own = sorted([tokenizer.pad_token_id, tokenizer.eos_token_id])
    assert model.generation_config.eos_token_id == own
    assert "samples do not stop at ['!']" in capsys.readouterr().err
    bare.eos_token, bare.pad_token, bare.chat_template = "!", None, "no turns"
    for of_model in character[0], None:
        model.generation_config.eos_token_id = of_model
        with pytest.raises(
            InputError, match=r"has an end-of-text token, only ordinary text \(\['!"
        ):
            load.reset_generation_config(model, bare)


@pytest.fixture
def loaded(device, tokenizer, tmp_path):
    directory = save(tmp_path, tiny_model(len(tokenizer)), tokenizer)
    return load.load(directory, device)[0].float()


PROMPTS = [[5, 6, 7], [9] * 11, [30], [8, 8, 30, 31, 99], [100, 101]] * 3


@torch.no_grad()
def one_by_one(model, prompt, max_new_tokens):
    """Greedy decoding without cache, padding or generate() -> ids, mean entropy."""
    ids, entropies = list(prompt), []
    while len(entropies) < max_new_tokens:
        logp = log_probs(model, ids)[-1]
        entropies.append(-(logp.exp() * logp).sum().item())
        ids.append(logp.argmax().item())
        if ids[-1] in model.generation_config.eos_token_id:
            break
    return ids[len(prompt) :], pytest.approx(sum(entropies) / len(entropies), abs=1e-4)


@on_devices
def test_pieces_and_dropped_rows_change_no_token(loaded, monkeypatch):
    likely = [generate(loaded, PROMPTS, 9, temperature=0)[0][i][4] for i in (0, 1)]
    loaded.generation_config.eos_token_id = sorted(set(likely))  # so that rows end early
    expected, decoded = [one_by_one(loaded, prompt, 9) for prompt in PROMPTS], []
    loaded.lm_head.register_forward_hook(lambda *args: decoded.append(len(args[2])))
    monkeypatch.setattr(sampling, "row_bytes", lambda model, tokens, more: tokens + more)
    for fits, piece in (10_000, 256), (60, 256), (60, 3), (20, 1):
        decoded.clear()
        monkeypatch.setattr(sampling, "bytes_that_fit", lambda model, fits=fits: fits)
        rows, entropies = generate(loaded, PROMPTS, 9, piece=piece, temperature=0)
        assert list(zip(rows, entropies)) == expected
    assert len(set(map(len, rows))) > 1
    assert sum(decoded) == sum(map(len, rows))  # in pieces of 1, finished rows cost nothing


@on_devices
def test_the_prompt_of_a_question_is_read_once(loaded, monkeypatch):
    """Counted in tokens that enter the model. generate() reads the last one for each row; after the
    first piece rows differ, and are read as they are."""
    read = []
    loaded.base_model.embed_tokens.register_forward_hook(
        lambda *args: read.append(args[1][0].numel())
    )
    monkeypatch.setattr(loaded.generation_config, "eos_token_id", [0])
    N, P, K, new = 5, 11, 3, 4  # two questions with N samples, one alone
    prompts = [[9] * P] * N + [[5, 6, 7]] * N + [[8]]
    rows, _ = generate(loaded, prompts, new, temperature=0)
    assert {len(row) for row in rows} == {new}
    width = P - 1  # padded on the left
    assert sum(read) == K * width + len(prompts) * new
    read.clear()
    generate(loaded, [[9] * P, [5, 6, 7], [8]], new, temperature=0)  # nothing is equal
    assert sum(read) == K * P + K * (new - 1)
    read.clear()
    generate(loaded, [[9] * P] * N, new, piece=2, temperature=0)
    assert sum(read) == (P - 1) + 2 * N + (P + 1) + 2 * N  # greedy: equal in the second piece, too


SETTINGS = {}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}


@on_devices
@pytest.mark.parametrize("settings", SETTINGS)
def test_samples_follow_the_models_distribution(loaded, settings):
    p = log_probs(loaded, [5, 6, 7])[-1].exp().detach().cpu()
    p, at = (p ** (1 / settings.get("temperature", 1))).sort(descending=True)
    p[p.cumsum(0) / p.sum() - p / p.sum() > settings.get("top_p", 1)] = 0
    p[settings.get("top_k", len(p)) :] = 0
    p = torch.zeros_like(p).scatter(0, at, p / p.sum())
    sampled, _ = generate(loaded, [[5, 6, 7]] * 4000, 1, **settings)
    first = torch.tensor([row[0] for row in sampled])
    frequency = first.bincount(minlength=len(p)) / 4000
    assert (frequency - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_group_says_what_was_sampled(toy_model_dir, monkeypatch):
    model, tokenizer = load.load(toy_model_dir, "cpu")
    [problem, other], answered = data.load_problems("toy-test", 2), 0
    made = generate(model, [encode_prompt(tokenizer, p) for p in (problem, other)] * 24, 18)
    monkeypatch.setattr(rollout, "generate", lambda *inputs: made)
    group, second = sample(model, tokenizer, [problem, other], 24, 18)
    assert made == (group.completions + second.completions, group.entropies + second.entropies)
    assert group.problem is problem and group.prompt == encode_prompt(tokenizer, problem)
    for i, ids in enumerate(group.completions):
        assert group.truncated[i] == (tokenizer.eos_token_id not in ids)
        if group.answers[i] is not None:
            box, answered = f"{{{group.answers[i]}}}", answered + 1
            assert group.texts[i].startswith(tokenizer.decode(group.solution(i)) + box)
    assert 0 < answered < 24  # 18 tokens are too few for some


def test_one_long_prompt_shortens_no_other_sample(tokenizer):
    model = tiny_model(len(tokenizer), max_position_embeddings=64)
    load.reset_generation_config(model, tokenizer)
    model.generation_config.eos_token_id = [tokenizer.pad_token_id]  # hardly ever sampled
    prompts = [[9] * 4, [9] * 60, [9] * 70]
    lengths = [len(ids) for ids in generate(model, prompts, 16, temperature=0)[0]]
    assert lengths == [16, 4, 0]  # the last prompt has more tokens than the model positions


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = f"Which?\nA: x\n{BOXED} Please only provide the letter of the answer in the box."


def test_other_stops_are_in_place_of_the_models(tokenizer):
    """No row ends and none is padded, where the model has a stop that only one of them writes."""
    model, prompts, greedy = tiny_model(len(tokenizer)), [[5, 6], [90, 91]], []
    model.tokenizer_size = len(tokenizer)
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):  # by plain passes
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        greedy.append(ids[2:])
    one, other = greedy
    stop = next(token for token in one[2:] if token not in other)
    model.generation_config = GenerationConfig(eos_token_id=[stop], pad_token_id=stop)
    ended = one[: 1 + one.index(stop)]
    assert len(ended) < 12
    for stops, expected in ([], greedy), (None, [ended, other]):
        assert generate(model, prompts, 12, stops=stops, temperature=0)[0] == expected


def test_the_prompt_with_and_without_a_chat_template(tokenizer, qwen_tokenizer):
    number, letter = data.Problem("How many?", "14"), data.Problem("Which?\nA: x", "A", "letter")
    for problem in number, letter:  # with the options of a multiple choice
        assert tokenizer.decode(encode_prompt(tokenizer, problem)) == f"{problem.question}\n"
    of_system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    expected = f"{of_system}<|im_start|>user\n{LETTER}<|im_end|>\n<|im_start|>assistant\n"
    # The paper's prompt. Qwen3's template adds an empty thought only where it is told to.
    assert qwen_tokenizer.decode(encode_prompt(qwen_tokenizer, letter)) == expected
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    words = data.Problem("How many?", "14", "text")
    contents = {number: f"How many?\n{BOXED}", words: f"How many?\n{BOXED}", letter: LETTER}
    for problem, content in contents.items():
        prompt = plain.decode(encode_prompt(plain, problem))
        assert prompt == f"You are a helpful assistant.\n\n{content}\n\n"


# ------------------------------------------------------------------------------------------- policy


EXPERTS |= dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILIES = [  # family, settings, why it is refused
    ("olmo2", {}, None),
    ("mixtral", EXPERTS, None),
    ("mixtral", EXPERTS | {"router_jitter_noise": 0.1}, "router noise must be 0"),
    ("granite", {"logits_scaling": 1.05}, "its logits are not lm_head of"),
    ("nanochat", {}, "its logits are not lm_head of"),  # a soft cap
    ("qwen3_next", EXPERTS, "Linear"),
    ("minimax", EXPERTS, "it needs a cache of its own, MiniMaxCache"),
    ("mistral", {"sliding_window": 8}, "it needs full attention in all layers"),
    ("gpt2", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "not laid out as Llama"),
    ("qwen3", {"attention_dropout": 0.1}, "dropout and router noise must be 0"),
    ("qwen3", {"rope_parameters": DYNAMIC}, "dynamic RoPE depends on a batch's longest row"),
    ("qwen3", {"vocab_size": 50}, "more than the model has embeddings"),
]


@pytest.mark.parametrize("family, settings, says", FAMILIES)
def test_a_family_is_right_or_refused_by_name(tokenizer, tmp_path, family, settings, says):
    model = tiny_model(len(tokenizer), **{"family": family, "initializer_range": 0.2} | settings)
    save(tmp_path, model, tokenizer, eos_token_id=tokenizer.eos_token_id)
    if says:
        with pytest.raises(InputError, match=f"^{family} is not supported .*{says}"):
            load.load(tmp_path, "cpu", checks.check_sampling, check_scoring)
        return
    actor, _ = load.load(tmp_path, "cpu", checks.check_sampling, check_scoring)
    trained = policy.Policy(load.load_model(tmp_path, "cpu", "auto"))
    checks.check_training(trained, actor)
    context, answer = tokenizer.encode("so it is \\boxed"), "14 eggs"
    score = answer_logprobs(actor, tokenizer, [context], [answer])
    assert score.item() == pytest.approx(log_pi(actor, tokenizer, context, answer).item(), abs=1e-4)


def test_a_verifier_has_to_generate(tokenizer, tmp_path):
    """One that only generates may be of any other family, also with sliding windows."""
    for settings in dict(family="mistral", sliding_window=8), dict(family="minimax") | EXPERTS:
        model = tiny_model(len(tokenizer), **settings)
        save(tmp_path, model, tokenizer, eos_token_id=tokenizer.eos_token_id)
        if settings["family"] == "mistral":
            load.load(tmp_path, "cpu")
        else:
            with pytest.raises(InputError, match="^minimax is not supported .*cache of its own"):
                load.load(tmp_path, "cpu")


def test_noise_in_training_mode_is_refused(tokenizer, tmp_path):
    save(tmp_path, tiny_model(len(tokenizer)), tokenizer)
    actor, _ = load.load(tmp_path, "cpu")
    trained = policy.Policy(load.load_model(tmp_path, "cpu", "auto"))
    trained.model.lm_head.register_forward_hook(lambda module, inputs, logits: 1.01 * logits)
    with pytest.raises(InputError, match="qwen3 is not supported: its log-probabilities in tra"):
        checks.check_training(trained, actor)


def test_weights_that_stay_in_fp32_are_refused_in_bf16(tokenizer, tmp_path):
    """The routers of this family. FSDP would compute them in bf16."""
    experts = dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32)
    layers = dict(moe_layer_start_index=0, moe_layer_end_index=1, moe_layer_interval=1)
    model = tiny_model(
        len(tokenizer), "ernie4_5_moe", **experts, **layers, moe_num_shared_experts=0
    )
    save(tmp_path, model.bfloat16(), tokenizer)
    for dtype in "bf16", "fp32":
        actor, _ = load.load(tmp_path, "cpu", checks.check_sampling, dtype=dtype)
        trained = policy.Policy(load.load_model(tmp_path, "cpu", "auto"), False, actor.dtype)
        if dtype == "bf16":
            with pytest.raises(InputError, match="gate.weight'.: use --dtype fp32"):
                checks.check_training(trained, actor)
    checks.check_training(trained, actor)


PLANS = [  # GB of the card, flags -> the line of the log, or what is refused
    (83, {}, "memory: 9,827 tokens"),
    (24, {}, "6144 tokens .* about 22.9 GB .* and 15.5 are free: use --lora 32 or more GPUs"),
    (141, dict(cpu_offload=True), "16,384 tokens .*; policy and Adam in CPU memory$"),
    (83, dict(microbatch_tokens=16_384), "16,384 tokens .*; policy and Adam in CPU memory"),
    (34, dict(microbatch_tokens=16_384), "16384 tokens in a micro-batch need"),
]


def test_the_policy_is_fitted_into_the_free_memory(monkeypatch):
    """Qwen3-4B's shape, rows of 6,144 tokens (the paper's lengths), beside the actor's 8 GB."""
    config = Qwen3Config(**QWEN3_4B, tie_word_embeddings=True, max_position_embeddings=40_960)
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    taken = 2 * sum(p.numel() for p in actor.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "all_gather", lambda part: part)
    monkeypatch.setattr(memory, "host_lacks", lambda *_: None)
    for card, flags, expected in PLANS:
        free = card * 1e9 - taken, None
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: free)
        try:
            tokens, offload, says = memory.plan_memory(actor, 6144, **flags)
            assert f"{tokens:,} tokens" in says and offload == ("CPU memory" in says)
        except InputError as error:
            says = str(error)
        assert re.search(expected, says), (card, flags)
    # What the host has to hold beside the GPU.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (141e9 - taken, None))
    monkeypatch.setattr(memory, "host_lacks", lambda what, held: f"{what} {held / taken:.3g}")
    held = [({}, "the policy's weights 1"), (dict(cpu_offload=True), "policy and Adam 11")]
    for flags, lack in [*held, (dict(lora=32), "the loaded weights 0.903")]:
        with pytest.raises(InputError, match=f"^{lack}$"):
            memory.plan_memory(actor, 6144, **flags)


def test_chunked_logprobs_equal_the_log_softmax():
    """No more than a chunk's logits are made at a time: in the forward pass, and again backward."""
    hidden, targets = torch.randn(21, 16, requires_grad=True), torch.randint(50, (21,))
    lm_head, made = torch.nn.Linear(16, 50, bias=False), []
    naive = lm_head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    lm_head.register_forward_hook(lambda module, inputs, logits: made.append(len(logits)))
    fast = policy.token_logprobs(hidden, lm_head, targets, chunk=5)
    grads = [torch.autograd.grad(x.square().sum(), [hidden, lm_head.weight]) for x in (naive, fast)]
    for ours, theirs in zip([fast, *grads[1]], [naive, *grads[0]]):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert sorted(made) == [1] * 2 + [5] * 8


def test_moments_on_the_host_change_no_step(monkeypatch):
    """They lie in one buffer. Where the host has no room they stay on the GPU."""
    rows, found = [TrainingRow([5, 6, 7, 8], [0.0, 1.0, -1.0, 1.0])], {}
    for wanted in False, True:
        trained = policy.Policy(tiny_model(64))
        adam = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for step in range(3):
            with policy.moments_on_host(adam, wanted):
                for state in adam.state.values():
                    held = [
                        state[m].to_local().untyped_storage().nbytes()
                        for m in ("exp_avg", "exp_avg_sq")
                    ]
                    assert (held == [0, 0]) == wanted
            found[wanted, step] = update(trained, adam, rows, 1e-3, 100)
    assert all(found[True, step] == found[False, step] for step in range(3))
    assert len({found[True, step] for step in range(3)}) == 3
    size = sum(p.numel() for p in trained.parameters())
    assert adam.on_host.shape == (2 * size,)
    assert "generate() has no use for the room" in memory.moments_stay(trained.model)
    trained.model.sample_pieces = slots.sample_pieces
    buffer = 2 ** (8 * size).bit_length() // size  # bytes of a parameter, 8 to 16
    monkeypatch.setattr(memory, "free_on_host", lambda: (buffer + 1) * size)
    assert not memory.moments_stay(trained.model)
    monkeypatch.setattr(memory, "free_on_host", lambda: 7 * size)
    said = "moments stay on the GPU while it samples: they need about"
    assert said in memory.moments_stay(trained.model)


def test_memory_and_disk_of_the_host_are_checked(tmp_path, monkeypatch):
    with torch.device("meta"):
        actor = tiny_model(64, hidden_size=4096, num_hidden_layers=4).to(torch.bfloat16)
    size = sum(p.numel() for p in actor.parameters())
    said = f"disk: 5 more checkpoints would take {5 * 14 * size / 1e9:.3g} of"
    assert said in memory.check_disk(actor, tmp_path, 5)
    with pytest.raises(InputError, match="more checkpoints .* GB: use a smaller --keep"):
        memory.check_disk(actor, tmp_path, 10**9)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    meminfo = f"MemTotal: {9 * size} kB\nMemFree: 1 kB\nMemAvailable:   {size} kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    assert memory.free_on_host() == 1024 * size
    # A container may have 100, and uses 85, of which 7 only keep files at hand.
    (tmp_path / "memory.current").write_text(f"{85 * size}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {7 * size}\nactive_file 3\n")
    for limit, free in ("max", 1024), (100 * size, 22):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.free_on_host() == free * size
    assert memory.host_lacks("they", 21 * size) is None
    assert "they need about " in memory.host_lacks("they", 23 * size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.host_lacks("they", 11 * size) is None
    assert "GB of free CPU memory" in memory.host_lacks("they", 12 * size)


def test_weights_that_are_missing_or_not_numbers_are_refused(tokenizer, tmp_path):
    """Otherwise the library fills in random ones."""
    path = save(tmp_path, tiny_model(len(tokenizer)), tokenizer) / "model.safetensors"
    weights = load_file(path)
    nan = weights | {"model.norm.weight": torch.full((32,), torch.nan)}
    lost = {name: weight for name, weight in weights.items() if "layers.1.mlp" not in name}
    bias = weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    unused = r"has no use for 1 weights, such as \['model.layers.0.self_attn.q_proj.bias'\]"
    cut = weights | {"model.norm.weight": torch.ones(3)}
    cases = [(nan, "not finite"), (lost, r"lacks 3 weights, such as .*layers.1.mlp")]
    cases += [(bias, unused), (cut, r"lacks 1 weights, such as .*model.norm.weight.*3.*32")]
    for changed, says in cases:
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(InputError, match=says):
            load.load(tmp_path, "cpu", checks.check_sampling)


SHARDS = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]


def two_shards(directory, weights, more):
    """Weights in two files and an index. more: what the second file holds besides."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    names = sorted(weights)
    half = len(names) // 2
    index = {name: SHARDS[k >= half] for k, name in enumerate(names)}
    content = {"metadata": {"total_size": 1}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    for shard, part, other in (SHARDS[0], names[:half], {}), (SHARDS[1], names[half:], more):
        held = {name: weights[name] for name in part} | other
        save_file(held, directory / shard, {"format": "pt"})


def test_what_is_loaded_is_what_the_files_hold(tokenizer, tmp_path):
    """The library reads a single file where an index lies beside it; of a tensor in two shards, or
    under two names, the one that comes last; whole numbers as they are; and Youtu's row of the
    padding as zeros."""
    path = save(tmp_path, tiny_model(len(tokenizer)), tokenizer) / "model.safetensors"
    weights = load_file(path)
    norm, other = "model.norm.weight", torch.full((32,), 2.0)
    cases = [
        ({"norm.weight": other}, "holds another (model.)?norm.weight than what is loaded"),
        ({norm: other.to(torch.int8)}, r"weights in \['I8'\] are quantized"),
        ({norm: other.to(torch.float8_e4m3fn)}, r"weights in \['F8_E4M3'\] are quantized"),
    ]
    for changed, says in cases:
        save_file(weights | changed, path, {"format": "pt"})
        with pytest.raises(InputError, match=says):
            load.load(tmp_path, "cpu")
    save_file({n.removeprefix("model."): w for n, w in weights.items()}, path, {"format": "pt"})
    assert torch.equal(load.load(tmp_path, "cpu")[0].model.norm.weight, weights[norm])
    two_shards(tmp_path, weights, {})
    assert torch.equal(load.load(tmp_path, "cpu")[0].model.norm.weight, weights[norm])
    first = sorted(weights)[0]
    two_shards(tmp_path, weights, {first: weights[first] + 1})
    with pytest.raises(InputError, match=f"holds another {first} than what is loaded"):
        load.load(tmp_path, "cpu")
    save_file(weights, path, {"format": "pt"})
    both = "two sets of weights, model.safetensors and model.safetensors.index.json: remove"
    with pytest.raises(InputError, match=both):
        load.load(tmp_path, "cpu")


def test_a_row_that_the_library_sets_anew_is_refused(tokenizer, tmp_path, monkeypatch):
    """By the name of the family, before it is trained, and where it would be another than that of
    the file, in whichever family."""
    latent = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8)
    model = tiny_model(
        len(tokenizer), "youtu", v_head_dim=8, num_key_value_heads=4, pad_token_id=0, **latent
    )
    model.get_input_embeddings().weight.data[0] = 1.0
    save(tmp_path, model, tokenizer)
    with pytest.raises(InputError, match="youtu is not supported .*: a row of its embeddings"):
        load.load(tmp_path, "cpu")
    monkeypatch.setattr(load, "check_config", lambda *_: None)
    with pytest.raises(InputError, match="another model.embed_tokens.weight than what is loaded"):
        load.load(tmp_path, "cpu")


TYPES = [  # of the files: of the norms, and of all else; what config.json says -> of the policy
    (torch.float32, torch.float32, "bfloat16", torch.float32),
    (torch.float32, torch.float32, "float16", torch.float32),
    (torch.bfloat16, torch.bfloat16, "float32", torch.bfloat16),
    (torch.float16, torch.float16, "bfloat16", torch.float16),
    (torch.float32, torch.bfloat16, "bfloat16", torch.float32),
    (torch.float64, torch.float64, "float64", torch.float32),
]


@pytest.mark.parametrize("norms, others, said, dtype", TYPES)
def test_training_begins_with_the_weights_of_the_files(
    tokenizer, tmp_path, norms, others, said, dtype
):
    model = tiny_model(len(tokenizer), initializer_range=0.1)
    model.model.norm.weight.data += 1e-4
    path = save(tmp_path, model, tokenizer) / "model.safetensors"
    stored = {n: w.to(norms if w.dim() == 1 else others) for n, w in load_file(path).items()}
    save_file(stored, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load.load_model(tmp_path, "cpu", "auto").dtype == dtype
    for flag, limit in ("fp32", 0), ("bf16", 2**-8):
        actor, _ = load.load(tmp_path, "cpu", dtype=flag)
        trained = load.make_policy(tmp_path, actor, False, None, "dither", 0)
        for name, weight in stored.items():
            began = trained.model.get_parameter(name).full_tensor()
            assert began.dtype == torch.float32
            assert torch.allclose(began, weight.float(), rtol=limit, atol=0), (flag, name)


REFUSED = [  # file, what is in it, what is said
    (
        "generation_config.json",
        '{"eos_token_id": [1, 0], "temp',
        "generation_config.json: expected",
    ),
    ("generation_config.json", "", "generation_config.json: expected JSON"),
    ("generation_config.json", '{"eos_token_id": "<eos>"}', "expected the ids of tokens as eos_to"),
    (
        "generation_config.json",
        '{"eos_token_id": [[1]]}',
        "expected the ids of tokens as eos_token",
    ),
    ("config.json", {"attn_factor": 0.5}, "Unrecognized keys .*yarn.*attn_factor"),
    ("config.json", {"facto": 8.0}, "Unrecognized keys .*yarn.*facto"),
]


@pytest.mark.parametrize("file, content, says", REFUSED)
def test_what_the_library_only_warns_of_is_refused(tokenizer, tmp_path, file, content, says):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    yarn["rope_theta"] = 1e4
    model = tiny_model(len(tokenizer), rope_parameters=yarn)
    path = save(tmp_path, model, tokenizer, eos_token_id=tokenizer.eos_token_id) / file
    load.load(tmp_path, "cpu")
    if file == "config.json":
        config = json.loads(path.read_text())
        config["rope_parameters"] |= content
        content = json.dumps(config)
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        load.load(tmp_path, "cpu")


def test_a_routers_own_loss_is_refused(tokenizer, tmp_path):
    experts = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    save(tmp_path, tiny_model(len(tokenizer), "mixtral", **experts), tokenizer)
    with pytest.raises(InputError, match="set output_router_logits to false"):
        load.load(tmp_path, "cpu")


def test_quantized_weights_are_refused(tokenizer, tmp_path):
    path = save(tmp_path, tiny_model(len(tokenizer)), tokenizer) / "config.json"
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    with pytest.raises(InputError, match="is quantized: take its original in bf16 or fp32"):
        load.load(tmp_path, "cpu")


def test_a_head_is_saved_as_tied_if_it_is(tokenizer, tmp_path):
    """config.json says so in each case. What else is harmless in a file are frequencies of RoPE."""
    path = save(tmp_path, tiny_model(len(tokenizer)), tokenizer) / "model.safetensors"
    weights = load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    embeddings = weights["model.embed_tokens.weight"]
    for head, tied in (None, True), (embeddings, True), (embeddings + 0.1, False):
        more = {} if head is None else {"lm_head.weight": head.clone()}
        save_file(weights | more, path, {"format": "pt"})
        model, _ = load.load(tmp_path, "cpu")
        export(model, tokenizer, tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert saved["tie_word_embeddings"] == tied
        assert ("lm_head.weight" in load_file(tmp_path / "saved" / "model.safetensors")) != tied
        again, ids = load.load_model(tmp_path / "saved", "cpu", "auto"), torch.tensor([[5, 6]])
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert torch.equal(again.lm_head.weight, embeddings if head is None else head)
