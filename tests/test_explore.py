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
TROLL = Path(__file__).parents[1] / "benchmarks" / "results" / "troll" / "samples.jsonl"
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: chromium)")

# What the tests' JavaScript uses. It returns what it found.
TOOLS = """const found = [], drawn = (ms = 99) => new Promise(done => setTimeout(done, ms));
    const check = (what, is, expected = true) => {
      if (`${is}` !== `${expected}`) throw Error(`${what}: ${is}, not ${expected}`);
    };
    const go = async name => {
      steps[order.indexOf(name)].scrollIntoView();
      do await drawn(); while (state.step !== name);
    };
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
        for (const step of order) { await go(step); note(step); }
        for (const name of ["rare", "back"]) { $("rare").click(); note(name); }
        await go("all");
        check("before the guess", text("rewards-words"), "");
        all('[data-guess="mean"] button')[1].click(); note("all");
        $("chips").children[2].click(); note("18"); return seen;"""
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
    said = f"R is {short(g['R'][0])}, its advantage {short(g['A'][0])}."
    assert said in seen["back"]["step"].replace("\n", " ")
    assert f"its own P: {short(likelihood[0, 0], 2)}." in seen["slip"]["step"]  # VeriFree's
    assert seen["rare"]["group"]["R"][0] > 3 * g["R"][0]
    changed = [i for i in range(8) if seen["rare"]["group"]["a"][i] != g["a"][i]]
    assert changed == [5, 6] and "darts 6 and 7" in seen["rare"]["step"]


def test_a_wall_is_dragged(tmp_path):
    """By pointer and by keys. Every number of the model follows, and there is a way back."""
    steps = """const wall = key => all(".wall").find(node => node.dataset.key === `wall ${key}`);
        const send = (node, type, more) => node.dispatchEvent(
          new PointerEvent(type, { bubbles: true, cancelable: true, ...more }));
        const drag = (key, x, y) => {
          const { left, bottom, width, height } = $("model").getBoundingClientRect();
          send(wall(key), "pointerdown");
          send(window, "pointermove", { clientX: left + x * width, clientY: bottom - y * height });
          send(window, "pointerup");
          send(window, "pointermove", { clientX: 0, clientY: 0 });  // no longer held
        };
        const press = (key, arrow) => wall(key).dispatchEvent(
          new KeyboardEvent("keydown", { key: arrow, bubbles: true }));
        const note = () => found.push({ ...numbers(), bars: all(".levels .meter")
            .map(node => [node.textContent, node.style.getPropertyValue("--share")]),
          behind: text("behind-words"), levels: all('#rewards [data-key^="answer"]')
            .map(node => parseFloat(node.style.getPropertyValue("--share")) / 100) });
        const notice = () => ["changed", "reset", "first"].map(id => $(id).checkVisibility());
        await go("all"); check("no notice yet", notice(), "false,false,true");
        await go("model"); drag("1 0", .3, .5);  // along the wall, which does not move
        check("still no notice", notice(), "false,false,true");
        drag("2 1", .6, .9); note();  // B now mostly ends in 14 eggs
        drag("0 0", .3, .5); press("0 0", "ArrowRight");
        drag("3 2", .9, 5); press("1 0", "ArrowDown");
        for (const step of order.slice(0, 6)) {
          await go(step);
          check(`${step}: a way back, and no sentence about the first model`,
            notice(), `true,true,false`);
          const words = steps[order.indexOf(step)].innerText;
          check(`${step}: nothing that was so before`, /mostly from|18 and 9/.test(words), false);
          const { bottom } = $("reset").getBoundingClientRect();
          check("in view", bottom > 0 && bottom < innerHeight);
        }
        await go("all"); note();
        await go("darts");
        check("the darts hit the first model", numbers().prior, EGGS.prior);
        check("which is said", text("changed").includes("darts use the first model"));
        check("in view", $("changed").checkVisibility());
        await go("all"); $("reset").click(); note();
        check("as before", notice(), "false,false,true");"""
    found = in_browser(tmp_path, steps)
    first, second, reset = ([torch.tensor(g[k]) for k in ("prior", "likelihood")] for g in found)
    same(first[1][1].tolist(), torch.tensor([0.05, 0.85, 0.05, 0.05]))
    same(second[0].tolist(), torch.tensor([0.31, 0.49, 0.2]))
    same(second[1][0].tolist(), torch.tensor([0.49, 0.41, 0.05, 0.05]))
    same(second[1][2].tolist(), torch.tensor([0.03, 0.01, 0.95, 0.01]))  # a slice keeps a hundredth
    for g, model in zip(found, (first, second, reset), strict=True):
        rho = exact_cer(*model)[:, 0]
        same(g["rho"], rho)
        if model is not first:
            same(g["levels"], rho)
            assert g["behind"].endswith(f"= {short(rho[1])}")
    for (said, share), rho in zip(found[0]["bars"], exact_cer(*first)[:, 0], strict=True):
        assert said == short(rho) and float(share[:-1]) == pytest.approx(100 * rho.item(), abs=1e-4)
    assert exact_cer(*first)[1, 0] < 0.3 < exact_cer(*reset)[1, 0]


