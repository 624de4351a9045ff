"""docs/explore.html in a real browser: a script is added to a copy of the page, and what it says on
the console is read back."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_cer import finite_distribution
from two_tables_figure import train

from cer import cer, exact_cer
from rloo import leave_one_out

PAGE = Path(__file__).parents[1] / "docs" / "explore.html"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")

# What the tests' JavaScript uses. It returns what it found.
TOOLS = """const found = [], drawn = (ms = 99) => new Promise(done => setTimeout(done, ms));
    const check = (what, is, expected = true) => {
      if (`${is}` !== `${expected}`) throw Error(`${what}: ${is}, not ${expected}`);
    };
    const go = async name => { steps[order.indexOf(name)].scrollIntoView(); await drawn(); };
    const text = id => $(id).textContent, open = (...lines) => openRun(new File(lines, "f"));"""


def in_browser(folder, steps):
    """Run JavaScript at the end of the page -> what it returns. No error may come before that."""
    probe = f"<script>(async () => {{ {TOOLS} {steps} return found; }})()"
    probe += ".then(x => `RESULT${JSON.stringify(x)}END`, String).then(console.log);"
    (folder / "page.html").write_text(PAGE.read_text().replace("</html>", f"{probe}</script>"))
    command = f"timeout 120 {BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr"
    command += f" --force-prefers-reduced-motion --user-data-dir={folder} {folder}/page.html"
    with subprocess.Popen(command.split(), stderr=subprocess.PIPE, text=True) as browser:
        said = next((line for line in browser.stderr if "CONSOLE" in line), "nothing")
        browser.terminate()
    assert (found := re.search("RESULT(.*)END", said)), f"the page said {said}"
    return json.loads(found[1])


def short(x, digits=3):
    return f"{x:.{digits}f}".replace("0.", ".", 1).replace("-", "−")


def same(found, ours):
    torch.testing.assert_close(torch.tensor(found).to(ours), ours, rtol=0, atol=1e-6)


def check_group(g, likelihood, M=8):
    """The rewards of a group that the darts hit are cer.py's, and so are the chosen columns."""
    P, W = likelihood[g["s"], 0], likelihood[g["s"]][:, g["a"]].T
    kept = torch.tensor([[w is not None for w in row] for row in g["W"]])
    own = torch.tensor(g["a"])[:, None] == torch.tensor(g["a"])
    assert (kept.sum(1) == M).all()
    assert ((kept & own).sum(1) == own.sum(1).clamp(max=M)).all()
    R = cer(W.log().masked_fill(~kept, -torch.inf), P.log())
    same([g["R"], g["A"]], torch.stack([R, leave_one_out(R)]))


def test_its_mathematics_is_ours(tmp_path):
    """On ten random models exactCer, and cer and the advantages of groups that the darts hit. cer
    also where W underflows, where solutions are masked, and where all of them are."""
    models = [finite_distribution(S=3, A=4, seed=seed) for seed in range(10)]
    log_W, log_P = torch.randn(5, 4).double() * 300 - 2000, -torch.rand(4).double()
    log_W[1], log_W[2, :2] = -torch.inf, -torch.inf
    steps = f"""const models = {json.dumps([[p.tolist(), L.tolist()] for p, L in models])};
        const W = {json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")};
        return [cer(W, {log_P.tolist()}), models.map(([prior, likelihood], k) =>
          [exactCer(prior, likelihood).rho,
            [8, 4, 1].map(M => judge({{ prior, likelihood }}, throwDarts(k), M))])];"""
    found, of_models = in_browser(tmp_path, steps)
    same(found, cer(log_W, log_P))
    for (prior, likelihood), (rho, groups) in zip(models, of_models, strict=True):
        same(rho, exact_cer(prior, likelihood))
        for g, M in zip(groups, (8, 4, 1), strict=True):
            check_group(g, likelihood, M)


def test_the_two_tables_are_ours(tmp_path):
    """pass@1 at every step, in the mean of 16 seeds, within 4 standard errors."""
    rewards = ["exact match", "perfect verifier", "VeriFree", "CER"]
    settings = [(16, 0.0, "Adam", 0.05), (8, 0.3, "Adam", 0.2), (16, 0.3, "SGD", 10.0)]
    steps = f"""return {rewards}.map(name =>
          {json.dumps(settings)}.map(([F, slip, optimizer, rate]) => range(16).map(seed => {{
            const run = train(name, {{ F, slip, optimizer, rate }}, seed);
            return range(31).map(() => run.next().value);
          }})));"""
    for reward, curves in zip(rewards, in_browser(tmp_path, steps), strict=True):
        for (F, slip, name, lr), found in zip(settings, torch.tensor(curves), strict=True):
            options = dict(forms=F, slip=slip, optimizer=getattr(torch.optim, name), lr=lr)
            ours = train(reward, **options, steps=30, seeds=40)[0]
            error = (found.var(0) / len(found) + ours.var(0) / len(ours)) ** 0.5
            assert ((found.mean(0) - ours.mean(0)).abs() < 4 * error + 1e-4).all()


