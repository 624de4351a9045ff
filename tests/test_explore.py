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
from two_tables_figure import judge, train, two_tables

import evaluate
from cer import cer, exact_cer
from rloo import leave_one_out

PAGE = Path(__file__).parents[1] / "docs" / "explore.html"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")
REWARDS = ["exact match", "perfect verifier", "VeriFree", "CER"]

# What the tests' JavaScript uses. check() keeps what is not as expected.
CHECKS = """const failed = [], drawn = () => new Promise(done => setTimeout(done, 99));
    const json = JSON.stringify, check = (what, found, expected = true) =>
      json(found) === json(expected) || failed.push([what, found, expected]);
    const text = id => $(id).textContent, cells = tr => [...tr.cells].map(td => td.textContent);
    const table = id => [...$(id).rows].map(tr => cells(tr).join("|"));
    const set = async (node, value) => {
      node.value = value;
      for (const name of ["input", "change"]) node.dispatchEvent(new Event(name));
      await drawn();
    };
    const click = async node => { node.click(); await drawn(); };
    const open = lines => openRun(new File([lines], "f"));"""


def in_browser(folder, steps):
    """Run JavaScript at the end of the page -> what it returns."""
    probe = f"<script>(async () => {{ {CHECKS} {steps} return failed; }})()"
    probe += ".catch(e => String(e)).then(x => console.log('RESULT' + JSON.stringify(x) + 'END'));"
    page = PAGE.read_text().replace("</html>", f"{probe}</script>")
    (folder / "page.html").write_text(page)
    command = f"timeout 60 {BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr"
    command += " --force-prefers-reduced-motion"  # the last stage of the animation, at once
    command = [*command.split(), f"--user-data-dir={folder}/browser", f"{folder}/page.html"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        said = (re.search("RESULT(.*)END", line) for line in browser.stderr)
        found = next(filter(None, said), None)
        browser.terminate()
    assert found, "the page said nothing within a minute"
    return json.loads(found[1])


def test_its_mathematics_is_ours(tmp_path):
    """On ten random models exactCer, and cer and the advantages of groups that the darts hit. cer
    also where W underflows, where solutions are masked, and where all of them are."""
    models = [finite_distribution(S=3, A=4, seed=seed) for seed in range(10)]
    log_W, log_P = torch.randn(5, 4).double() * 300, -torch.rand(4).double()
    log_W[1], log_W[2, :2] = -torch.inf, -torch.inf
    steps = f"""const models = {json.dumps([[p.tolist(), L.tolist()] for p, L in models])};
        const W = {json.dumps(log_W.tolist()).replace("-Infinity", "-1/0")};
        return [cer(W, {log_P.tolist()}), models.map(([prior, likelihood], k) =>
          [exactCer(prior, likelihood).rho, ["own", "made", "same"].map(first =>
            judge({{prior, likelihood}}, throwDarts(9, k), first === "own" ? 9 : 4, first))])];"""
    found, of_models = in_browser(tmp_path, steps)

    def same(found, ours):
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, ours, rtol=0, atol=1e-9)

    same(found, cer(log_W, log_P))
    for (prior, likelihood), (rho, groups) in zip(models, of_models, strict=True):
        same(rho, exact_cer(prior, likelihood))
        for g, M in zip(groups, (9, 4, 4)):
            P, W = likelihood[g["s"], 0], likelihood[g["s"]][:, g["a"]].T
            kept = torch.tensor([[w is not None for w in row] for row in g["W"]])
            assert (kept.sum(1) == M).all()
            R = cer(W.log().masked_fill(~kept, -torch.inf), P.log())
            same(g["R"], R)
            same(g["A"], leave_one_out(R))


def test_the_two_tables_are_ours(tmp_path):
    """pass@1 of 16 seeds and the mean of one step's pull within 4 standard errors, and its SD."""
    settings = [(16, 0.0, "Adam", 0.05), (8, 0.3, "Adam", 0.2), (16, 0.3, "SGD", 10.0)]
    steps = f"""return [{json.dumps(REWARDS)}.map(name => [
          {json.dumps(settings)}.map(([F, slip, optimizer, rate]) => range(16).map(seed => {{
            const run = train(name, {{F, slip, optimizer, rate}}, seed);
            return range(31).map(() => run.next().value);
          }})), [0, .3].map(slip => pulls(name, 16, slip))])];"""
    [found] = in_browser(tmp_path, steps)

    def near(found, ours):  # samples in the first dimension
        found = torch.tensor(found, dtype=torch.float64)
        error = (found.var(0) / len(found) + ours.var(0) / len(ours)) ** 0.5
        assert ((found.mean(0) - ours.mean(0)).abs() < 4 * error + 1e-4).all()

    for reward, (curves, pulls) in zip(REWARDS, found, strict=True):
        for (F, slip, name, lr), curve in zip(settings, curves, strict=True):
            options = dict(forms=F, slip=slip, optimizer=getattr(torch.optim, name), lr=lr)
            near(curve, train(reward, **options, steps=30, seeds=40)[0].double())
        for slip, pull in zip((0.0, 0.3), pulls, strict=True):
            ours = first_pulls(reward, slip).double()
            near(pull["steps"], ours)
            assert pull["sd"] == pytest.approx(ours.std().item(), rel=0.12)


