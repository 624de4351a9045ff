"""experiments/asking: what a model that is asked says, and the numbers of the page."""

import re

import pandas
import pytest
import torch
from conftest import ROOT, tiny_model

import measure
from engine.tokens import vocabulary
from experiments.asking import asked
from experiments.people import own_case
from experiments.tests.told import names_of, near, page_of, shown
from tasks.data import Problem
from tasks.prompts import encode_prompt

PAGE = page_of("asking")


ASKED = ROOT / "experiments/asking/asked.csv"


def test_the_mean_of_token_probabilities_is_that_of_plain_passes(tokenizer):
    """RLPR's reward, on solutions of unequal length, one sample without a box."""
    texts = [r"so \boxed{7}", "none", r"it is much longer, so \boxed{8}"]
    group = {"question": "How many eggs?", "references": ["7", "14 eggs"], "texts": texts}
    model = tiny_model(len(tokenizer))
    encode = vocabulary(tokenizer).encode
    prompt = encode_prompt(tokenizer, Problem(group["question"], "7"))
    expected = []
    for text in texts:
        context = prompt + encode(text.split("{")[0])
        means = [0.0]
        for reference in group["references"] if "{" in text else ():
            tokens = encode("{" + reference + "}")
            with torch.no_grad():
                logits = model(torch.tensor([context + tokens])).logits[0, -len(tokens) - 1 : -1]
            own = logits.softmax(-1)[torch.arange(len(tokens)), tokens]
            means.append(own.mean().item())
        expected.append(max(means))
    found = asked.token_means(model, tokenizer, group)
    assert found == pytest.approx(expected, abs=1e-6) and found[1] == 0 < found[0]


def test_what_asking_found_is_in_its_csv():
    """AUC by kind of right answer, the primary comparison, and what saying nothing received."""
    page = PAGE
    tables = asked.table_of(asked.read_csv(ASKED))
    labels = {
        "$P$ (": "verifree",
        "`cer`": "cer",
        "`overlap`": "overlap",
        "$P$ to": "per word",
        "mean probability": "asked-1.5B-tokens",
        "`asked`, the 1.5B": "asked-1.5B",
        "`asked`, the same": "asked-1.5B-passage",
        "`asked`, a 0.5B": "asked-0.5B",
        "`asked`, SmolLM2": "asked-135M",
        "the 1.5B, in a written reply": "asked-1.5B-written",
    }
    for label, name in labels.items():
        found = []
        for _, table in tables.values():
            found += table.loc[name, ["AUC", "low", "high"]].tolist()
        assert shown(page, label) == near(found), label
    assert [questions for questions, _ in tables.values()] == [35, 25]
    others = tables["not equal as text"][1]
    for name, said in ("cer", ".230 (.113 to\n.363)"), ("overlap", ".050 (-.070 to .183)"):
        numbers = others.loc[name, ["asked-1.5B minus it", "from", "to"]].tolist()
        assert [float(x) for x in re.findall(r"-?\.\d+", said)] == near(numbers, 0.00051)
        assert said in page
    nothing = pandas.read_csv(ASKED.with_name("asked-nothing.csv"))
    shown_passage = nothing[nothing.asked == "asked-1.5B-passage"]["the question, repeated"].mean()
    samples = asked.read_csv(ASKED)
    wrong = samples[samples.answered & ~samples.right]["asked-1.5B-passage"].mean()
    assert f"{wrong:.2f} to wrong answers, {shown_passage:.2f}".replace("0.", ".") in page
    said = nothing.groupby("asked").mean().loc[["asked-1.5B", "asked-1.5B-written"]]
    kinds = [kind for kind in said.columns[1:] if kind not in (":", "an injected instruction")]
    for kind in kinds:
        assert shown(page.replace('| "', "| "), kind) == near(said[kind].tolist()), kind
    means = samples[samples.answered].groupby(["right", "text"])[[*said.index]].mean()
    by_judge = {
        "right answers: equal": [*means.loc[[(True, 1), (True, 0)]].to_numpy().T.flat],
        "wrong answers": means.loc[False, 0].tolist(),
    }
    for label, expected in by_judge.items():
        assert shown(page, label) == near(expected), label
    of = nothing[nothing.asked == "asked-1.5B"]
    above = (of["the question, repeated"] > of["the reference"]).sum()
    assert f"In {above} of {len(of)} questions" in page


def test_who_asks_about_the_own_case_finds_what_is_shown():
    """AUC of asking the model, on the samples of own-case.csv."""
    asked = names_of(PAGE)["asked"]
    kinds = own_case.KINDS["not equal as text"], own_case.KINDS["no word in common"]
    for of, said in zip((lambda frame: frame.right, *kinds), (".95", ".91", ".88")):
        kept = asked[asked.answered & (~asked.right | of(asked))]
        found = measure.question_aucs(kept, ["asked"]).mean()
        assert f"{found:.2f}".lstrip("0") == said and said in PAGE