def test_two_moves_are_bayes_rule(tmp_path):
    """The slices of an answer keep their areas in the first move, and their proportions in the
    second. Also for a reader who wants no motion."""
    steps = """await go("gather");
        for (const frame of [0, 1, 2]) {
          $("frames").children[frame].click();
          found.push([...$("behind").children].slice(0, 3).map(({ style }) =>
            ["width", "height", "--share"].map(x => parseFloat(style.getPropertyValue(x)) / 100)));
        }
        const { prior, likelihood } = numbers(); found.push([prior, likelihood]);"""
    *frames, model = in_browser(tmp_path, steps)
    joint = torch.tensor(model[0]) * torch.tensor(model[1])[:, 1]
    slices, tall, stretched = (torch.tensor(frame) for frame in frames)
    same((slices[:, 0] * slices[:, 1]).tolist(), joint)
    same(tall[:, :2].tolist(), torch.stack([joint, torch.ones(3)], 1))
    same(stretched[:, 0].tolist(), joint / joint.sum())
    assert (slices[:, 2] == tall[:, 2]).all() and (tall[:, 2] == stretched[:, 2]).all()


def test_the_matrix(tmp_path):
    """Its cells are W and P. Those that M leaves out are blank. Equal rows are read once."""
    steps = """await go("columns"); all("[data-guess=M] button")[2].click();
        for (const M of [8, 4, 1]) {
          $("M").value = M; $("M").dispatchEvent(new Event("input"));
          const cells = [...$("matrix").children], { k, group } = numbers();
          found.push({ group, cells: cells.slice(0, 72).map(node => node.textContent),
            blank: cells.slice(0, 72).map(node => node.matches(".none")),
            lit: all("#matrix .lit")[0].style.bottom === cells[8 * k].style.bottom,
            tops: [0, 8, 64].map(i => parseFloat(cells[i].style.bottom) +
              parseFloat(cells[i].style.height)),
            cost: all("[data-say=cost]")[0].textContent, likelihood: EGGS.likelihood });
        }
        check("dots for two answers", all("#costs .dots").length, 8);
        const pairs = range(200).flatMap(seed => {  // rewards of “14 eggs” and “18” in a group
          const { a, R } = judge(EGGS, throwDarts(1 + seed), 1);
          const of = k => R.filter((_, i) => a[i] === k);
          return of(1).flatMap(right => of(2).map(wrong => wrong >= right));
        });
        check("one time in five", (sum(pairs) / pairs.length).toFixed(1), "0.2");
        check("which is said", /one time in five/.test(all("[data-step=columns]")[0].innerText));
        found.push([...$("costs").rows].map(row => row.innerText.replace(/\\s+/g, " ")));"""
    *matrices, costs = in_browser(tmp_path, steps)
    spreads = {8: (32, ".440 ± .041"), 4: (20, ".455 ± .054"), 1: (7, ".437 ± .157")}
    for seen, (M, (readings, spread)) in zip(matrices, spreads.items(), strict=True):
        assert any(row.startswith(f"{M} {readings} {spread} ") for row in costs)
        g, likelihood = seen["group"], torch.tensor(seen["likelihood"])
        check_group(g, likelihood, M)
        W = [[("–" if w is None else short(w, 2)) for w in row] for row in g["W"]]
        asked = [any(row[j] is not None for row in g["W"]) for j in range(8)]
        P = [short(p, 2) if asked[j] else "–" for j, p in enumerate(likelihood[g["s"], 0].tolist())]
        assert seen["cells"] == sum([*W, P], []) and seen["lit"]
        assert seen["blank"] == [cell == "–" for cell in seen["cells"]]
        read = {(a, j) for a, row in zip(g["a"], g["W"]) for j in range(8) if row[j] is not None}
        read |= {(0, j) for j in range(8) if asked[j]}  # P is the row of 14, answer 0
        high = 100 / 9.4  # of nine rows, P a little apart
        assert seen["tops"] == pytest.approx([100, 100 - high, high])
        more = f" + {len(read) - 4 * M} for P" if M < 8 else ""
        assert seen["cost"] == f"= {M}: 4 answers × {M}{more} = {len(read)} readings"
        assert len(read) == readings