def first_pulls(reward, slip, K=2000, B=4, N=8, F=16):
    """The gradient of K first steps in the logit of the right solution, by torch."""
    torch.manual_seed(0)
    theta, phi = two_tables(K, F, slip)
    s = theta.detach().softmax(-1).multinomial(B * N, replacement=True)
    a = phi.detach().softmax(-1)[torch.arange(K)[:, None], s].flatten(0, 1).multinomial(1)
    reference = torch.randint(F, (K, B))
    _, losses = judge(reward, theta, phi, s.view(K, B, N), a.view(K, B, N), reference, M=N)
    return -torch.autograd.grad(losses.mean(1).sum(), theta)[0][:, 0]


def group(step, R, **more):
    """One line of train.py's samples.jsonl: four samples, of which the second is cut off."""
    line = {"step": step, "question": "Ana has\n\n3 bags.", "reference": "14", "R": R}
    line |= {"answers": ["14", None, "<b>18", "14"], "truncated": [False, True, False, False]}
    line |= {"texts": [r"So \boxed{14}", "I count the\neggs and", "<b>18?", "14!"]} | more
    return json.dumps(line) + "\n"


def test_a_walk_through_the_page(script, tmp_path, finished_run):
    log_W = [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]]
    matrices = {"distinct_answers": ["14", "<b>18"], "columns": [0, 2, 3]}
    matrices |= {"log_W": log_W, "log_P": [-1.0, -5.0, -2.0]}
    said = {"verdicts": ["right", None, "wrong", "right"]}
    cer_run = group(1, [0.4, 0, 0.1, 0.4], **matrices) + group(2, [0.5] * 4, **matrices)
    mixed = group(3, [0.6, 0, 0.1, 0.6], **said, **matrices)
    mixed += group(3, [1.0, 0, 0, 1.0], **said) + group(4, [0.2, 0, 0.3, 0.2], **said)
    flags = f"--model {finished_run}/checkpoints/step-4 --dataset toy-test --limit 2 --runs 3"
    script(evaluate, f"{flags} --max-new-tokens 48 --out {tmp_path}/scores")
    real = [(f / "samples.jsonl").read_text() for f in (finished_run, tmp_path / "scores")]
    steps = f"""await drawn();
        check("the rewards", table("numbers").at(-1), "CER|.465|.443|.089|.085|.271");
        check("its bar", $("rewards").querySelector(".chosen").style.height.slice(0, 4), "44.2");
        const slip = () => [cells($("group").rows[2]).at(-2), $("dart-boxes").lastChild.style.left],
          [before, place] = slip();
        await set($("darts").querySelector("input"), .78);
        check("the slip is made, and its dart stays", [before, ...slip()], [".108", ".431", place]);
        await click($("examples").children[2]);
        check("an example", table("numbers").at(-1), "CER|.500|.346|.102|.103|.180");
        await click($("examples").children[0]);
        draw({{ time: null }});  // play the slices, to the end
        for (const move of $("posterior").getAnimations({{ subtree: true }})) move.finish();
        await set($("time"), 0);
        check("the slider", $("posterior").firstChild.offsetHeight < .5 * $("model").offsetHeight);
        $("group").rows[7].querySelector("button").focus();
        check("a row's terms", cells($("group").tFoot.rows[0])[6], ".02");
        await set($("M"), 1); await set($("first"), "same");
        check("a bias", text("bias").includes("off for")); await set($("first"), "own");
        await click($("more"));
        check("no bias", text("bias").includes("200 groups all means agree")); await learn();
        check("equal rates", /^At equal .*\\s+at step 3. with CER.* step 5. /.test(text("result")));
        const pull = k => cells($("pulls").rows[k]).slice(2).join("|");
        check("exact match and CER", [pull(1), pull(4)], [".010 ± .016|66%", ".010 ± .003|0%"]);

        await open({json.dumps(cer_run)} + "\\n  \\n{{");
        check("a bad line", text("say").startsWith("f: 2 groups. Left out: 1 (line 5"));
        check("CER", $("judged").label, "this run recorded no verdicts");
        check("the best", table("samples")[2], "1: ★ 14|.67|.24|.09|.400|+.233");
        check("a wrong one", table("samples")[4], "3: <b>18|||1.00|.100|-.167");
        await set($("index"), 99); check("the field stays in range", $("index").value, "1");
        await open({json.dumps(mixed)});
        check("Rule+CER", [$("judged").label, cells($("samples").rows[0]).slice(-4)],
          ["by the verdicts of the data set's verifier", ["CER", "R", "A", "verdict"]]);
        const left = [];
        for (const {{value}} of $("filter").options) {{
          await set($("filter"), value);
          left.push([$("part").nextElementSibling.value, $("index").max].join());
        }}
        check("filters", left, ["3,2", ",0", "3,2", "3,2", "3,2", "4,1"]);
        await open({json.dumps(group(1, [0.5] * 3))});
        check("a bad file", text("say").startsWith("f is no samples.jsonl: line 1: R is"));
        for (const [k, file] of {json.dumps(real)}.entries()) {{
          await open(file);
          const rows = $("samples").querySelectorAll("button").length;
          check("the files of both scripts", [groups.length, rows], [[8, 4], [2, 3]][k]);
        }}"""
    assert in_browser(tmp_path, steps) == []
