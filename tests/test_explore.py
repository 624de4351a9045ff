"""docs/explore.html in a real browser: a script is added to a copy of the page, and what it says on
the console is read back."""

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from conftest import FAST
from test_cer import finite_distribution

import evaluate
import train
from cer import cer, exact_cer

PAGE = Path(__file__).parents[1] / "docs" / "explore.html"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")


def in_browser(folder, steps):
    """Runs JavaScript at the end of the page -> what it returned, by way of the console."""
    probe = "<script>(async () => { %s })().catch(e => ({error: String(e)}))"
    probe += ".then(result => console.log('RESULT' + JSON.stringify(result) + 'END'));</script>"
    (folder / "page.html").write_text(PAGE.read_text().replace("</body>", probe % steps))
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr".split()
    command = [BROWSER, *flags, f"--user-data-dir={folder}/browser", f"file://{folder}/page.html"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        timer = threading.Timer(180, browser.kill)
        timer.start()
        found = next(
            (m for line in browser.stderr if (m := re.search("RESULT(.*)END", line))), None
        )
        timer.cancel()
        browser.kill()
    assert found, "the page said nothing within three minutes"
    found = json.loads(found[1])
    assert not (isinstance(found, dict) and "error" in found), found
    return found


def test_its_mathematics_is_ours(tmp_path):
    prior, likelihood = finite_distribution()
    log_W = torch.randn(5, 4, dtype=torch.float64) * 300
    log_W[1] = -torch.inf
    log_W[2, :2] = -torch.inf
    log_P = -torch.rand(4, dtype=torch.float64)
    W = json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")
    steps = f"return {{rho: exactCer({prior.tolist()}, {likelihood.tolist()}).rho, "
    found = in_browser(tmp_path, f"{steps} R: cer({W}, {log_P.tolist()})}};")
    assert torch.allclose(torch.tensor(found["R"], dtype=torch.float64), cer(log_W, log_P), 0, 1e-9)
    rho = torch.tensor(found["rho"], dtype=torch.float64)
    assert torch.allclose(rho, exact_cer(prior, likelihood), rtol=0, atol=1e-9)


def test_play(tmp_path):
    """Theorem 2 holds in every example, also after a slider has moved. With one shared solution all
    advantages are 0. No request leaves the page."""
    found = in_browser(
        tmp_path,
        """const sides = [], sums = [];
        const look = () => sides.push(JSON.parse($("theorem").dataset.sides));
        for (let k = 0; k < PRESETS.length; k++) {
          preset(k); look();
          for (const input of [...$("inputs").querySelectorAll("input[type=range]")].slice(0, 4)) {
            input.value = 0.66; input.oninput({target: input}); look();
            if (!input.isConnected) throw Error("a slider that is dragged must stay");
          }
          sums.push(sum(state.prior), ...state.likelihood.map(sum));
        }
        const shared = JSON.parse($("drawn").dataset.advantages);
        return {sides, sums, shared, requests: performance.getEntriesByType("resource").length};""",
    )
    assert len(found["sides"]) == 6 * 5
    assert all(abs(cer - exact) < 1e-12 for cer, exact in found["sides"])
    assert all(abs(total - 1) < 1e-9 for total in found["sums"])
    assert len(found["shared"]) == 8 and not any(found["shared"]) and found["requests"] == 0


def group(step, reward, question="How many eggs?", **more):
    """One line of train.py's samples.jsonl: four samples, of which the second is cut off."""
    texts = [r"So \boxed{14}", "I count the\neggs and", r"I guess \boxed{18}", r"Again \boxed{14}"]
    answers, truncated = ["14", None, "18", "14"], [False, True, False, False]
    samples = {"texts": texts, "answers": answers, "truncated": truncated, "R": reward}
    return {"step": step, "question": question, "reference": "14"} | samples | more


def evaluation(dataset, index, answer, correct):
    """One line of evaluate.py's samples.jsonl."""
    line = {"dataset": dataset, "index": index, "question": f"{dataset}, question {index}"}
    line |= {"reference": "14", "answer": answer, "correct": correct, "truncated": answer is None}
    return line | {"tokens": 7, "text": f"so {answer}"}


def as_file(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


# What a test of Look reads of the page.
SEEN = """const texts = id => $(id).textContent;
    const table = () => [...$("samples").rows].map(r => [...r.cells].map(c => c.textContent));
    const look = (name, text) => openRun(new File([text], name));
    const press = k => $("samples").querySelectorAll("th:first-child button")[k].click();
    const panel = () => [texts("whose"), texts("solution")];"""


def test_look_at_a_run(tmp_path):
    """Every sample opens, the posterior does not underflow, and the panel follows the group."""
    log_W, log_P = [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]], [-1.0, -5.0, -2.0]
    R = cer(torch.tensor([log_W[0], [-torch.inf, -1, -torch.inf]]), torch.tensor(log_P)).tolist()
    matrices = {"distinct_answers": ["14", "18"], "columns": [0, 2, 3]}
    matrices |= {"log_W": log_W, "log_P": log_P}
    lines = [
        group(1, [R[0], 0.0, R[1], R[0]], "Ana has\n\n3 bags.", **matrices),
        group(2, [1.0, 0.0, 0.0, 1.0], verdicts=["right", None, "wrong", "right"]),
        group(2, [0.0, 0.0, 0.0, 0.0]),
    ]
    found = in_browser(
        tmp_path,
        f"""{SEEN} const good = {json.dumps(as_file(lines))}, said = [];
        for (const text of [good, good.split("\\n")[0], '{{"step": 1\\n' + good, "a b c", ""]) {{
          await look("samples.jsonl", text);
          said.push([texts("say"), $("run").hidden]);
        }}
        await look("samples.jsonl", good);
        const cer = table(), question = texts("question"), first = panel();
        const style = getComputedStyle($("question")).whiteSpace;
        press(3); const unanswered = panel();
        $("part").value = 1; await $("part").oninput(); const next = panel(), rule = table();
        $("group").value = 2; await $("group").oninput(); const exact = table();
        const filters = {{}};
        for (const {{value}} of $("filter").options) {{
          $("filter").value = value; await $("filter").onchange();
          filters[value] = [$("part").max, texts("partout"), texts("groupsout")].join();
        }}
        return {{said, cer, question, style, first, unanswered, next, rule, exact, filters}};""",
    )
    whole = "samples.jsonl: 3 groups in 2 steps."
    assert found["said"][0] == [whole, False]
    assert found["said"][1] == ["samples.jsonl: 1 group in 1 step.", False]
    assert found["said"][2][0].startswith(f"{whole} 1 line left out (line 1: ")
    assert found["said"][3][0].startswith("samples.jsonl is no samples.jsonl: line 1: ")
    assert found["said"][4] == ["samples.jsonl is no samples.jsonl: it is empty.", True]

    assert found["question"] == "Ana has\n\n3 bags.\n\na* = 14" and found["style"] == "pre-wrap"
    assert found["first"] == ["Sample 1: = 14", lines[0]["texts"][0]]
    assert found["unanswered"] == ["Sample 2: (no answer) (truncated)", lines[0]["texts"][1]]
    assert found["next"] == ["Sample 1: = 14", lines[1]["texts"][0]]
    assert found["cer"] == [
        ["sample", "s1", "s4", "s3", "R"],
        ["P = π(a*|s,q)", "0.368", "0.135", "0.007", ""],
        ["1: = 14", "0.67", "0.24", "0.09", f"{R[0]:.3f}"],
        ["4: = 14", "0.67", "0.24", "0.09", f"{R[0]:.3f}"],
        ["3: 18", "", "", "1.00", f"{R[1]:.3f}"],
        ["2: (no answer)", "", "", "", "0.000"],
    ]
    assert found["rule"][0] == ["sample", "verdict", "R"]
    assert found["rule"][1:4:2] == [["1: = 14", "right", "1.000"], ["3: 18", "wrong", "0.000"]]
    assert [row[0] for row in found["exact"]][-1] == "2: (no answer)"
    # Steps that are left (from 0), the first of them, and its groups.
    expected = {"all": "1,1,1", "zero": "0,2,1", "wrong": "0,2,1"}
    assert found["filters"] == expected | {"truncated": "1,1,1", "unanswered": "1,1,1"}


def test_look_at_an_evaluation(tmp_path):
    """The samples of a question are one group, wherever they stand in the file."""
    lines = [evaluation("math500", 0, "14", True), evaluation("amc23", 0, "9", False)]
    lines += [evaluation("math500", 1, None, False), evaluation("math500", 0, "18", False)]
    found = in_browser(
        tmp_path,
        f"""{SEEN} await look("samples.jsonl", {json.dumps(as_file(lines))});
        const first = table(), said = texts("say"), part = texts("parttext") + texts("partout");
        press(1); const wrong = panel();
        $("group").value = 2; await $("group").oninput(); const second = [table(), panel()];
        return {{first, said, part, wrong, second}};""",
    )
    assert found["said"] == "samples.jsonl: 3 groups in 2 data sets."
    assert found["part"] == "data setmath500"
    assert found["first"] == [["sample", "verdict"], ["1: = 14", "right"], ["2: 18", "wrong"]]
    assert found["wrong"] == ["Sample 2: 18", "so 18"]
    answered = "Sample 1: (no answer) (truncated)"
    assert found["second"][0][1] == ["1: (no answer)", "wrong"]
    assert found["second"][1] == [answered, "so None"]


def test_the_reward_stays_in_sight_on_a_phone(tmp_path):
    N = 16
    line = group(1, [0.5] * N, distinct_answers=["a long answer, and longer"])
    line |= {"texts": ["text"] * N, "answers": line["distinct_answers"] * N}
    line |= {"truncated": [False] * N, "columns": list(range(N))}
    line |= {"log_W": [[-1.0] * N], "log_P": [-1.0] * N}
    found = in_browser(
        tmp_path,
        f"""{SEEN} await look("samples.jsonl", {json.dumps(as_file([line]))});
        const wide = $("samples").parentNode, box = node => node.getBoundingClientRect();
        wide.style.width = "390px";
        const cells = [...[...$("samples").rows].at(-1).cells], name = cells[0], R = cells.at(-1);
        return [0, 200, 9999].map(x => {{
          wide.scrollLeft = x;
          return [wide.scrollLeft, box(name).left - box(wide).left, box(wide).right - box(R).right,
                  box(R).left - box(name).right];
        }});""",
    )
    assert found[2][0] > found[1][0] > found[0][0] == 0  # there is something to scroll
    for _, left, right, between in found:
        assert abs(left) < 1 and abs(right) < 1 and between > 100


def test_the_files_of_both_scripts_open(script, tmp_path, toy_model_dir):
    code, _, err = script(train, f"--model {toy_model_dir} --out run {FAST}")
    assert code == 0, err
    flags = "--dataset toy-test --limit 2 --runs 3 --max-new-tokens 48 --out eval"
    code, _, err = script(evaluate, f"--model {toy_model_dir} {flags}")
    assert code == 0, err
    groups = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").open()]
    samples = (tmp_path / "eval/samples.jsonl").read_text()
    found = in_browser(
        tmp_path,
        f"""{SEEN} await look("run", {json.dumps(as_file(groups))});
        $("part").value = 1; await $("part").oninput();
        const run = [texts("say"), table(), texts("question")];
        await look("eval", {json.dumps(samples)});
        return {{run, evaluation: [texts("say"), table().length]}};""",
    )
    say, table, question = found["run"]
    assert say == "run: 4 groups in 2 steps." and question.startswith(groups[2]["question"])
    assert len(table) == 2 + 4 and len(table[0]) == 2 + len(groups[2]["columns"])
    assert float(table[2][-1]) == pytest.approx(max(groups[2]["R"]), abs=1e-3)
    assert found["evaluation"] == ["eval: 2 groups in 1 data set.", 1 + 3]


def test_learn_shows_what_its_presets_say(tmp_path):
    claims = in_browser(
        tmp_path,
        """const shown = [];
        for (let k = 0; k < CLAIMS.length; k++) {
          await claim(k);
          shown.push(Object.fromEntries(Object.entries(curves).map(([name, points]) => [name,
            {early: points[25].pass.mean, slips: points[100].slip.mean, steps: points.length}])));
        }
        return shown;""",
    )
    assert all(c["steps"] == 101 for rewards in claims for c in rewards.values())
    follows, corrects, imitates, prefers, fixed = claims
    assert abs(follows["cer"]["early"] - follows["perfect"]["early"]) < 0.01
    assert follows["exact"]["early"] < follows["cer"]["early"] - 0.2
    assert corrects["cer1"]["slips"] > 0.2 and corrects["cer"]["slips"] < 0.04
    assert imitates["verifree"]["early"] > imitates["cer"]["early"] + 0.03
    assert imitates["verifree"]["slips"] < imitates["cer"]["slips"]
    assert prefers["exact"]["early"] < prefers["cer"]["early"] < prefers["perfect"]["early"] - 0.08
    assert fixed["exact"]["early"] > fixed["cer"]["early"] + 0.05


def test_learn_starts_in_sight_and_again_when_a_setting_changes(tmp_path):
    """The same seed gives the same curve, the last settings win, and the page draws on the way."""
    found = in_browser(
        tmp_path,
        """const before = learning, last = () => curves.exact.at(-1).pass.mean;
        for (let k = 0; !learning; k++) {  // twice if the first frame was not drawn yet
          scrollTo(0, k % 2 ? 0 : $("learn").offsetTop);
          await new Promise(resolve => setTimeout(resolve, 100));
        }
        let beats = 0;
        const timer = setInterval(() => beats++, 5), set = (id, value) => { $(id).value = value; };
        set("learn-forms", 4); await learn(); const first = last();
        clearInterval(timer);
        await learn(); const again = last();
        set("seed", 2); await learn(); const other = last();
        const old = learn(); set("learn-forms", 1); $("learn-forms").oninput(); await old;
        while (curves.exact.length < 101) await new Promise(resolve => setTimeout(resolve, 20));
        const rows = [...$("curves").rows].map(r => r.cells[0].textContent);
        const lines = $("charts").querySelectorAll("polyline").length;
        return {before, first, again, other, one_form: last(), lines, rows, beats};""",
    )
    assert found["before"] == 0 and found["first"] == found["again"] != found["other"]
    # With one form exact match is a perfect verifier.
    assert found["one_form"] > 0.98 > found["first"]
    assert found["rows"] == ["", "exact match", "CER", "perfect verifier"]
    assert found["lines"] == 5 + 2 * 3  # the grid; a band and a line for each reward
    assert found["beats"] > 10  # times that the page could answer during one training


SETTINGS = [dict(forms=16, slip=0.0, N=8, M=8), dict(forms=8, slip=0.3, N=8, M=2)]
SAME = {"exact": "exact match", "cer": "CER", "verifree": "VeriFree"}


def test_learn_agrees_with_the_script(tmp_path, monkeypatch):
    """50 seeds of the page and 100 of examples/two_tables.py: the difference of their final pass@1
    lies in its 95% band."""
    monkeypatch.syspath_prepend(PAGE.parents[1] / "examples")
    import two_tables

    settings = json.dumps([setting | {"skew": 0} for setting in SETTINGS])
    found = in_browser(
        tmp_path,
        f"""const final = (name, setting) => {{
          const runs = range(50).map(seed => train(name, setting, seed));
          for (let step = 0; step < 100; step++) runs.forEach(run => run.next());
          return runs.map(run => run.next().value.pass);
        }};
        return {settings}.map(one => {json.dumps(list(SAME))}.map(name => final(name, one)));""",
    )
    for setting, page in zip(SETTINGS, found):
        for name, finals in zip(SAME.values(), page):
            ours = torch.tensor(finals)
            theirs = two_tables.train(name, seeds=100, **setting)[0][:, -1].detach()
            error = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
            assert abs(ours.mean() - theirs.mean()) < 1.96 * error, (setting, name)