def test_a_walk_through_the_steps(tmp_path):
    """Every step is entered by scrolling. What it says of its picture is compared with cer.py."""
    steps = """const seen = { board: [...$("board").rows].slice(1).map(row => row.innerText) };
        const note = name => seen[name] = { ...numbers(), words: ["model", "behind", "rewards"]
          .map(id => text(`${id}-words`)), step: steps[order.indexOf(state.step)].textContent,
          fill: $("model").children[1].style.getPropertyValue("--share") };
        for (const step of order) {
          await go(step); note(step);
          const stops = all(".story :is(button, input)").filter(node => node.tabIndex === 0);
          const places = stops.map(node => node.closest(".step")?.dataset.step ?? "stage");
          check("Tab: the step, then its picture", [...new Set(places), "stage"].slice(0, 2),
            [step, "stage"]);
        }
        for (const name of ["rare", "back"]) { $("rare").click(); note(name); }
        await go("columns");
        for (const M of [8, 4, 1]) {
          $("M").value = M; $("M").dispatchEvent(new Event("input")); note(M);
        }
        await go("all"); $("chips").children[2].click(); note("18"); return seen;"""
    seen = in_browser(tmp_path, steps)
    prior, likelihood = (torch.tensor(seen["all"][name]) for name in ("prior", "likelihood"))
    rho, area = exact_cer(prior, likelihood)[:, 0], short((prior @ likelihood)[0])
    assert [row.split()[-1] for row in seen["board"]] == [short(r) for r in rho]
    assert seen["exact"]["words"][0] == seen["spread"]["words"][0] == f"orange area {area}"
    assert [seen[step]["fill"] for step in ("exact", "spread", "row")] == ["0%", "50%", "50%"]
    assert f"ρ = {short(rho[1])}." in seen["level"]["step"]
    assert seen["18"]["words"][1].endswith(f"= {short(rho[2])}")
    assert seen["all"]["words"][2] == f"orange area {area}dashed area {area}"
    for step in "row", "advantage", "slip", "rare", "back":
        k, g = seen[step]["k"], seen[step]["group"]
        check_group(g, likelihood)
        said = f"R of dart {k + 1} {short(g['R'][k])}advantage {short(g['A'][k])}"
        assert seen[step]["words"][2].replace("+", "") == said
    assert f"R is {short(g['R'][0])}." in seen["back"]["step"]
    assert seen["rare"]["group"]["R"][0] > 3 * g["R"][0]
    for M, sd in ("8", ".041"), ("4", ".054"), ("1", ".157"):
        assert f"8 × {M} = {8 * int(M)} readings" in seen[M]["step"]
        assert seen[M]["words"][2].endswith(f"± {sd} (SD)")


def test_learning(tmp_path):
    """What the settings say."""
    steps = """for (const setting of Object.keys(SETTINGS)) {
          await learn(setting);
          found.push([...text("result").matchAll(/(\\d+) steps/g)].map(([, n]) => +n));
        }"""
    ratios = [ours / exact for ours, exact in in_browser(tmp_path, steps)]
    assert ratios == pytest.approx([0.6, 1, 1, 1, 0.45, 1.7], rel=0.15)


def group(step, R, **more):
    """One line of train.py's samples.jsonl: four samples, of which the second is cut off."""
    line = {"step": step, "question": "Ana has\n\n3 bags.", "reference": "14", "R": R}
    line |= {"answers": ["14", None, "<img src>", "14"], "truncated": [False, True, False, False]}
    line |= {"texts": [r"So \boxed{14}", "I count the\neggs and", "<img src>", "14!"]} | more
    return json.dumps(line) + "\n"


def test_the_files_of_a_run(tmp_path, finished_run):
    matrices = {"distinct_answers": ["14", "<img src>"], "columns": [0, 2, 3]}
    matrices |= {"log_W": [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]], "log_P": [-1, -5, -2]}
    R = cer(torch.tensor(matrices["log_W"][0]), torch.tensor(matrices["log_P"])).item()
    run = group(1, [0.4, 0, 0.1, 0.4], **matrices)
    run += group(2, [0.5] * 4, verdicts=["right", None, "wrong", "<img src>"], **matrices)
    hostile = [group(1, [0.5] * 3), "null\n", '{"text": {}}\n', group(1, [0] * 4, log_W=[[9]])]
    files = [(finished_run / f"{name}.jsonl").read_text() for name in ("samples", "evaluations")]
    steps = f"""check("a real group", groups.length === 1 && $("run-behind").children.length > 5);
        await open({json.dumps(run)} + "\\n  \\n{{");
        check("a bad line", text("opened").startsWith("f: 2 groups. Left out: 1 (line 5: "));
        check("the best", ["samples", "run-rewards-words", "run-behind-words"].map(text).join("|"),
          "1414<img src>(no answer)|R .400, advantage +.233|level {short(R)}");
        $("index").value = 2; $("index").onchange({{ target: $("index") }});
        $("samples").children[2].click();
        check("hostile texts", text("text").endsWith("<img src>") && !document.images.length);
        for (const line of {json.dumps(hostile)}) {{
          await open(line);
          check("the file", text("opened").startsWith("f is no samples.jsonl: line"), true);
          check("the group that was open", groups.length, 2);
        }}
        for (const file of {json.dumps(files)}) {{
          await open(file);
          found.push([groups.length, $("samples").children.length]);
        }}"""
    assert in_browser(tmp_path, steps) == [[8, 4], [9, 2]]