def test_next_leads_on_from_every_step(tmp_path):
    """It first shows what is hidden of a step, a visible piece at a time."""
    steps = """for (const guessed of [false, true]) {
          for (const guess of all(".guess")) guess.classList.toggle("done", guessed);
          for (const [k, place] of places.entries()) {
            const next = places[k + 1]?.getBoundingClientRect.bind(places[k + 1]);
            place.scrollIntoView(); follow();
            for (let presses = 0; next && document.activeElement !== places[k + 1]; presses++) {
              const { top } = next();
              place.lastChild.click(); follow();
              check(`step ${k} moves`, top - next().top > 8 && presses < 9);
            }
          }
        }"""
    in_browser(tmp_path, steps)


def test_tab_reaches_all_in_reading_order(tmp_path):
    """A step, its controls, those of its picture, and then Next."""
    steps = """await go("all");
        const next = steps[order.indexOf("all")].lastChild;
        const kind = node => node.closest(".guess") ? "guess" : node.closest("#chips") ? "chips" :
          [...node.classList].at(-1) ?? node.tagName;
        const tab = (node, shiftKey) => node.dispatchEvent(
          new KeyboardEvent("keydown", { key: "Tab", shiftKey, bubbles: true, cancelable: true }));
        all("[data-guess] button")[0].focus();
        for (let k = 0; k < 25 && document.activeElement !== next; k++) {
          found.push(kind(document.activeElement)); tab(document.activeElement);
        }
        check("the end", document.activeElement === next);
        tab(next); check("the next step", document.activeElement.dataset.step, "darts");
        tab(document.activeElement, true); check("and back", document.activeElement === next);
        steps[order.indexOf("row")].focus(); await drawn();  // it has no control of its own
        tab(document.activeElement); check("its picture", kind(document.activeElement), "chips");"""
    walls = ["upright"] * 2 + ["wall"] * 9
    assert in_browser(tmp_path, steps) == ["guess"] * 3 + walls + ["chips"] * 4


def test_learning(tmp_path):
    """What the settings say, after a guess."""
    steps = """await go("slip"); $("race").scrollIntoView(); await drawn();
        check("nothing before a guess", $("curves").innerHTML + Object.keys(measured), "");
        for (const setting of Object.keys(SETTINGS)) {
          learn(setting); check("hidden", all(".two")[0].checkVisibility(), false);
          $("race").querySelector("button").click();
          while (!/CER needs/.test(text("result"))) await drawn();
          check("dots", all("#lengths .dots").length, 4);
          found.push([...text("result").matchAll(/(\\d+) steps/g)].map(([, n]) => +n));
        }"""
    ratios = [ours / exact for ours, exact in in_browser(tmp_path, steps)]
    assert ratios == pytest.approx([0.6, 1, 1, 0.45], rel=0.15)


def group(step, R=None, **more):
    """One line of a run's file: four samples, of which the second is cut off. R: samples.jsonl."""
    line = {"step": step, "question": "Ana has\n\n3 bags.", "references": ["14", "14 eggs"]}
    line |= {"answers": ["14", None, "<img src>", "14"], "truncated": [False, True, False, False]}
    line |= {"texts": [r"So \boxed{14}", "I count the\neggs and", "<img src>", "14!"]}
    return json.dumps(line | ({"R": R} if R else {}) | more) + "\n"


def test_the_group_of_the_troll(tmp_path):
    """The page's real group is the README's. Its numbers are those of its file and of cer.py."""
    steps = """await drawn();
        found.push(JSON.parse($("real-group").textContent.replace(/\\n/g, " ")));
        const names = [...$("samples").children].map(node => node.textContent.replace(/[✓✗] /, ""));
        const seen = {};
        names.forEach((name, k) => {
          $("samples").children[k].click();
          (seen[name] ??= []).push([text("run-behind-words"), text("text")]);
        });
        check("its text", $("troll").checkVisibility());
        check("on a narrow screen the squares are large", $("run-behind").clientWidth > 200);
        check("one reference", /P is the sum/.test(text("asked")), false);
        const verdicts = [...$("samples").children].map(node => node.textContent);
        found.push({ seen, CER: groups[0].CER, verdicts, told: text("troll") });"""
    page, shown = in_browser(tmp_path, steps)
    with TROLL.open() as file:
        ours = json.loads(file.readline())
    for name in "references", "answers", "truncated", "R", "distinct_answers", "columns":
        assert page[name] == ours[name]
    assert page["log_W"] == ours["log_W"] and page["log_P"] == ours["log_P"]
    # … stands for what is left out
    for text, whole in zip(page["texts"], ours["texts"], strict=True):
        assert whole.endswith(text.split("… ")[-1].split("[…] ")[-1])
    R = cer(torch.tensor(ours["log_W"]), torch.tensor(ours["log_P"])).tolist()
    R = dict(zip(ours["distinct_answers"], R, strict=True))
    P = dict(zip(ours["columns"], torch.tensor(ours["log_P"]).exp().tolist(), strict=True))
    same(shown["CER"], torch.tensor([R.get(answer, 0.0) for answer in ours["answers"]]))
    for answer, reward in R.items():
        own = [p for i, p in P.items() if ours["answers"][i] == answer]
        said = [words.split("P of its own solution ") for words, _ in shown["seen"][answer]]
        assert {level for level, _ in said} == {
            f"level {short(reward)}" if reward > 5e-4 else "level 4e-5"
        }
        assert sorted(p for _, p in said) == sorted(
            short(p, 4) if p > 5e-5 else "4e-5" for p in own
        )
    board = {
        "three": ".250",
        "three days": ".231",
        "three whole days": ".221",
        "3": ".100",
        "a few days": ".042",
    }
    assert {answer: short(R[answer]) for answer in board} == board  # README's
    right = {name[2:] for name in shown["verdicts"] if name[0] == "✓"}
    assert right == {"three", "three days", "three whole days", "3"}
    assert "P is .0001" in shown["told"] and "gives it .100" in shown["told"]
    row = torch.tensor(ours["log_W"])[ours["distinct_answers"].index("3")].softmax(0).tolist()
    words = sum(
        w for i, w in zip(ours["columns"], row, strict=True) if ours["answers"][i] in right - {"3"}
    )
    assert 0.3 < words < 0.37  # “a third of its row”
    headers = [said.split("\n")[0] for _, said in shown["seen"]["(no answer)"]]
    assert sorted(re.sub("Sample [0-9]+ ", "", header) for header in headers) == [
        *[r"(no closed \boxed{})"] * 2,
        *[r"(no closed \boxed{}, cut off)"] * 2,
    ]


def test_the_files_of_a_run(tmp_path, finished_run):
    matrices = {"distinct_answers": ["14", "<img src>"], "columns": [0, 2, 3]}
    matrices |= {"log_W": [[-1000.0, -1002.0, -1001.0], [None, -1.0, None]], "log_P": [-1, -5, -2]}
    R = cer(torch.tensor(matrices["log_W"][0]), torch.tensor(matrices["log_P"])).item()
    run = group(1, [0.4, 0, 0.1, 0.4], **matrices)
    run += group(2, [0.5] * 4, right=[True, None, False, None], **matrices)
    no_box = dict.fromkeys(["distinct_answers", "columns", "log_W", "log_P"], [])
    no_box = group(3, [0.0] * 4, right=[False] * 4, answers=[None] * 4, **no_box)
    evaluated = group(4, right=[True, False, False, True], index=7, dataset="x.jsonl")
    bad = [group(1, [0.5] * 3), "null\n", '{"text": {}}\n', group(1, [0] * 4, log_W=[[9]])]
    bad += [group(1, [0] * 4, right=["right"] * 4), '{"question": "half a li']
    files = [(finished_run / f"{name}.jsonl").read_text() for name in ("samples", "evaluations")]
    steps = f"""check("a real group", groups.length === 1 && $("run-behind").children.length > 5);
        const shown = id => $(id).checkVisibility(), names = () => [...$("samples").children]
          .map(node => node.textContent), first = source;
        check("two wordings", new Set(names().filter(name => name[0] === "✓")).size > 1);
        for (const sample of names().keys()) {{
          $("samples").children[sample].click();
          check("its level is R", text("run-behind-words").slice(6).split("P")[0],
            text("run-rewards-words").slice(2).split(",")[0]);
        }}
        await open("{{");
        check("a broken file", text("opened"),
          `f cannot be shown: line 1 is no JSON. Below is still ${{first}}`);
        await open({json.dumps(run)} + "\\n  \\n{{");
        check("a bad line", text("opened"), "f: 2 groups. Left out: 1 (line 5 is no JSON).");
        check("the best", ["samples", "run-rewards-words", "run-behind-words"].map(text).join("|"),
          "1414<img src>(no answer)|R .400, advantage +.233|level {short(R)}" +
            "P of its own solution .3679");
        check("a box", [$("text").textContent, all("mark").length], "Sample 1\\n\\nSo 14,1");
        check("all references", text("asked").endsWith("Reference: 14 or 14 eggs (verbatim in 2 " +
          "samples). P is the sum of their probabilities."));
        check("the troll's text is gone", $("troll").checkVisibility(), false);
        $("index").value = 2; $("index").onchange({{ target: $("index") }});
        check("who is right", names().sort(), "(no answer),14,✓ 14,✗ <img src>");
        check("hues", all("#run-behind .slice").map(node => node.classList[2]).sort(), "A,B,C");
        $("samples").children[2].click();
        check("hostile texts", text("text").endsWith("<img src>") && !document.images.length);
        for (const line of {json.dumps(bad)}) {{
          await open(line);
          check("the file", /^f cannot be shown: line 1 (has no|is no JSON)/.test(text("opened")));
          check("one line number", text("opened").match(/line/g).length, 1);
          check("the group that was open", groups.length, 2);
          check("its name", text("opened").endsWith("Below is still f"));
        }}
        await open({json.dumps(no_box)});
        check("no box", ["boxless", "run-behind", "run-rewards"].map(shown), "true,false,false");
        check("no verdict without an answer", names(), Array(4).fill("(no answer)"));
        await open({json.dumps(evaluated)});
        check("an evaluation", [shown("boxless"), shown("run-rewards"), ...names()],
          "false,false,✓ 14,✓ 14,(no answer),✗ <img src>".split(","));
        for (const file of {json.dumps(files)}) {{
          await open(file);
          found.push([groups.length, $("samples").children.length]);
        }}"""
    assert in_browser(tmp_path, steps) == [[8, 4], [9, 2]]
